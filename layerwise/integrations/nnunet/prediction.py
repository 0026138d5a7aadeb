"""predict: volumes segmented by a network that nnU-Net trained, each over all ranks."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import astuple, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from rich.console import Console
from rich.progress import Progress
from torch import Tensor, nn

from layerwise.api.arguments import ParallelOptions
from layerwise.api.parallelize import parallelize
from layerwise.comm.base import Comm
from layerwise.comm.start import default_device
from layerwise.comm.together import agree, patiently
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.inference.cases import Cases
from layerwise.inference.digest import values_digest
from layerwise.inference.predict import Predicted, predicted
from layerwise.inference.resample import resampled
from layerwise.inference.results import NiftiFolder
from layerwise.inference.rounds import compute_round, predictor_of, rounds_of, written_before
from layerwise.integrations.nnunet.cases import PreparedCase, Volume, prepare
from layerwise.integrations.nnunet.folder import TrainedFolder
from layerwise.partition.place import Each
from layerwise.run.parallel import of
from layerwise.train.score import evaluating
from layerwise.volumes.sources import foreign

ENDINGS = (".nii.gz", ".nii")


def predict(
    model_folder: str | os.PathLike[str],
    samples: str | os.PathLike[str] | Sequence[str | Sequence[str]],
    out: str | os.PathLike[str],
    *,
    fold: int | str = 0,
    checkpoint: str = "checkpoint_final.pth",
    network: nn.Module | None = None,
    window: Sequence[int] | Literal["patch"] | None = "patch",
    overlap: float = 0.5,
    mirror: bool = True,
    memory_limit: float | str | None = None,
    overwrite: bool = False,
    progress: bool | None = None,
    device: torch.device | str | None = None,
    options: ParallelOptions | None = None,
) -> Predicted:
    """Writes the labels of every case into `out`, as nnU-Net's predictor does, with each window or volume on all ranks.

        layerwise.integrations.nnunet.predict("nnUNetTrainer__nnUNetPlans__3d_fullres", "imagesTs", "labels")

    Images are cropped, normalised and resampled as the plans say (by one rank a case, into a file that the others read
    boxes of); logits are resampled to the images' grid and become labels box by box, so no rank has all of them. Every
    rank calls it alike.

    Args:
        model_folder: Where nnU-Net wrote plans.json, dataset.json and fold_0. Nothing in it is unpickled or run.
        samples: A folder of NAME_0000.nii.gz, NAME_0001.nii.gz, ..., one file a channel; or a list of cases, each a
            file or the list of its channels' files.
        out: A folder for NAME.nii.gz, on a disk that all ranks see.
        fold: Which fold's network.
        checkpoint: The file's name.
        network: One that returns the logits alone, where a trainer builds its own. None: that of the plans.
        window: "patch": nnU-Net's windows. None: each volume at once where it fits, which needs no seams but gives
            norms of its own statistics. Or extents, in the plan's order of dimensions.
        overlap: The share of a window that its neighbour covers, too.
        mirror: The mean over the mirrored images that the network was trained for.
        memory_limit: As `layerwise.predict` has it.
        overwrite: Also cases whose labels are there.
        progress: A bar on rank 0. None: where it writes to a terminal.
        device: What this rank computes on. None: its GPU, if there is one.
        options: As `layerwise.parallelize` has them.

    Returns:
        The names of cases that were written, and of those that were there.

    Raises:
        LayerwiseError: The folder, its plans or the cases will not do; or some cases failed, by name, after the others
            were written.
        CommError: A rank is gone.
    """
    trained = TrainedFolder.read(model_folder, fold, checkpoint, built=network is not None)
    cases = _cases(samples, trained.channels)
    here = default_device(int(os.environ.get("LOCAL_RANK", "0"))) if device is None else torch.device(device)
    loaded = trained.load_into(trained.network() if network is None else network).to(here)
    example = torch.empty(1, trained.channels, *trained.patch, device="meta")
    model = parallelize(
        loaded, example, inference=True, io="boxes", verbose=False, options=options or ParallelOptions()
    )
    world = of(model).comm
    results = LabelFolder(os.fspath(out), [files[0] for files in cases.values()], trained)
    extents = trained.patch if window == "patch" else window
    results.digest = values_digest(model, extents, overlap, mirror, trained.plans, trained.regions, trained.mirror)
    there = written_before(world, results, [] if overwrite else list(cases))
    todo = [name for name in cases if name not in there]
    failed = dict[str, str]()
    bar = Progress(console=Console(stderr=True), transient=True)
    bar.disable = world.rank > 0 or not (bar.console.is_terminal if progress is None else progress)
    together = [todo[i : i + world.size] for i in range(0, len(todo), world.size)]  # a rank prepares one of them
    with evaluating(model), torch.inference_mode(), results.open(world), _beside(world, Path(out)) as folder, bar:
        for names in bar.track(together, description="predict"):
            ready = _prepared(world, trained, {name: cases[name] for name in names}, folder, failed)
            if ready:
                results.cases = list(ready.values())
                results.files = [cases[name][0] for name in ready]
                stacked = Cases.of(model, [case.file for case in ready.values()], 0)
                predictor = predictor_of(
                    model, replace(stacked, names=tuple(ready)), 0, None, extents, overlap,
                    "".join(stacked.labels[axis] for axis in trained.mirror) if mirror else "", memory_limit,
                    gaussian="nnunet",
                )  # fmt: skip
                for numbers in rounds_of(predictor, world, range(len(ready))):
                    failed |= compute_round(predictor, world, results, numbers)
    return predicted(tuple(cases), there, failed)


class LabelFolder(NiftiFolder):
    """A folder of label volumes, made of logits on the plan's grid.

    Args:
        folder: Its path.
        files: Of each case the image whose place in the body the labels take over.
        trained: What its labels are.
    """

    def __init__(self, folder: str, files: Sequence[str], trained: TrainedFolder) -> None:
        super().__init__(folder, files)
        self.trained, self.cases = trained, list[PreparedCase]()

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        case = self.cases[number]
        like = torch.empty(0, dtype=torch.float32, device=self.comm.device)
        boxes, x = resampled(self.comm, boxes, x, like, case.cropped, case.orders)
        boxes = tuple(None if box is None else Box(box.lo[1:], box.hi[1:]) for box in boxes)
        super().write(number, name, boxes, None if x is None else self._labels(x))

    def volume(self, number: int, array: Volume) -> Volume:
        backward = [int(axis) for axis in self.trained.plans["transpose_backward"]]
        labels = self.cases[number].labelled(array).transpose(backward).T  # as the file has it, (x, y, z)
        return labels.astype(np.uint8 if labels.max() < 255 else np.uint16)

    def _labels(self, x: Tensor) -> Tensor:
        """Labels of logits (classes, ...), as nnU-Net's LabelManager makes them."""
        if self.trained.regions is None:
            return x.argmax(0).to(torch.int32)
        made = torch.zeros(x.shape[1:], dtype=torch.int32, device=x.device)
        for region, label in zip(x, self.trained.regions, strict=True):
            made[region.sigmoid() > 0.5] = label
        return made


