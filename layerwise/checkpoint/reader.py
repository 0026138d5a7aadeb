"""Reader: a checkpoint's folder, as `save` or torch.distributed.checkpoint's own `save` wrote it.

DCP's reader unpickles `.metadata` in full, which may run code, and reads all of a saved tensor for any part of it: a
quarter of 256 MB took it 0.5 s and 324 MB of memory, and this one, which maps files, 0.02 s and 134 MB (torch 2.13).
"""

from __future__ import annotations

import hashlib
import io
import json
import mmap
import os
import pickle
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any
from zipfile import BadZipFile

import torch
from torch import Tensor

from layerwise.checkpoint.description import FILE, Description, FileSpan, read_description
from layerwise.errors import LayerwiseError
from layerwise.files import JSON, read_json
from layerwise.geometry import Box
from layerwise.tensorfile import Spec

SEAL, METADATA = "checkpoint.json", ".metadata"
FORMAT, VERSION = "layerwise-checkpoint", 3
MOST_BYTES = 1 << 31  # of a description, and of a value that is no tensor
ERRORS = (
    AttributeError, IndexError, KeyError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError,
    EOFError, ImportError, pickle.UnpicklingError,
)  # fmt: skip
ELEMENTS = "/data/0"  # the end of the name of the member of torch.save's zip archive that is the elements, as they are
LOCAL_HEADER = 30  # bytes of a member's own header, before its name and padding


