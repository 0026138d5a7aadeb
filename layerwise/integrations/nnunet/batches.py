"""BatchesByTurns: batches that the ranks load and augment by turns, of which each is sent its boxes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from layerwise.geometry import Box
from layerwise.run.parallel import ParallelModule, of


class BatchesByTurns:
    """An iterator of this rank's boxes of batches.

    So the workers of all ranks together do one device's work, and draw random numbers as they like.

    Attributes:
        loader: nnU-Net's, of whole batches.
    """

    def __init__(self, loader: Iterator[dict[str, Any]], model: ParallelModule, types: list[torch.dtype]) -> None:
        """types: of the model's inputs."""
        self.loader, self._comm, self._types, self._turn = loader, of(model).comm, types, 0
        boxes = self._comm.all_gather_object([[box.lo, box.hi] for box in of(model).read_boxes().values()])
        self._boxes = [[Box(tuple(lo), tuple(hi)) for lo, hi in of_rank] for of_rank in boxes]

    def __iter__(self) -> Iterator[list[Tensor]]:
        return self

    def __next__(self) -> list[Tensor]:
        comm, sender = self._comm, self._turn
        self._turn = (sender + 1) % comm.size
        boxes = self._boxes[comm.rank]
        sizes = [box.volume * dtype.itemsize for box, dtype in zip(boxes, self._types, strict=True)]
        received = torch.empty(sum(sizes), dtype=torch.uint8, device=comm.device)
        sends, receives = list[tuple[int, Tensor]](), [(sender, received)]
        if comm.rank == sender:
            batch = next(self.loader)
            targets = batch["target"] if isinstance(batch["target"], list) else [batch["target"]]
            packed = [_packed([batch["data"], *targets], of_rank).to(comm.device) for of_rank in self._boxes]
            received = packed[sender]
            sends, receives = [(rank, message) for rank, message in enumerate(packed) if rank != sender], []
        comm.exchange(sends, receives, "io", "boxes of a batch").wait()
        parts = zip(torch.split(received, sizes), self._types, boxes, strict=True)
        return [part.view(dtype).view(box.shape) for part, dtype, box in parts]


def _packed(tensors: list[Tensor], boxes: list[Box]) -> Tensor:
    """The bytes of the tensors' boxes, one after another; tensors that have none are left out."""
    parts = [x[box.slices()].contiguous() for x, box in zip(tensors, boxes, strict=False)]
    return torch.cat([part.view(-1).view(torch.uint8) for part in parts])
