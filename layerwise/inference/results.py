"""Results: where predictions are written, box by box, and are complete or not there.

A folder or a Zarr group has an array a sample, under its name; a .npy file, or an array of the user's, has all samples,
which then have one shape.
"""

from __future__ import annotations

import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.comm.together import agree, alone
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.inference.blend import move
from layerwise.partition.place import Each
from layerwise.volumes.sources import foreign, mapped

LEAST_CHUNK = 16  # positions along a dimension of a Zarr chunk: smaller ones are many small files
MOST_CHUNK = 128


class Results(ABC):
    """A place for predictions. The ranks that compute a sample together call the methods alike."""

    separate = True  # whether each sample has an array of its own, and is complete where others are not
    digest = ""  # of the model and of what is made of its outputs
    comm: Comm

    @contextmanager
    def open(self, comm: Comm) -> Iterator[None]:
        """Opens the place, within which samples are written."""
        self.comm = comm
        yield

    def complete(self, name: str) -> bool:
        """Returns whether an earlier run has written this sample. Raises LayerwiseError if that was of another digest."""
        return False

    def _check(self, name: str, recorded: object) -> bool:
        """Returns what `complete` does, of a sample that is there."""
        if recorded != self.digest:
            raise LayerwiseError(
                f"the result {name!r} that is there is not known to be of these weights and options: give --overwrite "
                "(overwrite=True), or another folder"
            )
        return True

    @abstractmethod
    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        """Writes a sample: of its array rank r has the box boxes[r], and `x` is this rank's."""

    def _array(self, boxes: Each, x: Tensor | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Returns shape and element type of the array whose boxes the ranks have."""
        owned = [box for box in boxes if box is not None]
        types = self.comm.all_gather_text("" if x is None else str(x.dtype).removeprefix("torch."))
        return tuple(map(max, *(box.hi for box in owned), owned[0].hi)), np.dtype(next(filter(None, types)))

    def _first(self, act: Callable[[], object], what: str) -> None:
        """Has rank 0 do this, however long it takes, while the others wait."""

        def guarded() -> None:
            with foreign(what):
                act()

        alone(self.comm, guarded)

    def _in_turns(self, act: Callable[[], object], what: str, turn: str) -> None:
        """Has ranks of one `turn` do this together, after those of a turn before; where it fails on one, all raise."""

        def guarded() -> tuple[None, None]:
            with foreign(what):
                act()
            return None, None

        for each in sorted(set(self.comm.all_gather_text(turn))):
            agree(self.comm, guarded if turn == each else lambda: (None, None))

    def _rank(self) -> str:
        """Returns the turn of this rank alone."""
        return f"{self.comm.rank:09d}"


class NpyFolder(Results):
    """A folder with a .npy file a sample."""

    suffix = ".npy"

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def complete(self, name: str) -> bool:
        file, record = self._files(name)
        return file.exists() and self._check(name, record.read_text() if record.exists() else None)

    def _files(self, name: str) -> tuple[Path, Path]:
        """Returns a sample's file, and that of its digest."""
        return self.folder / f"{name}{self.suffix}", self.folder / ".layerwise" / f"{name}{self.suffix}"

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        shape, dtype = self._array(boxes, x)
        with _beside(self, *self._files(name)) as file:
            what = f"{name} cannot be written"
            self._first(lambda: np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape), what)
            self._in_turns(lambda: _put_into_file(file, boxes[self.comm.rank], x), what, _host())


class NiftiFolder(NpyFolder):
    """A folder with a .nii.gz file a sample, which rank 0 writes: labels of a volume fit where its logits do not.

    Args:
        folder: Its path.
        files: The samples' own NIfTI files, whose place in the body (affine) the results take over.
    """

    suffix = ".nii.gz"

    def __init__(self, folder: str, files: Sequence[str]) -> None:
        super().__init__(folder)
        self.files = files

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        shape, dtype = self._array(boxes, x)
        like = torch.empty(0, dtype=getattr(torch, dtype.name), device=self.comm.device)
        full = Box.full(shape)
        gathered = move(self.comm, x, boxes, (full, *(None,) * (self.comm.size - 1)), like, "labels")

        def save() -> None:
            import nibabel

            assert gathered is not None
            array = gathered.cpu().numpy()
            volume = np.moveaxis(array, 0, -1) if array.ndim > 3 else array
            affine = nibabel.load(self.files[number]).affine
            dtype = np.uint8 if volume.dtype == np.bool_ else volume.dtype
            nibabel.save(nibabel.Nifti1Image(volume.astype(dtype), affine, dtype=dtype), file)

        with _beside(self, *self._files(name)) as file:
            self._first(save, f"{name} cannot be written")


