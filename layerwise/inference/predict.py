"""predict: a network's answers for volumes of any size, of which every rank has its boxes alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from layerwise.comm.base import Comm, CommError
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.inference.blend import move
from layerwise.inference.cases import Cases
from layerwise.inference.predictor import Boxed, Predictor, Reduce
from layerwise.inference.results import Results, results_of
from layerwise.partition.place import Each
from layerwise.quantities import parse_bytes
from layerwise.run.parallel import ParallelModule
from layerwise.tensorfile import DTYPE_OF, dtype_name


@dataclass(frozen=True, slots=True)
class Predicted:
    """What `predict` did.

    Attributes:
        written: The names of the samples that it wrote.
        skipped: The names of those that an earlier run had written.
    """

    written: tuple[str, ...]
    skipped: tuple[str, ...]


def predict(
    model: ParallelModule,
    samples: object,
    out: object,
    *,
    output: int = 0,
    reduce: Reduce | None = None,
    window: Sequence[int] | None = None,
    overlap: float = 0.5,
    mirror: str = "",
    memory_limit: float | str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
) -> Predicted:
    """Writes an output of every sample into `out`: no rank ever has more than its boxes of a sample or its output.

        model = layerwise.parallelize(network, x, inference=True, io="boxes")
        layerwise.predict(model, ["a.nii.gz", "b.nii.gz"], "labels", reduce="argmax")

    Samples may have sizes of their own. One that the network does not take as it is, is padded with zeros to what its
    strides ask for; one that is too large for all devices together is computed in windows of the planned size, whose
    outputs are averaged with a Gaussian's weights. Every rank calls it alike.

    Args:
        model: A parallel module whose plan has io "boxes" or splits samples alone: then each rank computes samples of
            its own. It is in evaluation mode meanwhile.
        samples: A `BoxLoader` of unchanged samples, or, for a network of one input, what a BoxLoader reads: an array
            (samples, ...), a file, or a list of files, one a sample (.npy, .zarr, .h5::name, .nii, .nii.gz).
        out: A .npy file, or an array to write into, for all samples, (samples, ...), of one shape; a .zarr group or a
            folder for an array a sample, under the name of its file (NIfTI where samples are). On a disk that all ranks
            see; nothing is there before it is complete.
        output: Which of the network's outputs.
        reduce: What is made of a box (samples, classes, ...) of the output before it is written: "argmax" (the class),
            "softmax", "sigmoid", or a function that computes position by position. None: nothing.
        window: Positions of a window, by dimension of a sample but for channels. None: windows are taken where a sample
            needs more than `memory_limit`, and have the planned size.
        overlap: The share of a window that its neighbour covers, too, in [0, 1).
        mirror: Dimensions such as "dhw": the mean over all ways to mirror a sample along them is taken.
        memory_limit: Bytes of a device, or a text such as "14GB". None: what a GPU has; no limit on a CPU.
        overwrite: Also samples that an earlier run has written are computed.
        progress: A bar on rank 0. None: where it writes to a terminal.

    Returns:
        The names of samples that were written, and of those that were there.

    Raises:
        LayerwiseError: The model, the samples or `out` will not do; or some samples failed, by name, after the others
            were written (at once where all are in one array).
        CommError: A rank is gone.

    Examples:
        >>> import layerwise, numpy, torch
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 3), torch.randn(2, 4), io="boxes", verbose=False)
        >>> out = numpy.zeros(6, numpy.uint8)
        >>> done = predict(model, numpy.ones((6, 4), numpy.float32), out, reduce="argmax")
        >>> len(done.written), bool((out == out[0]).all())
        (6, True)
    """
    world = model.comm
    cases = agree(world, lambda: (Cases.of(model, samples, output), None))[0]
    results = results_of(out, len(cases.names), cases.files)
    with _evaluating(model):
        predictor = _predictor(model, cases, output, reduce, window, overlap, mirror, memory_limit)
        there = agree(world, lambda: (None, [] if overwrite else list(filter(results.complete, cases.names))))[1][0]
        numbers = [number for number, name in enumerate(cases.names) if name not in there]
        failed = dict[str, str]()
        bar = Progress(console=Console(stderr=True), transient=True)
        bar.disable = world.rank > 0 or not (bar.console.is_terminal if progress is None else progress)
        rounds = _rounds(predictor, world, numbers)
        with results.open(world), bar:
            for numbers in bar.track(rounds, description="predict"):
                failed |= _round(predictor, world, results, numbers)
    written = tuple(name for name in cases.names if name not in there and name not in failed)
    if failed:
        told = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:4]) + "; ..." * (len(failed) > 4)
        raise LayerwiseError(f"{len(failed)} of {len(cases.names)} samples failed, {len(written)} are written: {told}")
    return Predicted(written, tuple(there))


def answer(
    model: ParallelModule,
    x: Tensor,
    *,
    output: int = 0,
    reduce: Reduce | None = None,
    window: Sequence[int] | None = None,
    overlap: float = 0.5,
    mirror: str = "",
    memory_limit: float | str | None = None,
) -> Tensor:
    """Returns an output of samples that every rank has in full, in full on every rank, as float32 or whole numbers.

    Args:
        model: As `predict` takes it.
        x: (samples, channels, ...), alike on all ranks, of any size; for networks of one input.
        output: Which of the network's outputs.
        reduce: What is made of each rank's box, before it is gathered: with "argmax" labels are, not logits.
        window: As `predict` has it.
        overlap: As `predict` has it.
        mirror: As `predict` has it.
        memory_limit: As `predict` has it.

    Returns:
        (samples, classes, ...), or what `reduce` makes of that.

    Raises:
        LayerwiseError: As `predict`.
    """
    cases = Cases.of(model, x.detach().cpu(), output)
    made = list[Tensor]()
    with _evaluating(model):
        predictor = _predictor(model, cases, output, reduce, window, overlap, mirror, memory_limit)
        for numbers in cases.batches(range(len(cases.names)), model.plan.batch):
            made += [_full(predictor.comm, *boxed) for boxed in predictor.batch(numbers)]
    return torch.stack(made)


@contextmanager
def _evaluating(model: ParallelModule) -> Iterator[None]:
    """Within it all of the model is in evaluation mode, and nothing is differentiated."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.inference_mode():
            yield
    finally:
        for module, training in modes:
            module.training = training