class Reader:
    """The reader of a folder; of tensors only what is asked for is read.

    about: what `save` knew besides the tensors; None: another program wrote the folder, without checksums.
    files: their SHA-256, by name. digest: of the whole checkpoint.
    """

    about: Mapping[str, Any] | None = None

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        """LayerwiseError unless all that describes it is whole, unaltered and of this version."""
        self.folder = Path(folder)
        self.where = f"checkpoint {os.fspath(self.folder)!r}"
        self.files: dict[str, str] = {}
        if (self.folder / SEAL).exists() or (self.folder / SEAL).is_symlink():
            self._open_seal()
        for name in (METADATA, *self.files):
            self._check_own(name)
        content = self._read(METADATA, 0, MOST_BYTES)
        if self.about is None:
            self.digest = hashlib.sha256(content).hexdigest()
        elif hashlib.sha256(content).hexdigest() != self.files[METADATA]:
            raise self._unreadable(METADATA, "it is not what was written (SHA-256)")
        with self.sense(METADATA):
            self.description: Description = read_description(content)
        places = [place for stored in self.description.tensors.values() for _, place in stored.boxes]
        for name in {place.file for place in (*places, *self.description.values.values())}:
            self._check_own(name)

    def _open_seal(self) -> None:
        self._check_own(SEAL)
        raw = read_json(self.folder / SEAL, "checkpoint")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise LayerwiseError(f"{self.where} is not a layerwise checkpoint: its {SEAL} does not say so")
        if raw.get("version") != VERSION:
            raise LayerwiseError(
                f"{self.where} has version {raw.get('version')!r}; this layerwise reads version {VERSION}"
            )
        self.digest = str(raw.pop("checksum", None))
        if self.digest != checksum(raw):
            raise LayerwiseError(f"{self.where} is damaged: {SEAL} was altered since it was written; take an older one")
        with self.sense(SEAL):
            self.files = {name: str(sha) for name, sha in raw["files"].items()}
            if METADATA not in self.files or not all(name == METADATA or FILE.fullmatch(name) for name in self.files):
                raise ValueError(f"files {list(self.files)}")
            self.about = dict(raw["about"])

    def _check_own(self, name: str) -> None:
        """LayerwiseError where a file of the checkpoint is a link, or no file: it may lie anywhere, and block."""
        path = self.folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise LayerwiseError(
                f"checkpoint file {os.fspath(path)!r} is a link, or no plain file: a checkpoint's files lie in its own "
                "folder; copy it there"
            )

    @contextmanager
    def sense(self, name: str) -> Iterator[None]:
        """Makes what is not as expected in this file a LayerwiseError, within it."""
        try:
            yield
        except LayerwiseError:
            raise
        except ERRORS as error:
            raise LayerwiseError(f"{self.where} is damaged: {name} makes no sense ({error!r})") from None

    def spec(self, name: str) -> Spec:
        """Returns shape and element type of a tensor. KeyError where there is none of that name."""
        return self.description.tensors[name].spec

    def verify(self, files: Iterable[str]) -> None:
        """LayerwiseError unless these files are, byte for byte, those that were written."""
        for name in files:
            try:
                with (self.folder / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise self._unreadable(name, error.strerror) from None
            if digest != self.files[name]:
                raise self._unreadable(name, "it is not what was written (SHA-256)")

    def fill(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a tensor into `target`. LayerwiseError where the files do not have it."""
        stored = self.description.tensors[name]
        for saved, place in stored.boxes:
            both = saved & box
            if not both.volume:
                continue
            try:
                there = map_blob(self.folder / place.file, (place.offset, place.length), (saved.shape, stored.spec[1]))
                target[both.slices(box)].copy_(there[both.slices(saved)])
            except (OSError, ValueError, BadZipFile, RuntimeError) as error:  # RuntimeError: of another shape
                raise self._unreadable(place.file, str(error)) from None

    def full(self, name: str) -> Tensor:
        """Returns all of a tensor."""
        shape, dtype = self.spec(name)
        tensor = torch.zeros(shape, dtype=dtype)
        self.fill(name, Box.full(shape), tensor)
        return tensor

    def value(self, name: str) -> Any:
        """Returns a value that is no tensor: numbers, text, and lists and the like of them."""
        place: FileSpan = self.description.values[name]
        content = self._read(place.file, place.offset, place.length)
        with self.sense(place.file):
            return torch.load(io.BytesIO(content), weights_only=True)

    def _read(self, name: str, offset: int, most: int) -> bytes:
        """Returns the bytes of a file from there on, at most so many."""
        try:
            with (self.folder / name).open("rb") as file:
                left = os.fstat(file.fileno()).st_size - offset
                if left < 0 or min(left, most) > MOST_BYTES:
                    raise self._unreadable(name, f"its parts are not where, or as large as, {METADATA} has them")
                file.seek(offset)
                return file.read(min(left, most))
        except OSError as error:
            raise self._unreadable(name, error.strerror) from None

    def _unreadable(self, name: str, reason: str | None) -> LayerwiseError:
        path = os.fspath(self.folder / name)
        return LayerwiseError(f"checkpoint file {path!r} is damaged or gone: {reason}; take an older checkpoint")


class Window(io.RawIOBase):
    """A file of what lies in memory: an archive alone.

    zipfile leaves out what lies before an archive, but where another one of that length does, it takes that one's end
    for this one's (CPython since its fix of CVE-2025-8291).
    """

    def __init__(self, memory: memoryview) -> None:
        self._memory, self._at = memory, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, len(self._memory))[whence]
        if self._at < 0:
            raise OSError("before the beginning")  # as files do, which zipfile counts on
        return self._at

    def readinto(self, buffer: Any) -> int:
        part = self._memory[self._at : self._at + len(buffer)]
        buffer[: len(part)] = part
        self._at += len(part)
        return len(part)


def checksum(body: Mapping[str, JSON]) -> str:
    """Returns SHA-256 of what is written into `checkpoint.json`."""
    return hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()


def map_blob(path: Path, span: tuple[int, int], spec: Spec) -> Tensor:
    """Returns the tensor that torch.save wrote into this span of the file, which is its memory: what is used is read.

    The pickle in its archive is not: it only says type and shape, which a checkpoint's metadata say, too.
    ValueError, zipfile.BadZipFile or OSError where the file has no such tensor there.
    """
    (shape, dtype), (offset, length) = spec, span
    size, begin = prod(shape) * dtype.itemsize, offset % mmap.ALLOCATIONGRANULARITY  # where the archive begins
    with path.open("rb") as file:
        if offset < 0 or length < 0 or offset + length > os.fstat(file.fileno()).st_size:
            raise ValueError(f"it ends before {offset + length} bytes")
        # ACCESS_COPY, because torch wants memory that can be written to.
        mapped = mmap.mmap(file.fileno(), begin + length, access=mmap.ACCESS_COPY, offset=offset - begin)
    with zipfile.ZipFile(Window(memoryview(mapped)[begin:])) as archive:
        member = next((m for m in archive.infolist() if m.filename.endswith(ELEMENTS)), None)
    if member is None or member.compress_type != zipfile.ZIP_STORED or member.file_size != size:
        raise ValueError(f"there is no tensor of {size} bytes at {offset}")
    if not size:
        return torch.empty(shape, dtype=dtype)
    header_at = begin + member.header_offset
    header = mapped[header_at : header_at + LOCAL_HEADER]
    name, extra = (int.from_bytes(header[i : i + 2], "little") for i in (26, 28))
    start = header_at + LOCAL_HEADER + name + extra
    if not begin <= header_at <= start <= begin + length - size:
        raise ValueError(f"the elements of {size} bytes are not at {start}")
    if start % dtype.itemsize:  # as torch's own writer may leave them: a copy is aligned
        return torch.frombuffer(bytearray(mapped[start : start + size]), dtype=dtype).reshape(shape)
    return torch.frombuffer(mapped, dtype=dtype, count=prod(shape), offset=start).reshape(shape)
