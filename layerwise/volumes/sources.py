"""Sources: open samples in arrays, files and functions, and read boxes of them."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.lib.format import MAGIC_PREFIX
from numpy.typing import NDArray

from layerwise.errors import LayerwiseError, first_line, foreign
from layerwise.geometry import Box

Array = NDArray[Any]
Slices = tuple[slice, ...]
Reader = Callable[[int, Slices], Array]
PARSING = threading.Lock()  # CPython 3.11 fails if two threads parse literals, such as a .npy file's header
KINDS = ".npy, .zarr, .nii, .nii.gz, .h5::name or .hdf5::name"


class StackedArray:
    """An array (samples, ...): numpy's, possibly memory-mapped, h5py's or zarr's, or a file of one.

    `where` names it in errors. Every process opens the file by itself, as processes cannot share an open one.
    """

    def __init__(self, value: Any, where: str) -> None:
        self.path = os.fspath(value) if isinstance(value, str | os.PathLike) else None
        self.where = where if self.path is None else f"file {self.path!r}"
        self._array, self._process = value, None if self.path is None else 0
        if len(self.array.shape) < 1:
            raise LayerwiseError(f"{self.where} has no sample dimension")

    @property
    def array(self) -> Any:
        """The array; a file's is opened at the first use in a process."""
        if self.path is not None and self._process != os.getpid():
            self._array, self._process = _open(self.path), os.getpid()
        return self._array

    def __getstate__(self) -> dict[str, Any]:
        return vars(self) if self.path is None else {**vars(self), "_array": None, "_process": 0}

    def __len__(self) -> int:
        return int(self.array.shape[0])

    def shape(self, index: int) -> tuple[int, ...]:
        """Returns the shape of one sample."""
        return tuple(int(extent) for extent in self.array.shape[1:])

    def read(self, index: int, slices: Slices) -> Array:
        """Returns a box of one sample."""
        with foreign(f"{self.where}, sample {index}"):  # such as a tensor that needs a gradient, or of bfloat16
            return np.asarray(self.array[(index, *slices)])

    def file(self, index: int) -> str | None:
        """Returns the file of a sample, for error messages."""
        return self.path


class SeparateSamples:
    """A source for every sample: files or arrays without a sample dimension."""

    def __init__(self, items: Sequence[Any], where: str) -> None:
        self.items, self.where = list(items), where

    def __len__(self) -> int:
        return len(self.items)

    def shape(self, index: int) -> tuple[int, ...]:
        return tuple(int(extent) for extent in self._array(index).shape)

    def read(self, index: int, slices: Slices) -> Array:
        array, file = self._array(index), self.file(index)
        which = f" (file {file!r})" if file else ""
        with foreign(f"{self.where}, sample {index}{which}"):
            return np.asarray(array[slices])

    def file(self, index: int) -> str | None:
        item = self.items[index]
        return os.fspath(item) if isinstance(item, str | os.PathLike) else None

    def _array(self, index: int) -> Any:
        file = self.file(index)
        try:
            item = self.items[index] if file is None else _open(file)
        except LayerwiseError as error:
            raise LayerwiseError(f"{self.where}, sample {index}: {error}") from error
        if not hasattr(item, "shape"):
            raise LayerwiseError(
                f"{self.where}, sample {index} is of type {type(item).__name__}: pass an array or a file"
            )
        return item


class Computed:
    """A function (index, slices) -> array, for samples of one shape."""

    def __init__(self, reader: Reader, samples: int, shape: tuple[int, ...], where: str) -> None:
        self.reader, self.samples, self._shape, self.where = reader, samples, shape, where

    def __len__(self) -> int:
        return self.samples

    def shape(self, index: int) -> tuple[int, ...]:
        return self._shape

    def read(self, index: int, slices: Slices) -> Array:
        try:
            return np.asarray(self.reader(index, slices))
        except Exception as error:  # the user's own code
            message = (
                f"{self.where}, sample {index}: its function raised {type(error).__name__}: {first_line(error, 200)}"
            )
            raise LayerwiseError(message) from error

    def file(self, index: int) -> str | None:
        return None


