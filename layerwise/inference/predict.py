"""predict: a network's answers for volumes of any size, of which every rank has its boxes alone."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from layerwise.arguments import Count, Natural, Range, checked
from layerwise.comm.base import Comm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.inference.blend import move
from layerwise.inference.cases import Cases
from layerwise.inference.digest import values_digest
from layerwise.inference.predictor import Reduce
from layerwise.inference.results import results_of
from layerwise.inference.rounds import compute_round, predictor_of, rounds_of, written_before
from layerwise.partition.place import Each
from layerwise.run.parallel import ParallelModule, of
from layerwise.tensorfile import DTYPE_OF, dtype_name
from layerwise.train.score import evaluating


@dataclass(frozen=True, slots=True)
class Predicted:
    """The samples that `predict` wrote, and those that it left.

    Attributes:
        written: The names of the samples that it wrote.
        skipped: The names of those that an earlier run had written.
    """

    written: tuple[str, ...]
    skipped: tuple[str, ...]


@checked
def predict(
    model: ParallelModule,
    samples: object,
    out: object,
    *,
    output: Natural = 0,
    reduce: Reduce | None = None,
    window: Sequence[Count] | None = None,
    overlap: Annotated[float, Range(0, 1)] = 0.5,
    mirror: str = "",
    memory_limit: float | str | None = None,
    overwrite: bool = False,
) -> Predicted:
    """Writes an output of every sample into `out`: no rank ever has more than its boxes of a sample or its output.

        boxes = layerwise.ParallelOptions(io="boxes")
        model = layerwise.parallelize(network, x, inference=True, options=boxes)
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
        overwrite: Also samples that an earlier run has written are computed. Without it those of other weights or
            options are refused.

    Returns:
        The names of samples that were written, and of those that were there.

    Raises:
        LayerwiseError: The model, the samples or `out` will not do; or some samples failed, by name, after the others
            were written (at once where all are in one array).
        CommError: A rank is gone.

    Examples:
        >>> import layerwise, numpy, torch
        >>> options = layerwise.ParallelOptions(io="boxes", verbose=False)
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 3), torch.randn(2, 4), options=options)
        >>> out = numpy.zeros(6, numpy.uint8)
        >>> done = predict(model, numpy.ones((6, 4), numpy.float32), out, reduce="argmax")
        >>> len(done.written), bool((out == out[0]).all())
        (6, True)
    """
    world = of(model).comm
    cases = agree(world, lambda: (Cases.of(model, samples, output), None))[0]
    results = results_of(out, len(cases.names), cases.files)
    with evaluating(model), torch.inference_mode():
        predictor = predictor_of(model, cases, output, reduce, window, overlap, mirror, memory_limit)
        results.digest = values_digest(model, output, _named(reduce), window, overlap, mirror, cases.planned)
        there = written_before(world, results, [] if overwrite else cases.names)
        numbers = [number for number, name in enumerate(cases.names) if name not in there]
        failed = dict[str, str]()
        bar = Progress(console=Console(stderr=True), transient=True)
        bar.disable = world.rank > 0 or not bar.console.is_terminal
        rounds = rounds_of(predictor, world, numbers)
        with results.open(world), bar:
            for numbers in bar.track(rounds, description="predict"):
                failed |= compute_round(predictor, world, results, numbers)
    return predicted(cases.names, there, failed)


@checked
def answer(
    model: ParallelModule,
    x: Tensor,
    *,
    output: Natural = 0,
    reduce: Reduce | None = None,
    window: Sequence[Count] | None = None,
    overlap: Annotated[float, Range(0, 1)] = 0.5,
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
    outputs = list[Tensor]()
    with evaluating(model), torch.inference_mode():
        predictor = predictor_of(model, cases, output, reduce, window, overlap, mirror, memory_limit)
        for numbers in cases.batches(range(len(cases.names)), of(model).plan.batch):
            outputs += [_full(predictor.comm, *boxed) for boxed in predictor.batch(numbers)]
    return torch.stack(outputs)


def _named(reduce: object) -> object:
    """Returns what tells it from another between runs. Of a function at the top of a module that is its name; of a
    module its text; of any other function its code, and what it closes over.
    """
    if not callable(reduce):
        return reduce
    name = f"{reduce.__module__}.{getattr(reduce, '__qualname__', type(reduce).__qualname__)}"
    code = getattr(reduce, "__code__", None)
    if code is None:
        return f"{name} {reduce!r}"
    if "<" not in name:
        return name
    closed = [cell.cell_contents for cell in getattr(reduce, "__closure__", None) or ()]
    return f"{name} {code.co_code.hex()} {code.co_names} {code.co_consts} {closed}"


def predicted(names: Sequence[str], there: Sequence[str], failed: Mapping[str, str]) -> Predicted:
    """Returns what became of the samples. LayerwiseError where some failed: it names them, and says why."""
    written = tuple(name for name in names if name not in there and name not in failed)
    if failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:4]) + "; ..." * (len(failed) > 4)
        raise LayerwiseError(f"{len(failed)} of {len(names)} samples failed, {len(written)} are written: {reasons}")
    return Predicted(written, tuple(there))


def _full(comm: Comm, boxes: Each, x: Tensor | None) -> Tensor:
    """Returns all of a tensor of which the ranks have boxes, on every rank."""
    owned = [box for box in boxes if box is not None]
    full = Box.full(map(max, *(box.hi for box in owned), owned[0].hi))
    dtype = next(filter(None, comm.all_gather_text("" if x is None else dtype_name(x.dtype))))
    like = torch.empty(0, dtype=DTYPE_OF[dtype], device=comm.device)
    gathered = move(comm, x, boxes, (full,) * comm.size, like, "an answer")
    assert gathered is not None
    return gathered
