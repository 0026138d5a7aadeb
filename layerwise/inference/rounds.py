"""Rounds: the samples that ranks compute at a time, all together or one each, and which of them failed."""

from __future__ import annotations

import sys
from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.comm.base import Comm, CommError
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.inference.cases import Cases
from layerwise.inference.predictor import Boxed, Predictor, Reduce
from layerwise.inference.results import Results
from layerwise.quantities import parse_bytes
from layerwise.run.parallel import ParallelModule, of


def predictor_of(
    model: ParallelModule,
    cases: Cases,
    output: int,
    reduce: Reduce | None,
    window: Sequence[int] | None,
    overlap: float,
    mirror: str,
    memory_limit: float | str | None,
) -> Predictor:
    """Returns a predictor that uses all ranks together, or each rank alone if the plan splits samples only."""
    alone = of(model).sized(cases.planned).alone
    if memory_limit is not None and window is None and "memory_bytes" not in of(model).plan.predicted:
        raise LayerwiseError(
            "memory_limit= needs predicted memory, which a model that runs as written does not have: pass window="
        )
    limits = agree(of(model).comm, lambda: (None, min(_limit(memory_limit, of(model).device), sys.float_info.max)))[1]
    comm = SoloComm(of(model).device) if alone else of(model).comm
    return Predictor(model, cases, comm, output, reduce, window, overlap, mirror, min(limits))


def written_before(world: Comm, results: Results, names: Sequence[str]) -> list[str]:
    """Returns which of these samples an earlier run has written, as rank 0 sees them. Every rank must call it."""
    return list(agree(world, lambda: (None, [] if world.rank else list(filter(results.complete, names))))[1][0])


def rounds_of(predictor: Predictor, world: Comm, numbers: Sequence[int]) -> list[list[int]]:
    """Returns the samples of each round, together or one a rank. All ranks get rank 0's."""
    alone = predictor.comm is not world

    def planned() -> tuple[None, list[list[int]]]:
        if alone:
            return None, [list(numbers[i : i + world.size]) for i in range(0, len(numbers), world.size)]
        return None, list(predictor.cases.batches(numbers, of(predictor.model).plan.batch))

    return list(agree(world, planned)[1][0])


def compute_round(predictor: Predictor, world: Comm, results: Results, numbers: Sequence[int]) -> dict[str, str]:
    """Computes and writes samples; returns why some failed, by name. Every rank of `world` must call it alike."""
    names, failed = predictor.cases.names, dict[str, str]()
    together = predictor.comm is world
    try:
        if together:
            computed = [*zip(numbers, predictor.batch(numbers), strict=True)]
        else:
            computed = _one_each(predictor, world, numbers, failed)
        for number, boxed in computed:
            results.write(number, names[number], *boxed)
    except CommError:
        raise
    except LayerwiseError as error:
        failed |= {names[number]: str(error) for number in numbers if names[number] not in failed}
    if failed and not results.separate:
        raise LayerwiseError("; ".join(failed.values()))
    return failed


def _one_each(
    predictor: Predictor, world: Comm, numbers: Sequence[int], failed: dict[str, str]
) -> list[tuple[int, Boxed]]:
    """Computes one sample on each rank. Returns the ranks' boxes of each, and this rank's tensor."""

    def act() -> tuple[Tensor | None, JSON]:
        if world.rank >= len(numbers):
            return None, None
        try:
            ((_, x),) = predictor.batch([numbers[world.rank]])
        except LayerwiseError as error:
            return None, str(error)
        assert x is not None
        return x, list(x.shape)

    x, ranks = agree(world, act)
    computed = list[tuple[int, Boxed]]()
    for rank, number in enumerate(numbers):
        shape = ranks[rank]
        if isinstance(shape, str):
            failed[predictor.cases.names[number]] = shape
        else:
            box = Box.full(shape)
            owned = tuple(box if other == rank else None for other in range(world.size))
            computed.append((number, (owned, x if rank == world.rank else None)))
    return computed


def _limit(wanted: float | str | None, device: torch.device) -> float:
    """Returns the bytes that a pass may use on a device."""
    if wanted is not None:
        return parse_bytes(wanted, "memory_limit")
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else float("inf")
