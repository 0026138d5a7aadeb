"""Results: writes predictions, box by box; each is either complete or absent.

A folder or a Zarr group has an array for each sample, under its name. A .npy file, or an array of the user's, has all
samples, which must have one shape.
"""

from __future__ import annotations

import os
import shutil
import socket
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from math import gcd
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.comm.together import agree, alone
from layerwise.errors import LayerwiseError, foreign
from layerwise.geometry import Box
from layerwise.inference.blend import full_of, gather
from layerwise.partition.place import Each
from layerwise.tensorfile import dtype_name
from layerwise.volumes.sources import mapped

LEAST_CHUNK = 16  # the least positions along a dimension of a Zarr chunk, to avoid many small files
MOST_CHUNK = 128


class Results(ABC):
    """A destination for predictions. The ranks that compute a sample together must call its methods alike."""

    separate = True  # whether each sample has its own array, which is complete independently of the others
    digest = ""  # of the model and of the reduction of its outputs

    def __init__(self, comm: Comm) -> None:
        self.comm = comm

    def open(self) -> AbstractContextManager[object]:
        """Opens the destination; write samples within it."""
        return nullcontext()

    def complete(self, name: str) -> bool:
        """Returns whether an earlier run has written this sample. Raises LayerwiseError if its digest differs."""
        return False

    def _check(self, name: str, recorded: object) -> bool:
        """Returns what `complete` does for an existing sample."""
        if recorded != self.digest:
            raise LayerwiseError(
                f"the existing result {name!r} may belong to other weights or options: pass --overwrite "
                "(overwrite=True), or use another folder"
            )
        return True

    @abstractmethod
    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        """Writes a sample: rank r has the box boxes[r] of its array, and `x` is this rank's."""

    def _array(self, boxes: Each, x: Tensor | None) -> tuple[tuple[int, ...], np.dtype[Any]]:
        """Returns the shape and element type of the array with these boxes."""
        full, dtype = full_of(self.comm, boxes, x)
        return full.shape, np.dtype(dtype_name(dtype))

    def _first(self, act: Callable[[], object], what: str) -> None:
        """Makes rank 0 do this, however long it takes, while the others wait."""
        alone(self.comm, foreign(what)(act))

    def _in_turns(self, act: Callable[[], object], what: str, turn: object) -> None:
        """Makes ranks of the same `turn` do this together, turn by turn; if it fails on one rank, all raise."""
        guarded = foreign(what)(act)
        for each in dict.fromkeys(self.comm.all_gather_object(turn)):
            agree(self.comm, (lambda: (guarded(), None)) if turn == each else lambda: (None, None))


class NpyFolder(Results):
    """A folder with a .npy file for each sample."""

    suffix = ".npy"

    def __init__(self, comm: Comm, folder: str) -> None:
        super().__init__(comm)
        self.folder = Path(folder)

    def complete(self, name: str) -> bool:
        file, record = self._files(name)
        return file.exists() and self._check(name, record.read_text() if record.exists() else None)

    def _files(self, name: str) -> tuple[Path, Path]:
        """Returns a sample's file, and its digest's file."""
        return self.folder / f"{name}{self.suffix}", self.folder / ".layerwise" / f"{name}{self.suffix}"

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        shape, dtype = self._array(boxes, x)
        with _beside(self, *self._files(name)) as file:
            what = f"{name} cannot be written"
            self._first(lambda: np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape), what)
            self._in_turns(lambda: _put_into_file(file, boxes[self.comm.rank], x), what, _host())


class NiftiFolder(NpyFolder):
    """A folder with a .nii.gz file for each sample. Rank 0 writes it, as a volume's labels fit there though its logits
    do not.

    Args:
        comm: The ranks.
        folder: Its path.
        files: The samples' NIfTI files, whose affine matrices the results copy.
    """

    suffix = ".nii.gz"

    def __init__(self, comm: Comm, folder: str, files: Sequence[str]) -> None:
        super().__init__(comm, folder)
        self.files = files

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        gathered = gather(self.comm, boxes, x, (0,))

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
    """A Zarr group with an array for each sample; ranks that share a chunk write one after the other."""

    def __init__(self, comm: Comm, folder: str) -> None:
        super().__init__(comm)
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
            turn = None if apart else self.comm.rank
            self._in_turns(lambda: _put(zarr.open_array(path, mode="r+"), boxes[self.comm.rank], x), what, turn)