class ZarrGroup(Results):
    """A Zarr group with an array a sample; ranks that share one of its chunks write one after the other."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def complete(self, name: str) -> bool:
        if not (self.folder / name).exists():
            return False
        import zarr

        with foreign(f"{name} cannot be read"):
            recorded = zarr.open_array(self.folder / name, mode="r").attrs.get("layerwise")
        return self._check(name, recorded)

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        import zarr

        shape, dtype = self._array(boxes, x)
        chunks, apart = _chunks(shape, boxes)
        what = f"{name} cannot be written"

        def create() -> None:
            zarr.open_group(self.folder, mode="a")
            zarr.create_array(path, shape=shape, dtype=dtype, chunks=chunks, attributes={"layerwise": self.digest})

        with _beside(self, self.folder / name) as path:
            self._first(create, what)
            turn = "" if apart else self._rank()
            self._in_turns(lambda: _put(zarr.open_array(path, mode="r+"), boxes[self.comm.rank], x), what, turn)


class StackedResults(Results):
    """One array (samples, ...): a .npy file, or an array of the user's to write into."""

    separate = False

    def __init__(self, out: Any, samples: int) -> None:
        self.out, self.samples = out, samples
        self.shape: tuple[int, ...] | None = None  # of a sample
        self.file: Path | None = None
        self._files = ExitStack()

    @contextmanager
    def open(self, comm: Comm) -> Iterator[None]:
        self.comm = comm
        with self._files:
            yield

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        shape, dtype = self._array(boxes, x)
        if self.shape is None:
            self._open((self.samples, *shape), dtype)
            self.shape = shape
        if self.shape != shape:
            raise LayerwiseError(
                f"sample {number} makes an array of shape {shape}, and those before of {self.shape}: "
                "give a .zarr or a folder to write into"
            )
        what, box, file = f"samples from {number} cannot be written", boxes[self.comm.rank], self.file
        if file is not None:
            self._in_turns(lambda: _put_into_file(file, box, x, number), what, _host())
        else:  # the boxes of several ranks may share a chunk of it
            self._in_turns(lambda: _put(self.out, box, x, number), what, self._rank())

    def _open(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if not isinstance(self.out, str | os.PathLike):
            _check(self.out, shape, dtype)
            if type(self.out) is np.ndarray and self.comm.size > 1 and torch.distributed.is_initialized():
                raise LayerwiseError(
                    "each rank would fill its own array with its own boxes: give a path, or a Zarr array that all see"
                )
            return
        file = self._files.enter_context(_beside(self, Path(self.out), folders=False))
        self._first(lambda: np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape), "it cannot be made")
        self.file = file


def results_of(out: object, samples: int, files: Sequence[str | None]) -> Results:
    """Returns the place that `out` names. files: of the samples. Raises LayerwiseError if it will not do."""
    if not isinstance(out, str | os.PathLike):
        if not hasattr(out, "__setitem__") or not hasattr(out, "shape") or isinstance(out, Tensor):
            raise LayerwiseError(
                f"predict cannot write into a {type(out).__name__}: give a .npy, a .zarr or a folder, or an array"
            )
        return StackedResults(out, samples)
    path = os.fspath(out)
    kind = Path(path).suffix.lower()
    if kind == ".npy":
        return StackedResults(path, samples)
    if kind == ".zarr":
        return ZarrGroup(path)
    if kind and not Path(path).is_dir():
        raise LayerwiseError(f"predict makes .npy files, .zarr groups and folders, not {path!r}")
    nifti = [file for file in files if file is not None and file.lower().endswith((".nii", ".nii.gz"))]
    return NiftiFolder(path, nifti) if len(nifti) == samples else NpyFolder(path)