def _cases(samples: object, channels: int) -> dict[str, list[str]]:
    """The files of each case, by its name. LayerwiseError where there are none, or two of one name."""
    listed: list[list[str]]
    if isinstance(samples, str | os.PathLike):
        folder = Path(samples)
        first = sorted(path for path in folder.glob("*_0000.nii*") if path.name.endswith(ENDINGS))
        listed = [
            [
                os.fspath(path.with_name(path.name.replace("_0000.nii", f"_{channel:04d}.nii")))
                for channel in range(channels)
            ]
            for path in first
        ]
        if not listed:
            raise LayerwiseError(f"folder {os.fspath(folder)!r} has no files such as NAME_0000.nii.gz")
    elif isinstance(samples, Sequence):
        listed = [
            [os.fspath(case)] if isinstance(case, str | os.PathLike) else list(map(os.fspath, case)) for case in samples
        ]
    else:
        raise LayerwiseError("give a folder of NAME_0000.nii.gz, or a list of cases")
    named: dict[str, list[str]] = {}
    for files in listed:
        if not files or not all(file.endswith(ENDINGS) for file in files):
            raise LayerwiseError(f"a case is files that end in {' or '.join(ENDINGS)}, not {files}")
        name = Path(files[0]).name.removesuffix(".gz").removesuffix(".nii").removesuffix("_0000")
        if name in named:
            raise LayerwiseError(f"two cases are called {name!r}: give files of other names")
        named[name] = files
    return named


def _prepared(
    world: Comm, trained: TrainedFolder, cases: dict[str, list[str]], folder: Path, failed: dict[str, str]
) -> dict[str, PreparedCase]:
    """Each rank prepares one of the cases, at most as many as there are ranks. failed: gets the others' reasons."""

    def act() -> tuple[None, JSON]:
        if world.rank >= len(cases):
            return None, None
        files = list(cases.values())[world.rank]
        try:
            with foreign("it cannot be prepared"):
                return None, list(astuple(prepare(trained, files, folder / f"{world.rank}.npy")))
        except LayerwiseError as error:
            return None, str(error)

    told = patiently(world, act)[1]
    failed |= {name: reason for name, reason in zip(cases, told, strict=False) if isinstance(reason, str)}
    return {
        name: PreparedCase(case[0], *map(tuple, case[1:]))
        for name, case in zip(cases, told, strict=False)
        if not isinstance(case, str)
    }


@contextmanager
def _beside(world: Comm, out: Path) -> Iterator[Path]:
    """A folder within `out` for prepared cases, the same on all ranks, which rank 0 removes."""

    def make() -> tuple[None, str]:
        if world.rank:
            return None, ""
        made = out / f".{os.urandom(8).hex()}"
        made.mkdir(parents=True)
        return None, os.fspath(made)

    folder = Path(agree(world, make)[1][0])
    try:
        yield folder
    finally:
        if world.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
