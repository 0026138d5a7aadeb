"""predict: a network's answers for volumes of any size, of which every rank has its boxes alone."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor

from layerwise.comm.base import Comm, CommError
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.inference.blend import move
from layerwise.inference.cases import Cases
from layerwise.inference.predictor import Predictor, Reduce
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
    cases = Cases.of(model, samples, output)
    results = results_of(out, len(cases.names), cases.files)
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            alone = model.sized(cases.planned).alone
            comm = SoloComm(model.device) if alone else model.comm
            limit = _limit(memory_limit, model.device)
            predictor = Predictor(model, cases, comm, output, reduce, window, overlap, mirror, limit)
            return _all(predictor, model.comm, results, alone=alone, overwrite=overwrite, progress=progress)
    finally:
        model.train(training)


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
    training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            comm = SoloComm(model.device) if model.sized(cases.planned).alone else model.comm
            limit = _limit(memory_limit, model.device)
            predictor = Predictor(model, cases, comm, output, reduce, window, overlap, mirror, limit)
            made = [_full(comm, *boxed) for boxed in predictor.batch(range(len(cases.names)))]
    finally:
        model.train(training)
    return torch.stack(made)


def _full(comm: Comm, boxes: Each, x: Tensor | None) -> Tensor:
    """All of a tensor of which the ranks have boxes, on every rank."""
    held = [box for box in boxes if box is not None]
    full = Box((0,) * len(held[0].hi), tuple(map(max, *(box.hi for box in held), held[0].hi)))
    dtype = next(filter(None, comm.all_gather_text("" if x is None else dtype_name(x.dtype))))
    like = torch.empty(0, dtype=DTYPE_OF[dtype], device=comm.device)
    gathered = move(comm, x, boxes, (full,) * comm.size, like, "an answer")
    assert gathered is not None
    return gathered


def _all(
    predictor: Predictor, world: Comm, results: Results, *, alone: bool, overwrite: bool, progress: bool | None
) -> Predicted:
    """Computes and writes every sample; where one fails, the others go on. alone: each rank computes its own."""
    names, failed = predictor.cases.names, dict[str, str]()
    there = agree(world, lambda: (None, [] if overwrite else list(filter(results.complete, names))))[1][0]
    numbers = [number for number, name in enumerate(names) if name not in there]
    if alone:
        numbers = numbers[world.rank :: world.size] if results.separate else numbers * (world.rank == 0)
    most = 1 if alone else predictor.model.plan.batch
    bar = Progress(console=Console(stderr=True), transient=True)
    bar.disable = world.rank > 0 or not (bar.console.is_terminal if progress is None else progress)
    with results.open(world if not alone else predictor.comm), bar:
        for batch in bar.track(list(predictor.cases.batches(numbers, most)), description="predict"):
            try:
                for number, made in zip(batch, predictor.batch(batch), strict=True):
                    results.write(number, names[number], *made)
            except CommError:
                raise
            except LayerwiseError as error:
                if not results.separate:
                    raise
                failed |= {names[number]: str(error) for number in batch}
    failed = {name: why for here in agree(world, lambda: (None, failed))[1] for name, why in here.items()}
    written = tuple(name for name in names if name not in there and name not in failed)
    if failed:
        told = "; ".join(f"{name}: {why}" for name, why in list(failed.items())[:4]) + "; ..." * (len(failed) > 4)
        raise LayerwiseError(f"{len(failed)} of {len(names)} samples failed, {len(written)} are written: {told}")
    return Predicted(written, tuple(there))


def _limit(given: float | str | None, device: torch.device) -> float:
    """Bytes that a pass may take on a device."""
    if given is not None:
        return parse_bytes(given, "memory_limit")
    return float(torch.cuda.get_device_properties(device).total_memory) if device.type == "cuda" else float("inf")
