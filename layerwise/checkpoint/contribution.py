"""The part of a checkpoint that each rank writes, and how rank 0 makes one of all.

A folder of torch.distributed.checkpoint (DCP), as `dcp.save({"model": ..., "optimizer": ...})` makes it of what
`get_state_dict` gives, which `dcp.load` and `dcp_to_torch_save` read; and beside it `checkpoint.json`, with the SHA-256
of every file.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from layerwise.checkpoint.description import check_whole
from layerwise.checkpoint.reader import FORMAT, METADATA, SEAL, VERSION, checksum
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.run.state.state import Shard
from layerwise.tensorfile import DTYPE_OF, DTYPES, dtype_name, sync_folder, torch_save
from layerwise.version import __version__

ALIGNED = 64  # bytes: torch.save puts elements at multiples of it, counted from where it begins
Span = tuple[int, int]  # offset and length of a value's archive in the file, in bytes
MODEL = "model"
Told = Mapping[str, Any]  # what `write` returns, after its way through JSON


@dataclass(frozen=True, slots=True)
class Entry:
    """A box of a tensor, or a value that is none, under the keys that lead to it in DCP's nested dicts."""

    keys: tuple[str | int, ...]
    value: object
    shape: tuple[int, ...] = ()  # of all of the tensor
    lo: tuple[int, ...] = ()  # where the box begins
    aliases: tuple[str, ...] = ()  # further names, in the place of the last key


def of_model(shards: Iterable[Shard]) -> Iterator[Entry]:
    """Yields the parameters and buffers that this rank writes."""
    for shard in shards:
        if writes(shard):
            yield Entry((MODEL, shard.name), shard.tensor, shard.shape, shard.box.lo, shard.aliases)


def writes(shard: Shard) -> bool:
    """True if this rank writes the shard's box: an empty one only where the whole tensor is empty."""
    return shard.first and (shard.box.volume > 0 or prod(shard.shape) == 0)


def write(folder: Path, rank: int, entries: Sequence[Entry]) -> dict[str, JSON]:
    """Writes this rank's file and tells what is in it. OSError where that is impossible."""
    if not folder.is_dir():
        raise LayerwiseError(f"{os.fspath(folder)!r} is not to be seen here: all ranks must share the file system")
    if not entries:
        return {"file": None, "rows": []}
    for entry in entries:
        if isinstance(entry.value, Tensor) and entry.value.dtype not in DTYPES:
            raise LayerwiseError(
                f"a checkpoint cannot hold {entry.keys[-1]!r} of {entry.value.dtype}: leave it out of the model"
            )
    file = f"__{rank}_0.distcp"
    digest, spans = write_blobs(folder / file, (entry.value for entry in entries))
    described: list[JSON] = []
    for entry, span in zip(entries, spans, strict=True):
        box: JSON = None
        if isinstance(entry.value, Tensor):
            box = [dtype_name(entry.value.dtype), entry.shape, entry.lo, entry.value.shape]
        described.append([entry.keys, entry.aliases, box, span])
    return {"file": [file, digest], "rows": described}


def finish(folder: Path, about: Mapping[str, JSON], written: Sequence[Told]) -> None:
    """Completes the folder. LayerwiseError where the ranks contradict each other, or elements are missing."""
    metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    nested: dict[str, tuple[str | int, ...]] = {}
    places: dict[MetadataIndex, _StorageInfo] = {}
    for rank in written:
        for keys, aliases, box, (offset, length) in rank["rows"]:
            info = _StorageInfo(rank["file"][0], offset, length)
            for last in (keys[-1], *aliases):
                names = (*keys[:-1], last)
                name = ".".join(map(str, names))
                nested[name] = names
                if box is None:
                    metadata[name] = BytesStorageMetadata()
                    places[MetadataIndex(name)] = info
                    continue
                _add(metadata, name, box)
                places[MetadataIndex(name, box[2])] = info
    for name, stored in metadata.items():
        if isinstance(stored, TensorStorageMetadata):
            try:
                check_whole(name, tuple(stored.size), [_box(chunk) for chunk in stored.chunks])
            except ValueError as error:
                raise LayerwiseError(f"the ranks do not hold all of the state: {error}") from None
    described = pickle.dumps(Metadata(dict(metadata), nested, places))
    _write(folder / METADATA, described)
    files = dict(rank["file"] for rank in written if rank["file"])
    files[METADATA] = hashlib.sha256(described).hexdigest()
    body: dict[str, JSON] = {
        "format": FORMAT,
        "version": VERSION,
        "written_by": {"layerwise": __version__, "torch": torch.__version__},
        "about": about,
        "files": files,
    }
    _write(folder / SEAL, json.dumps({**body, "checksum": checksum(body)}, allow_nan=False).encode())
    sync_folder(folder)


def _write(path: Path, content: bytes) -> None:
    """Writes the content, which is on disk when this returns."""
    with path.open("wb") as out:
        out.write(content)
        out.flush()
        os.fsync(out.fileno())


def _add(metadata: dict[str, TensorStorageMetadata | BytesStorageMetadata], name: str, box: Sequence[Any]) -> None:
    dtype, shape, lo, sizes = box
    new = TensorStorageMetadata(TensorProperties(dtype=DTYPE_OF[dtype]), torch.Size(shape), [])
    earlier = metadata.setdefault(name, new)
    alike = isinstance(earlier, TensorStorageMetadata) and earlier.properties.dtype == new.properties.dtype
    if not (isinstance(earlier, TensorStorageMetadata) and alike and earlier.size == new.size):
        raise LayerwiseError(f"{name!r} differs in element type or shape between ranks")
    earlier.chunks.append(ChunkStorageMetadata(torch.Size(lo), torch.Size(sizes)))


def _box(chunk: ChunkStorageMetadata) -> Box:
    return Box(tuple(chunk.offsets), tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)))


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
    """Returns a tensor on the CPU, with memory of its own: torch.save writes all of what it is a part of."""
    if not isinstance(value, Tensor):
        return value
    copied = value.detach().cpu().contiguous()
    return copied if copied.untyped_storage().nbytes() == copied.nbytes else copied.clone()


class _Hashed:
    """A file that is written with its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.sha256, self.length = file, hashlib.sha256(), 0

    def write(self, part: bytes) -> int:
        self.sha256.update(part)
        self.length += len(part)
        return self.file.write(part)

    def flush(self) -> None:
        self.file.flush()
