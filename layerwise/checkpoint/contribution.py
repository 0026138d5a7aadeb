"""What each rank brings to a checkpoint, how rank 0 makes one of it, and what can be known of it afterwards."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, cast

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.storage import WriteResult

from layerwise.checkpoint.chunks import Chunks, ChunkSavePlanner, chunks_of
from layerwise.checkpoint.optimizer_state import PREFIX, OptimizerFacts, checked, merge
from layerwise.checkpoint.storage import Reader, Stored, Writer
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.run.state.shard import Shard
from layerwise.tensorfile import DTYPE_OF, dtype_name

Told = Mapping[str, Any]  # what `Contribution.write` returns, after its way through JSON


@dataclass(frozen=True, slots=True)
class Contribution:
    """The boxes that this rank writes, and what it knows besides."""

    boxes: Mapping[str, Chunks]
    aliases: Mapping[str, tuple[str, ...]]
    optimizer: OptimizerFacts | None

    @staticmethod
    def of(shards: Sequence[Shard], optimizer: OptimizerFacts | None, states: Mapping[str, Chunks]) -> Contribution:
        """`states` are the optimizer's boxes. LayerwiseError for a parameter whose name is taken by these."""
        odd = next((shard.name for shard in shards if shard.name.startswith(PREFIX)), None)
        if odd is not None:
            raise LayerwiseError(
                f"{odd!r} cannot be saved: names that begin with {PREFIX} are the optimizer's; rename it"
            )
        boxes = chunks_of([shard for shard in shards if writes(shard)])
        return Contribution({**boxes, **states}, {s.name: s.aliases for s in shards if s.aliases}, optimizer)

    def write(self, folder: Path, rank: int) -> dict[str, JSON]:
        """Writes this rank's file and tells what is in it. OSError where that is impossible."""
        if not folder.is_dir():
            raise LayerwiseError(f"{os.fspath(folder)!r} is not to be seen here: all ranks must share the file system")
        planner, writer = ChunkSavePlanner(), Writer(folder, rank)
        planner.set_up_planner(dict(self.boxes), is_coordinator=rank == 0)
        plan = writer.prepare_local_plan(planner.create_local_plan())
        results = writer.write_data(plan, planner).wait()
        places = {result.index: result.storage_data for result in results}
        return {
            "stored": [results[0].storage_data.file, results[0].storage_data.sha256] if results else None,
            "tensors": {
                name: [dtype_name(some.dtype), some.shape, _rows(name, some, places)]
                for name, some in self.boxes.items()
            },
            "aliases": self.aliases,
            "optimizer": cast(JSON, self.optimizer),
        }


@dataclass(frozen=True, slots=True)
class About:
    """What a checkpoint says besides its tensors."""

    model: str  # `model_digest`
    steps: int  # training forwards done
    progress: Mapping[str, Any]  # what the caller of `save` gave
    aliases: Mapping[str, Sequence[str]]  # further names of tensors
    optimizer: OptimizerFacts | None

    @staticmethod
    def of(reader: Reader) -> About:
        """LayerwiseError where it makes no sense."""
        with reader.sense():
            about: dict[str, Any] = dict(reader.about)
            if type(about["steps"]) is not int or about["steps"] < 0:
                raise ValueError(f"{about['steps']!r} steps")
            optimizer = None if about["optimizer"] is None else checked(about["optimizer"])
            aliases = {name: tuple(map(str, names)) for name, names in about["aliases"].items()}
            return About(str(about["model"]), about["steps"], dict(about["progress"].items()), aliases, optimizer)


def finish(folder: Path, about: Mapping[str, JSON], written: Sequence[Told]) -> None:
    """Completes the folder, with `about` and what follows from what the ranks have told.

    LayerwiseError where they contradict each other or elements are missing.
    """
    optimizers = [contribution["optimizer"] for contribution in written]
    if None in optimizers and any(optimizers):
        raise LayerwiseError(f"rank {optimizers.index(None)} gave no optimizer, others did: give all ranks the same")
    tensors: dict[str, TensorStorageMetadata] = {}
    results: list[WriteResult] = []
    for contribution in written:
        for name, (dtype, shape, rows) in contribution["tensors"].items():
            new = TensorStorageMetadata(TensorProperties(dtype=DTYPE_OF[dtype]), torch.Size(shape), [])
            known = tensors.setdefault(name, new)
            if (known.properties.dtype, known.size) != (new.properties.dtype, new.size):
                raise LayerwiseError(f"{name!r} differs in element type or shape between ranks")
            for lo, sizes, offset, length in rows:
                known.chunks.append(ChunkStorageMetadata(torch.Size(lo), torch.Size(sizes)))
                file, sha256 = contribution["stored"]
                place = Stored(file, sha256, offset, length)
                results.append(WriteResult(MetadataIndex(name, lo), length, place))
    extended: dict[str, JSON] = {
        **about,
        "aliases": {name: aliases for contribution in written for name, aliases in contribution["aliases"].items()},
        "optimizer": None if None in optimizers else cast(JSON, merge(optimizers)),
    }
    Writer(folder, 0, extended).finish(Metadata(dict(tensors)), [results])


def _rows(name: str, boxes: Chunks, places: Mapping[MetadataIndex, Stored]) -> list[JSON]:
    """Of each box: its origin and sizes, and where it is in the file."""
    rows: list[JSON] = []
    for lo, tensor in boxes.tensors.items():
        place = places[MetadataIndex(name, lo)]
        rows.append([lo, tensor.shape, place.offset, place.length])
    return rows


def writes(shard: Shard) -> bool:
    """Whether this rank writes the shard's box: an empty one only where the whole tensor is empty."""
    return shard.first and (shard.box.volume > 0 or prod(shard.shape) == 0)