@contextmanager
def _beside(results: Results, target: Path, record: Path | None = None, *, folders: bool = True) -> Iterator[Path]:
    """Yields a path beside `target`, alike on all ranks; rank 0 renames it to that, or removes it on an error.

    record: the file that then has the digest; meanwhile there is none. folders: those above `target` are made.
    """
    comm = results.comm

    def choose() -> tuple[None, str]:
        if comm.rank:
            return None, ""
        if folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.is_dir() or (target.is_dir() and target.suffix == ".npy"):
            raise LayerwiseError(f"{os.fspath(target)!r} cannot be written: its folder is missing, or it is one")
        return None, os.fspath(target.with_name(f".{os.urandom(8).hex()}.{target.name}"))

    path = Path(agree(comm, choose)[1][0])

    def rename() -> tuple[None, None]:
        if comm.rank == 0:
            if record is not None:
                record.parent.mkdir(exist_ok=True)
                record.unlink(missing_ok=True)
            if target.is_dir():
                _remove(target)
            path.replace(target)
            if record is not None:
                record.write_text(results.digest)
        return None, None

    try:
        yield path
        agree(comm, rename)
    except BaseException:
        if comm.rank == 0:
            _remove(path)
        raise


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    with suppress(OSError):
        path.unlink()


def _put(array: Any, box: Box | None, x: Tensor | None, *before: int) -> None:
    """Writes a box into an array. before: what comes before the box's own dimensions."""
    if x is not None and box is not None and box.volume:
        values, kind = x.cpu().numpy(), np.dtype(array.dtype)
        if kind.kind in "iu" and values.dtype.kind in "iu" and int(values.max()) > np.iinfo(kind).max:
            raise LayerwiseError(f"it has a number {int(values.max())}, and what it is to be written into is of {kind}")
        array[(*before, *box.slices())] = values


def _put_into_file(file: Path, box: Box | None, x: Tensor | None, *before: int) -> None:
    """Writes a box into a .npy file that is opened for it, so that ranks elsewhere find it there when it is closed."""
    array = mapped(file, "r+")
    _put(array, box, x, *before)
    array.flush()


def _host() -> str:
    """Returns the turn of a node's ranks: those of two may hold the same page of a file on a disk that they share."""
    return socket.gethostname()


def _chunks(shape: tuple[int, ...], boxes: Each) -> tuple[tuple[int, ...], bool]:
    """Returns the chunks of a Zarr array, and whether no two boxes share one."""
    common = [gcd(extent, *(box.lo[dim] for box in boxes if box is not None)) for dim, extent in enumerate(shape)]
    cut = [any(box is not None and box.lo[dim] for box in boxes) for dim in range(len(shape))]
    apart = all(n >= LEAST_CHUNK for n, there in zip(common, cut, strict=True) if there)
    if not apart:
        return tuple(min(extent, MOST_CHUNK) for extent in shape), False
    most = [n if there else extent for n, there, extent in zip(common, cut, shape, strict=True)]
    chunks = tuple(
        next(n for n in range(min(m, MOST_CHUNK), 0, -1) if m % n == 0 or not there)
        for m, there in zip(most, cut, strict=True)
    )
    if any(there and n < LEAST_CHUNK for n, there in zip(chunks, cut, strict=True)):
        return tuple(min(extent, MOST_CHUNK) for extent in shape), False
    return chunks, True


def _check(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raises LayerwiseError if an array has another shape or kind: numpy would leave out what lies beyond it, unsaid."""
    if tuple(array.shape) != shape:
        raise LayerwiseError(
            f"predict writes {shape} numbers, and what it is to write into has shape {tuple(array.shape)}"
        )
    kinds = {"f": "f", "b": "biuf"}.get(dtype.kind, "iuf")
    if np.dtype(array.dtype).kind not in kinds:
        raise LayerwiseError(f"predict writes {dtype.name}, and what it is to write into has {array.dtype}")