def _predictor(
    model: ParallelModule,
    cases: Cases,
    output: int,
    reduce: Reduce | None,
    window: Sequence[int] | None,
    overlap: float,
    mirror: str,
    memory_limit: float | str | None,
) -> Predictor:
    """How samples are computed here: by all ranks together, or by each rank alone where samples alone are split."""
    alone = model.sized(cases.planned).alone
    limits = agree(model.comm, lambda: (None, min(_limit(memory_limit, model.device), sys.float_info.max)))[1]
    comm = SoloComm(model.device) if alone else model.comm
    return Predictor(model, cases, comm, output, reduce, window, overlap, mirror, min(limits))


def _rounds(predictor: Predictor, world: Comm, numbers: Sequence[int]) -> list[list[int]]:
    """The samples of each round: of all ranks together, or one a rank. All ranks have those of rank 0."""
    alone = predictor.comm is not world

    def planned() -> tuple[None, list[list[int]]]:
        if alone:
            return None, [list(numbers[i : i + world.size]) for i in range(0, len(numbers), world.size)]
        return None, list(predictor.cases.batches(numbers, predictor.model.plan.batch))

    return list(agree(world, planned)[1][0])


def _round(predictor: Predictor, world: Comm, results: Results, numbers: Sequence[int]) -> dict[str, str]:
    """Computes and writes samples; returns by name why some failed. Every rank of `world` calls it alike."""
    names, failed = predictor.cases.names, dict[str, str]()
    together = predictor.comm is world
    try:
        if together:
            made = [*zip(numbers, predictor.batch(numbers), strict=True)]
        else:
            made = _one_each(predictor, world, numbers, failed)
        for number, boxed in made:
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
    """Each rank computes a sample of its own; the boxes that the ranks have of each, and what this one has."""

    def act() -> tuple[Tensor | None, JSON]:
        if world.rank >= len(numbers):
            return None, None
        try:
            ((_, x),) = predictor.batch([numbers[world.rank]])
        except LayerwiseError as error:
            return None, str(error)
        assert x is not None
        return x, list(x.shape)

    x, told = agree(world, act)
    made = list[tuple[int, Boxed]]()
    for rank, number in enumerate(numbers):
        shape = told[rank]
        if isinstance(shape, str):
            failed[predictor.cases.names[number]] = shape
        else:
            box = Box((0,) * len(shape), tuple(shape))
            owned = tuple(box if other == rank else None for other in range(world.size))
            made.append((number, (owned, x if rank == world.rank else None)))
    return made


def _full(comm: Comm, boxes: Each, x: Tensor | None) -> Tensor:
    """All of a tensor of which the ranks have boxes, on every rank."""
    held = [box for box in boxes if box is not None]
    full = Box((0,) * len(held[0].hi), tuple(map(max, *(box.hi for box in held), held[0].hi)))
    dtype = next(filter(None, comm.all_gather_text("" if x is None else dtype_name(x.dtype))))
    like = torch.empty(0, dtype=DTYPE_OF[dtype], device=comm.device)
    gathered = move(comm, x, boxes, (full,) * comm.size, like, "an answer")
    assert gathered is not None
    return gathered


def _limit(given: float | str | None, device: torch.device) -> float:
    """Bytes that a pass may take on a device."""
    if given is not None:
        return parse_bytes(given, "memory_limit")
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else float("inf")
