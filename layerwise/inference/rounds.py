"""Rounds: the samples that ranks compute at a time, all together or one each, and which of them failed."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from layerwise.comm.base import Comm, CommError
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.inference.predictor import Boxed, Predictor
from layerwise.inference.results import Results
from layerwise.run.parallel import of


def rounds_of(predictor: Predictor, world: Comm, numbers: Sequence[int]) -> list[list[int]]:
    """Returns the samples of each round, together or one a rank. All ranks get rank 0's."""

    def planned() -> tuple[None, list[list[int]]]:
        if predictor.comm is world:
            return None, list(predictor.cases.batches(numbers, of(predictor.model).plan.batch))
        return None, [list(numbers[i : i + world.size]) for i in range(0, len(numbers), world.size)]

    return list(agree(world, planned)[1][0])


def compute_round(predictor: Predictor, world: Comm, results: Results, numbers: Sequence[int]) -> dict[str, str]:
    """Computes and writes samples; returns why some failed, by name. Every rank of `world` must call it alike."""
    names, failed = predictor.cases.names, dict[str, str]()
    try:
        if predictor.comm is world:
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
