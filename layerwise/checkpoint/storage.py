"""A checkpoint's folder: torch.distributed.checkpoint's StorageWriter and StorageReader, without pickle.

A safetensors file a rank holds the boxes that the rank wrote; `checkpoint.json` says which box of which tensor is
where, and has the SHA-256 of every file and of itself; what else is known of the run stands in it under "about".
torch's FileSystemReader unpickles `.metadata`; its HuggingFaceStorageWriter has no room for two boxes of one tensor
in a file, for checksums, for the model's and the optimizer's facts. Both classes serve torch's own `save` and `load`
too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from layerwise.errors import LayerwiseError
from layerwise.files import JSON, read_json
from layerwise.tensorfile import DTYPE_OF, Spec, dtype_name, sync_folder, write_tensors
from layerwise.version import __version__

METADATA = "checkpoint.json"
FORMAT, VERSION = "layerwise-checkpoint", 1

_FILE = re.compile(r"rank-\d{5,}\.safetensors")  # and nothing else: a name may not lead out of the folder


@dataclass(frozen=True, slots=True)
class Stored:
    """The file that holds a chunk, and the file's SHA-256."""

    file: str
    sha256: str


class Writer(StorageWriter):
    """Writes this rank's boxes into `rank-00003.safetensors`; the coordinator's `finish` makes the folder complete."""

    def __init__(self, folder: str | os.PathLike[str], rank: int, about: Mapping[str, JSON] | None = None) -> None:
        self.folder, self.rank, self.about = Path(folder), rank, about or {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(checkpoint_id) if checkpoint_id is not None else self.folder

    def set_up_storage_writer(self, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        if is_coordinator:
            self.folder.mkdir(parents=True, exist_ok=True)

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """One file with all of this rank's chunks, on disk when the future is given; none where there are none."""
        items, specs = {}, {}
        for item in plan.items:
            data = item.tensor_data
            if data is None:
                raise LayerwiseError(f"a checkpoint holds tensors; {item.index.fqn!r} is none: put it under 'progress'")
            key = _key(item.index.fqn, data.chunk.offsets)
            items[key], specs[key] = item, (tuple(data.chunk.sizes), data.properties.dtype)
        name, results = f"rank-{self.rank:05d}.safetensors", []
        if items:

            def read(key: str) -> Tensor:
                return cast(Tensor, planner.resolve_data(items[key]))

            digest = write_tensors(self.folder / name, specs, read)
            sizes = {key: prod(shape) * dtype.itemsize for key, (shape, dtype) in specs.items()}
            results = [WriteResult(item.index, sizes[key], Stored(name, digest)) for key, item in items.items()]
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes `checkpoint.json`. LayerwiseError where chunks of a tensor are missing."""
        stored = {result.index: cast(Stored, result.storage_data) for rank in results for result in rank}
        tensors: dict[str, JSON] = {}
        for fqn, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), fqn
            chunks: list[JSON] = []
            for chunk in tensor.chunks:
                file = stored[MetadataIndex(fqn, chunk.offsets)].file
                chunks.append({"offsets": list(chunk.offsets), "sizes": list(chunk.sizes), "file": file})
            try:
                _check_whole(fqn, tensor)
            except ValueError as error:
                raise LayerwiseError(f"the ranks do not hold all of the state: {error}") from None
            dtype = dtype_name(tensor.properties.dtype)
            tensors[fqn] = {"dtype": dtype, "shape": list(tensor.size), "chunks": chunks}
        body: dict[str, JSON] = {
            "format": FORMAT,
            "version": VERSION,
            "written_by": {"layerwise": __version__, "torch": torch.__version__},
            "about": self.about,
            "files": {place.file: place.sha256 for place in stored.values()},
            "tensors": tensors,
        }
        with (self.folder / METADATA).open("w", encoding="utf-8") as out:
            out.write(json.dumps({**body, "checksum": _checksum(body)}, allow_nan=False))
            out.flush()
            os.fsync(out.fileno())
        sync_folder(self.folder)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads what Writer has written: of each chunk only the slice that is asked for.

    Its fields are known after `read_metadata`.
    """

    about: Mapping[str, JSON]
    checksum: str  # of `checkpoint.json`
    files: dict[str, str]  # their SHA-256, by name
    metadata: Metadata

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self.folder = Path(folder)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.folder = Path(checkpoint_id) if checkpoint_id is not None else self.folder

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """LayerwiseError unless `checkpoint.json` is whole, unaltered and of this version."""
        where = f"checkpoint {os.fspath(self.folder)!r}"
        self._check_own(METADATA)
        raw = read_json(self.folder / METADATA, "checkpoint")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise LayerwiseError(f"{where} is not a layerwise checkpoint: its {METADATA} does not say so")
        if raw.get("version") != VERSION:
            raise LayerwiseError(f"{where} has version {raw.get('version')!r}; this layerwise reads version {VERSION}")
        self.checksum = str(raw.pop("checksum", None))
        if self.checksum != _checksum(raw):
            raise LayerwiseError(f"{where} is damaged: {METADATA} was altered since it was written; take an older one")
        with self.sense():
            self.about, self.files = dict(raw["about"]), {name: str(sha) for name, sha in raw["files"].items()}
            if not all(map(_FILE.fullmatch, self.files)):
                raise ValueError(f"files {list(self.files)}")
            for name in self.files:
                self._check_own(name)
            places: dict[MetadataIndex, Stored] = {}
            tensors: dict[str, TensorStorageMetadata] = {}
            for fqn, tensor in raw["tensors"].items():
                chunks = [ChunkStorageMetadata(_size(c["offsets"]), _size(c["sizes"])) for c in tensor["chunks"]]
                properties = TensorProperties(dtype=DTYPE_OF[tensor["dtype"]])
                tensors[fqn] = TensorStorageMetadata(properties, _size(tensor["shape"]), chunks)
                _check_whole(fqn, tensors[fqn])
                for chunk, row in zip(chunks, tensor["chunks"], strict=True):
                    places[MetadataIndex(fqn, chunk.offsets)] = Stored(row["file"], self.files[row["file"]])
        self.metadata = Metadata(dict(tensors), storage_data=places)
        return self.metadata

    def _check_own(self, name: str) -> None:
        """LayerwiseError where a file of the checkpoint is a link, or no file: it may lie anywhere, and block."""
        path = self.folder / name
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise LayerwiseError(
                f"checkpoint file {os.fspath(path)!r} is a link, or no plain file: a checkpoint's files lie in its own "
                "folder; copy it there"
            )

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: object, **kwargs: object) -> None:
        self.metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    @contextmanager
    def sense(self) -> Iterator[None]:
        """Within it, what is not as expected in `checkpoint.json` is a LayerwiseError."""
        try:
            yield
        except LayerwiseError:
            raise
        except (AttributeError, KeyError, OverflowError, TypeError, ValueError) as error:
            where = f"checkpoint {os.fspath(self.folder)!r}"
            raise LayerwiseError(f"{where} is damaged: {METADATA} makes no sense ({error!r})") from None

    def spec(self, name: str) -> Spec:
        """Shape and element type of a tensor. KeyError where there is none of that name."""
        tensor = self.metadata.state_dict_metadata[name]
        assert isinstance(tensor, TensorStorageMetadata)
        return tuple(tensor.size), tensor.properties.dtype

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

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Copies the slices into the planner's tensors, file by file."""
        by_file: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            by_file.setdefault(self.metadata.storage_data[item.storage_index].file, []).append(item)
        for name, items in by_file.items():
            try:
                with safe_open(self.folder / name, framework="pt") as file:
                    for item in items:
                        origin = item.storage_index.offset
                        assert origin is not None
                        stops = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
                        part = tuple(map(slice, item.storage_offsets, stops))
                        piece = file.get_slice(_key(item.storage_index.fqn, origin))[part]
                        target = planner.resolve_tensor(item).detach()
                        target.copy_(piece)
                        planner.commit_tensor(item, target)
            except (OSError, SafetensorError, RuntimeError) as error:  # RuntimeError: of another shape
                raise self._unreadable(name, str(error)) from None
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _unreadable(self, name: str, reason: str | None) -> LayerwiseError:
        path = os.fspath(self.folder / name)
        return LayerwiseError(f"checkpoint file {path!r} is damaged or gone: {reason}; take an older checkpoint")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / METADATA).is_file()


def _key(fqn: str, offsets: Sequence[int]) -> str:
    """The name of a chunk in its file."""
    return f"{fqn}@{','.join(map(str, offsets))}"


def _checksum(body: Mapping[str, JSON]) -> str:
    return hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()


def _size(value: list[int]) -> torch.Size:
    if not all(type(extent) is int and extent >= 0 for extent in value):
        raise ValueError(f"{value} are not extents")
    return torch.Size(value)


def _check_whole(fqn: str, tensor: TensorStorageMetadata) -> None:
    """ValueError where chunks are missing: they are disjoint, so all are there where they have as many elements."""
    for chunk in tensor.chunks:
        if not all(a + b <= extent for a, b, extent in zip(chunk.offsets, chunk.sizes, tensor.size, strict=True)):
            raise ValueError(f"a chunk of {fqn!r} lies outside its shape {tuple(tensor.size)}")
    saved, volume = sum(prod(chunk.sizes) for chunk in tensor.chunks), prod(tensor.size)
    if saved != volume:
        raise ValueError(f"{saved} of the {volume} elements of {fqn!r} are there")
