"""A file of values, each as torch.save writes it, one after the other: DCP's `.distcp`. Tensors without their pickles.

torch.save makes a zip archive whose member `data/0` are the elements, stored as they are and aligned; the pickle in it
only says type and shape, which a checkpoint's metadata say, too.
"""

from __future__ import annotations

import hashlib
import io
import mmap
import os
import zipfile
from collections.abc import Iterable
from math import prod
from pathlib import Path
from typing import IO, BinaryIO, cast

import torch
from torch import Tensor

from layerwise.tensorfile import Spec, torch_save

ALIGNED = 64  # bytes: torch.save puts elements at multiples of it, counted from where it begins
ELEMENTS = "/data/0"  # the end of the member's name
LOCAL_HEADER = 30  # bytes of a member's own header, before its name and padding
Span = tuple[int, int]  # offset and length of a value's archive in the file, in bytes


def write_blobs(path: Path, values: Iterable[object]) -> tuple[str, list[Span]]:
    """Writes the file, on disk when this returns. Returns its SHA-256, and where each value is.

    Values, most of them tensors on any device, are taken one by one: one copy is in memory at a time. OSError where
    that is impossible.
    """
    spans: list[Span] = []
    with path.open("wb") as file:
        out = _Hashed(file)
        for value in values:
            out.write(b"\0" * (-out.length % ALIGNED))
            start = out.length
            torch_save(_alone(value), cast(IO[bytes], out))
            spans.append((start, out.length - start))
            del value  # before the next one comes
        file.flush()
        os.fsync(file.fileno())
    return out.sha256.hexdigest(), spans


def _alone(value: object) -> object:
    """A tensor on the CPU, with memory of its own: torch.save writes all of what it is a part of."""
    if not isinstance(value, Tensor):
        return value
    own = value.detach().cpu().contiguous()
    return own if own.untyped_storage().nbytes() == own.nbytes else own.clone()


def map_blob(path: Path, span: Span, spec: Spec) -> Tensor:
    """The tensor at this place of the file. Its memory is the file, of which only what is used is read.

    ValueError, zipfile.BadZipFile or OSError where the file has no such tensor there.
    """
    (shape, dtype), (offset, length) = spec, span
    size = prod(shape) * dtype.itemsize
    with path.open("rb") as file:
        if offset < 0 or length < 0 or offset + length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"it ends before {offset + length} bytes")
        with zipfile.ZipFile(_View(file, offset, length)) as archive:
            member = next((m for m in archive.infolist() if m.filename.endswith(ELEMENTS)), None)
        if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size != size:
            raise ValueError(f"there is no tensor of {size} bytes at {offset}")
        if not size:
            return torch.empty(shape, dtype=dtype)
        file.seek(offset + member.header_offset)
        header = file.read(LOCAL_HEADER)
        name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
        start = offset + member.header_offset + LOCAL_HEADER + name + extra
        if start + size > offset + length:
            raise ValueError(f"the elements of {size} bytes are not at {start}")
        if start % dtype.itemsize:  # as torch's own writer may leave them: a copy is aligned
            file.seek(start)
            return torch.frombuffer(bytearray(file.read(size)), dtype=dtype).reshape(shape)
        mapped = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)  # torch wants memory that can be written to
    return torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=start).reshape(shape)


class _View(io.RawIOBase):
    """A part of a file, as a file."""

    def __init__(self, file: BinaryIO, offset: int, length: int) -> None:
        self._file, self._offset, self._length, self._position = file, offset, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._position

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        start = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self._length}[whence]
        if start + offset < 0:
            raise ValueError("before the beginning")
        self._position = start + offset
        return self._position

    def read(self, size: int = -1) -> bytes:
        left = max(self._length - self._position, 0)
        self._file.seek(self._offset + self._position)
        part = self._file.read(left if size < 0 else min(size, left))
        self._position += len(part)
        return part


class _Hashed:
    """What is written goes into a file, and into its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256, self.length = file, hashlib.sha256(), 0

    def write(self, part: bytes) -> int:
        self.sha256.update(part)
        self.length += len(part)
        return self.file.write(part)

    def flush(self) -> None:
        self.file.flush()
