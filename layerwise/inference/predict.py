"""predict: a network's answers for volumes of any size, of which every rank has its boxes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from layerwise.arguments import Count, Natural, Range, checked
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.inference.blend import gather
from layerwise.inference.cases import Cases
from layerwise.inference.digest import values_digest
from layerwise.inference.predictor import Predictor, Reduce
from layerwise.inference.results import results_of
from layerwise.inference.rounds import compute_round, rounds_of
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.score import evaluating


@dataclass(frozen=True, slots=True)
class Predicted:
    """The samples that `predict` wrote, and those that it skipped.

    Attributes:
        written: The names of the samples that it wrote.
        skipped: The names of the samples that an earlier run had written.
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
    """Predicts every sample and writes its output into `out`; a rank has only its boxes of a sample and its output.

        boxes = layerwise.ParallelOptions(io="boxes")
        model = layerwise.parallelize(network, x, inference=True, options=boxes)
        layerwise.predict(model, ["a.nii.gz", "b.nii.gz"], "labels", reduce="argmax")

    Samples may differ in size. If the network does not accept a sample's size, it is padded with zeros to a multiple
    of the network's strides; if a sample is too large for all devices together, it is computed in windows of the
    planned size, whose outputs are averaged with Gaussian weights. Every rank must call it with the same arguments.

    Args:
        model: A parallel model whose plan has io "boxes", or splits samples only: then each rank computes its own
            samples. It is in evaluation mode meanwhile.
        samples: A `BoxLoader` of unchanged samples, or, for a network with one input, what a BoxLoader reads: an array
            (samples, ...), a file, or a list of files, one for each sample (.npy, .zarr, .h5::name, .nii, .nii.gz).
        out: For all samples, of one shape: a .npy file, or an array (samples, ...) to write into. For an array for each
            sample, under the name of its file: a .zarr group or a folder (NIfTI if samples are). It must be on a disk
            that all ranks see; a result appears once it is complete.
        output: Index of the network's output.
        reduce: Reduction of a box (samples, classes, ...) of the output before it is written: "argmax" (the class),
            "softmax", "sigmoid", or a function that works position by position. None: no reduction.
        window: Extents of a window, by dimension of a sample without channels. None: windows have the planned size,
            and are used if a sample needs more than `memory_limit`.
        overlap: The fraction of a window that its neighbour covers too, in [0, 1).
        mirror: Dimensions such as "dhw": results are averaged over all ways to mirror a sample along them.
        memory_limit: Bytes of a device, or a text such as "14GB". None: a GPU's memory; no limit on a CPU.
        overwrite: Whether to compute samples that an earlier run has written. Otherwise results of other weights or
            options raise an error.

    Returns:
        The names of samples that were written, and of those that existed.

    Raises:
        LayerwiseError: The model, the samples or `out` are not usable; or some samples failed: it names them after the
            others are written (or at once, if all are in one array).
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
    results = results_of(world, out, len(cases.names), cases.files)
    with evaluating(model), torch.inference_mode():
        predictor = Predictor(model, cases, output, reduce, window, overlap, mirror, memory_limit)
        results.digest = values_digest(model, output, _named(reduce), window, overlap, mirror, cases.planned)
        names = [] if overwrite or world.rank else cases.names
        there = agree(world, lambda: (None, [name for name in names if results.complete(name)]))[1][0]  # rank 0 sees
        numbers = [number for number, name in enumerate(cases.names) if name not in there]
        failed = dict[str, str]()
        bar = Progress(console=Console(stderr=True), transient=True)
        bar.disable = world.rank > 0 or not bar.console.is_terminal
        with results.open(), bar:
            for together in bar.track(rounds_of(predictor, world, numbers), description="predict"):
                failed |= compute_round(predictor, world, results, together)
    written = tuple(name for name in cases.names if name not in there and name not in failed)
    if failed:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:4]) + "; ..." * (len(failed) > 4)
        raise LayerwiseError(
            f"{len(failed)} of {len(cases.names)} samples failed, {len(written)} were written: {reasons}"
        )
    return Predicted(written, tuple(there))


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
    """Returns the full output on every rank, as float32 or integers, for samples that every rank has in full.

    Args:
        model: As in `predict`.
        x: (samples, channels, ...), of any size, equal on all ranks; for networks with one input.
        output: Index of the network's output.
        reduce: Reduction of each rank's box before the gather: with "argmax", labels are gathered, not logits.
        window: As in `predict`.
        overlap: As in `predict`.
        mirror: As in `predict`.
        memory_limit: As in `predict`.

    Returns:
        (samples, classes, ...), or its reduction.

    Raises:
        LayerwiseError: As in `predict`.
    """
    cases = Cases.of(model, x.detach().cpu(), output)
    outputs = list[Tensor]()
    with evaluating(model), torch.inference_mode():
        predictor = Predictor(model, cases, output, reduce, window, overlap, mirror, memory_limit)
        for numbers in cases.batches(range(len(cases.names)), of(model).plan.batch):
            for boxed in predictor.batch(numbers):
                full = gather(predictor.comm, *boxed, range(predictor.comm.size))
                assert full is not None
                outputs.append(full)
    return torch.stack(outputs)


def _named(reduce: object) -> object:
    """Returns what identifies `reduce` across runs: the name of a function at a module's top level, the text of an
    nn.Module, or any other function's code and closure.
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