class StackedResults(Results):
    """One array (samples, ...): a .npy file, or a user's array to write into."""

    separate = False

    def __init__(self, comm: Comm, out: Any, samples: int) -> None:
        super().__init__(comm)
        self.out, self.samples = out, samples
        self.shape: tuple[int, ...] | None = None  # of a sample
        self.file: Path | None = None
        self._files = ExitStack()

    def open(self) -> AbstractContextManager[object]:
        return self._files

    def write(self, number: int, name: str, boxes: Each, x: Tensor | None) -> None:
        shape, dtype = self._array(boxes, x)
        if self.shape is None:
            self._open((self.samples, *shape), dtype)
            self.shape = shape
        if self.shape != shape:
            raise LayerwiseError(
                f"sample {number} has an array of shape {shape}, but earlier ones have {self.shape}: write into a "
                ".zarr or a folder"
            )
        what, box, file = f"samples from {number} cannot be written", boxes[self.comm.rank], self.file
        if file is not None:
            self._in_turns(lambda: _put_into_file(file, box, x, number), what, _host())
        else:  # several ranks' boxes may share a chunk
            self._in_turns(lambda: _put(self.out, box, x, number), what, self.comm.rank)

    def _open(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
        if not isinstance(self.out, str | os.PathLike):
            _check(self.out, shape, dtype)
            if type(self.out) is np.ndarray and self.comm.size > 1 and torch.distributed.is_initialized():
                raise LayerwiseError(
                    "each rank would fill its own array with its own boxes only: pass a path, or a Zarr array that all "
                    "ranks see"
                )
            return
        file = self._files.enter_context(_beside(self, Path(self.out), folders=False))
        self._first(
            lambda: np.lib.format.open_memmap(file, mode="w+", dtype=dtype, shape=shape), "it cannot be created"
        )
        self.file = file


def results_of(comm: Comm, out: object, samples: int, files: Sequence[str | None]) -> Results:
    """Returns the destination that `out` names. files: of the samples. Raises LayerwiseError if it is not usable."""
    if not isinstance(out, str | os.PathLike):
        if not hasattr(out, "__setitem__") or not hasattr(out, "shape") or isinstance(out, Tensor):
            raise LayerwiseError(
                f"predict cannot write into a {type(out).__name__}: pass a .npy, a .zarr, a folder or an array"
            )
        return StackedResults(comm, out, samples)
    path = os.fspath(out)
    kind = Path(path).suffix.lower()
    if kind == ".npy":
        return StackedResults(comm, path, samples)
    if kind == ".zarr":
        return ZarrGroup(comm, path)
    if kind and not Path(path).is_dir():
        raise LayerwiseError(f"predict writes .npy files, .zarr groups and folders, not {path!r}")
    nifti = [file for file in files if file is not None and file.lower().endswith((".nii", ".nii.gz"))]
    return NiftiFolder(comm, path, nifti) if len(nifti) == samples else NpyFolder(comm, path)


@contextmanager
def _beside(results: Results, target: Path, record: Path | None = None, *, folders: bool = True) -> Iterator[Path]:
    """Yields a path beside `target`, the same on all ranks; rank 0 then renames it to `target`, or removes it on an
    error.

    record: the file that then has the digest; meanwhile there is none. folders: create those above `target`.
    """
    comm = results.comm

    def choose() -> tuple[None, str]:
        if comm.rank:
            return None, ""
        if folders:
            target.parent.mkdir(parents=True, exist_ok=True)
        if not target.parent.is_dir() or (target.is_dir() and target.suffix == ".npy"):
            raise LayerwiseError(
                f"{os.fspath(target)!r} cannot be written: its folder is missing, or it is itself a folder"
            )
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
    """Writes a box into an array. before: indices of leading dimensions that the box lacks."""
    if x is not None and box is not None and box.volume:
        values, kind = x.cpu().numpy(), np.dtype(array.dtype)
        if kind.kind in "iu" and values.dtype.kind in "iu" and int(values.max()) > np.iinfo(kind).max:
            raise LayerwiseError(f"it contains {int(values.max())}, but its destination has element type {kind}")
        array[(*before, *box.slices())] = values


def _put_into_file(file: Path, box: Box | None, x: Tensor | None, *before: int) -> None:
    """Writes a box into a .npy file, opened for it, so that other nodes' ranks see it once it is closed."""
    array = mapped(file, "r+")
    _put(array, box, x, *before)
    array.flush()


def _host() -> str:
    """Returns the turn of a node's ranks: two nodes might hold the same page of a file on a shared disk."""
    return socket.gethostname()


def _chunks(shape: tuple[int, ...], boxes: Each) -> tuple[tuple[int, ...], bool]:
    """Returns the chunks of a Zarr array, and whether every box has its own chunks."""
    common = [gcd(extent, *(box.lo[dim] for box in boxes if box is not None)) for dim, extent in enumerate(shape)]
    plain = tuple(min(extent, MOST_CHUNK) for extent in shape)
    cut = [any(box is not None and box.lo[dim] for box in boxes) for dim in range(len(shape))]
    chunks = tuple(
        next(part for part in range(min(n, MOST_CHUNK), 0, -1) if n % part == 0) if there else whole
        for n, there, whole in zip(common, cut, plain, strict=True)
    )
    apart = all(n >= LEAST_CHUNK for n, there in zip(chunks, cut, strict=True) if there)
    return (chunks, True) if apart else (plain, False)


def _check(array: Any, shape: tuple[int, ...], dtype: np.dtype[Any]) -> None:
    """Raises LayerwiseError if an array has another shape or type: numpy would silently drop what does not fit."""
    if tuple(array.shape) != shape:
        raise LayerwiseError(f"predict writes {shape} numbers, but the destination has shape {tuple(array.shape)}")
    kinds = {"f": "f", "b": "biuf"}.get(dtype.kind, "iuf")
    if np.dtype(array.dtype).kind not in kinds:
        raise LayerwiseError(f"predict writes {dtype.name}, but the destination has {array.dtype}")