@dataclass(frozen=True, slots=True)
class SampleRegion:
    """A box of every sample of a source, padded with zeros where it is larger than a sample.

    Attributes:
        source: The source of the samples.
        box: The region, in positions of a sample; it may begin before it and end after it.
        mirrored: The dimensions that are read backwards.
    """

    source: SampleSource
    box: Box
    mirrored: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.source)

    def shape(self, index: int) -> tuple[int, ...]:
        return self.box.shape

    def file(self, index: int) -> str | None:
        return self.source.file(index)

    def read(self, index: int, slices: Slices) -> Array:
        lo, hi = zip(*map(self._place, range(len(slices)), slices), strict=True)
        inside = Box(lo, hi) & Box((0,) * len(lo), self.source.shape(index))
        if not inside.volume:
            nothing = self.source.read(index, (slice(0, 0),) * len(lo))
            return np.zeros(Box(lo, hi).shape, nothing.dtype)
        read = self.source.read(index, inside.slices())
        margins = [(a - x, y - b) for x, y, a, b in zip(lo, hi, inside.lo, inside.hi, strict=True)]
        padded = np.pad(read, margins) if any(map(any, margins)) else read
        return np.flip(padded, tuple(self.mirrored))

    def _place(self, dim: int, s: slice) -> tuple[int, int]:
        """The positions in a sample of a slice of the region."""
        if dim in self.mirrored:
            return self.box.hi[dim] - s.stop, self.box.hi[dim] - s.start
        return self.box.lo[dim] + s.start, self.box.lo[dim] + s.stop


SampleSource = StackedArray | SeparateSamples | Computed | SampleRegion


def source_of(value: object, name: str, samples: int | None, shape: tuple[int, ...]) -> SampleSource:
    """The user's source for input `name`. samples, shape: for a function. Raises LayerwiseError for other values."""
    if isinstance(value, str | os.PathLike) or (hasattr(value, "shape") and hasattr(value, "__getitem__")):
        return StackedArray(value, f"input {name!r}")
    if isinstance(value, Sequence) and len(value):
        return SeparateSamples(value, f"input {name!r}")
    if callable(value):
        if samples is None:
            raise LayerwiseError(f"input {name!r} is read by a function: pass the number of samples (samples=)")
        return Computed(value, samples, shape, f"input {name!r}")
    raise LayerwiseError(
        f"input {name!r} is of type {type(value).__name__}: pass an array (samples, ...), a file ({KINDS}), a list of "
        "files, one for each sample, or a function (index, slices) -> array"
    )


def _open(path: str) -> Any:
    """Opens the array in a file, without reading it. Raises LayerwiseError if there is none; unpickles nothing."""
    name, _, inside = path.partition("::")
    kind = Path(name).suffix.lower()
    with foreign(f"file {path!r} cannot be read"):
        if not Path(name).exists():
            raise LayerwiseError(f"file {name!r} does not exist")
        try:
            array = _opened(name, kind, inside)
        except ImportError as error:
            raise LayerwiseError(f"file {name!r}: install {error.name} to read it") from None
        if not hasattr(array, "shape"):
            message = f"contains a {type(array).__name__}: name an array in it, as in FILE::name"
            raise LayerwiseError(f"file {path!r} {message}")
        if not all(isinstance(extent, int | np.integer) and 0 <= extent <= sys.maxsize for extent in array.shape):
            raise LayerwiseError(f"file {path!r} cannot be read: its array has shape {array.shape}")
        return array


def _opened(name: str, kind: str, inside: str) -> Any:
    if kind == ".npy":
        with Path(name).open("rb") as file:
            if file.read(len(MAGIC_PREFIX)) != MAGIC_PREFIX:  # otherwise numpy would unpickle it
                raise LayerwiseError(f"file {name!r} cannot be read: it is not in numpy's format")
        return mapped(name, "r")
    if kind in (".h5", ".hdf5") and inside:
        import h5py

        return h5py.File(name, "r")[inside]
    if name.lower().endswith((".nii", ".nii.gz")):
        import nibabel

        return _Nifti(nibabel.load(name).dataobj)
    if kind == ".zarr":
        import zarr

        opened = zarr.open(name, mode="r")
        return opened[inside] if inside else opened
    raise LayerwiseError(f"file {name!r} has an unknown format: use {KINDS}")


def mapped(path: str | os.PathLike[str], mode: Literal["r", "r+"]) -> np.memmap[Any, Any]:
    """The array in a .npy file, memory-mapped."""
    with PARSING:
        array: np.memmap[Any, Any] = np.load(path, mmap_mode=mode, allow_pickle=False)
    return array


class _Nifti:
    """A NIfTI volume (x, y, z) or (x, y, z, channels) as a sample (channels, x, y, z) whose slices can be read."""

    def __init__(self, proxy: Any) -> None:
        self.proxy, self.channels = proxy, len(proxy.shape) > 3
        extents = tuple(int(extent) for extent in proxy.shape)
        self.shape = (extents[3], *extents[:3]) if self.channels else (1, *extents)

    def __getitem__(self, index: tuple[slice, ...]) -> Array:
        first, *rest = index
        if self.channels:
            return np.moveaxis(np.asarray(self.proxy[(*rest, first)]), -1, 0)
        return np.asarray(self.proxy[tuple(rest)])[None][first]
