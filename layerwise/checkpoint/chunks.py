"""Chunks of a tensor as torch.distributed.checkpoint's planners take them: a DTensor does not describe all cells."""

from __future__ import annotations

import io
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import ReadItem, TensorWriteData, WriteItem, WriteItemType

from layerwise.checkpoint.storage import Reader
from layerwise.geometry import Box
from layerwise.run.state.shard import Shard


@dataclass(slots=True)
class Chunks:
    """What this rank holds, or shall be given, of a tensor: disjoint boxes."""

    shape: tuple[int, ...]  # of all of the tensor
    dtype: torch.dtype
    tensors: dict[tuple[int, ...], Tensor] = field(default_factory=dict)  # by the boxes' origins

    def add(self, box: Box, tensor: Tensor) -> None:
        assert box.lo not in self.tensors, f"{box} twice"
        assert box.shape == tuple(tensor.shape), f"{box} holds {tuple(tensor.shape)}"
        self.tensors[box.lo] = tensor

    def __create_write_items__(self, fqn: str, _: object) -> list[WriteItem]:
        return [
            WriteItem(
                MetadataIndex(fqn, chunk.offsets),
                WriteItemType.SHARD,
                tensor_data=TensorWriteData(chunk, TensorProperties(dtype=self.dtype), torch.Size(self.shape)),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(lo), tensor.shape) for lo, tensor in self.tensors.items()]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None
        return self.tensors[tuple(index.offset)]


def chunks_of(shards: Iterable[Shard]) -> dict[str, Chunks]:
    """The tensors of these shards, by name."""
    boxes: dict[str, Chunks] = {}
    for shard in shards:
        boxes.setdefault(shard.name, Chunks(shard.shape, shard.tensor.dtype)).add(shard.box, shard.tensor.detach())
    return boxes


class ChunkSavePlanner(DefaultSavePlanner):
    """Plans the writing of `Chunks` by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def lookup_object(self, index: MetadataIndex) -> Tensor:
        boxes: Chunks = self.state_dict[index.fqn]
        return boxes.__get_tensor_shard__(index)


class ChunkLoadPlanner(DefaultLoadPlanner):
    """Plans the reading of `Chunks`, or of whole tensors, by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def set_up_planner(
        self, state_dict: dict[str, object], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        # The inherited one would replace by None whatever is not a tensor.
        self.state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        boxes = self.state_dict[index.fqn]
        return boxes.__get_tensor_shard__(index) if isinstance(boxes, Chunks) else super().lookup_tensor(index)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        raise NotImplementedError("the inherited one unpickles")


def read_into(reader: Reader, tensors: Mapping[str, Chunks | Tensor]) -> None:
    """Fills these from the checkpoint that the reader has opened; only what intersects them is read."""
    planner = ChunkLoadPlanner()
    planner.set_up_planner(dict(tensors), reader.metadata)
    reader.read_data(reader.prepare_local_plan(planner.create_local_plan()), planner).wait()
