"""A checkpoint's folder: one of torch.distributed.checkpoint (DCP), with checksums, and read without pickle.

`__3_0.distcp` has the boxes that rank 3 wrote, one after the other as torch.save writes them, and `.metadata` says in
DCP's words which box of which tensor is where: so `dcp.load` and `dcp_to_torch_save` read the folder.
`checkpoint.json` says the same, and has the SHA-256 of every file and of itself; what else is known of the run stands
in it under "about".

`.metadata` is a pickle, so Reader does not open it; of what torch.save wrote it takes the elements only. Both classes
serve torch's own `save` and `load`, too.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import cast
from zipfile import BadZipFile

import torch
from torch import Tensor
from torch.distributed.checkpoint.filesystem import FileSystemWriter, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from layerwise.checkpoint.blobs import map_blob, write_blobs
from layerwise.errors import LayerwiseError
from layerwise.files import JSON, read_json
from layerwise.tensorfile import DTYPE_OF, DTYPES, Spec, dtype_name, sync_folder
from layerwise.version import __version__

METADATA = "checkpoint.json"
FORMAT, VERSION = "layerwise-checkpoint", 2

_FILE = re.compile(r"__\d+_0\.distcp")  # and nothing else: a name may not lead out of the folder


@dataclass(frozen=True, slots=True)
class Stored:
    """Where a chunk is."""

    file: str
    sha256: str  # of the file
    offset: int  # in bytes, of what torch.save wrote
    length: int


class Writer(StorageWriter):
    """Writes this rank's boxes into `__3_0.distcp`; the coordinator's `finish` makes the folder complete."""

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
        results, file = list[WriteResult](), f"__{self.rank}_0.distcp"
        odd = next((item.index.fqn for item in plan.items if item.tensor_data is None), None)
        if odd is not None:
            raise LayerwiseError(f"a checkpoint holds tensors; {odd!r} is none: put it under 'progress'")
        for item in plan.items:
            assert item.tensor_data is not None
            dtype = item.tensor_data.properties.dtype
            if dtype not in DTYPES:
                raise LayerwiseError(
                    f"a checkpoint cannot hold {item.index.fqn!r} of {dtype}: leave it out of the model"
                )
        if plan.items:
            tensors = (cast(Tensor, planner.resolve_data(item)) for item in plan.items)
            digest, spans = write_blobs(self.folder / file, tensors)
            for item, (offset, length) in zip(plan.items, spans, strict=True):
                results.append(WriteResult(item.index, length, Stored(file, digest, offset, length)))
        written: Future[list[WriteResult]] = Future()
        written.set_result(results)
        return written

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Writes `.metadata` and `checkpoint.json`. LayerwiseError where chunks of a tensor are missing."""
        stored = {result.index: cast(Stored, result.storage_data) for rank in results for result in rank}
        tensors: dict[str, JSON] = {}
        for fqn, tensor in metadata.state_dict_metadata.items():
            assert isinstance(tensor, TensorStorageMetadata), fqn
            chunks: list[JSON] = []
            for chunk in tensor.chunks:
                place = stored[MetadataIndex(fqn, chunk.offsets)]
                row = {"offsets": list(chunk.offsets), "sizes": list(chunk.sizes)}
                chunks.append({**row, "file": place.file, "span": [place.offset, place.length]})
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
        self._finish_for_torch(metadata, stored)
        with (self.folder / METADATA).open("w", encoding="utf-8") as out:
            out.write(json.dumps({**body, "checksum": _checksum(body)}, allow_nan=False))
            out.flush()
            os.fsync(out.fileno())
        sync_folder(self.folder)

    def _finish_for_torch(self, metadata: Metadata, stored: Mapping[MetadataIndex, Stored]) -> None:
        """What torch's own reader looks for."""
        infos = {index: _StorageInfo(place.file, place.offset, place.length) for index, place in stored.items()}
        names = {name: (name,) for name in metadata.state_dict_metadata}
        results = [WriteResult(index, info.length, info) for index, info in infos.items()]
        FileSystemWriter(self.folder).finish(Metadata(metadata.state_dict_metadata, names), [results])

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
            self._sizes: dict[MetadataIndex, Spec] = {}
            tensors: dict[str, TensorStorageMetadata] = {}
            for fqn, tensor in raw["tensors"].items():
                chunks = [ChunkStorageMetadata(_size(c["offsets"]), _size(c["sizes"])) for c in tensor["chunks"]]
                properties = TensorProperties(dtype=DTYPE_OF[tensor["dtype"]])
                tensors[fqn] = TensorStorageMetadata(properties, _size(tensor["shape"]), chunks)
                _check_whole(fqn, tensors[fqn])
                for chunk, row in zip(chunks, tensor["chunks"], strict=True):
                    offset, length = map(int, row["span"])
                    place = Stored(row["file"], self.files[row["file"]], offset, length)
                    places[MetadataIndex(fqn, chunk.offsets)] = place
                    self._sizes[MetadataIndex(fqn, chunk.offsets)] = tuple(chunk.sizes), properties.dtype
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
        """Copies the slices into the planner's tensors."""
        for item in plan.items:
            place: Stored = self.metadata.storage_data[item.storage_index]
            stops = map(sum, zip(item.storage_offsets, item.lengths, strict=True))
            part = tuple(map(slice, item.storage_offsets, stops))
            target = planner.resolve_tensor(item).detach()
            try:
                spec = self._sizes[item.storage_index]
                target.copy_(map_blob(self.folder / place.file, (place.offset, place.length), spec)[part])
            except (OSError, ValueError, BadZipFile, RuntimeError) as error:  # RuntimeError: of another shape
                raise self._unreadable(place.file, str(error)) from None
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _unreadable(self, name: str, reason: str | None) -> LayerwiseError:
        path = os.fspath(self.folder / name)
        return LayerwiseError(f"checkpoint file {path!r} is damaged or gone: {reason}; take an older checkpoint")

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return (Path(checkpoint_id) / METADATA).is_file()


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
