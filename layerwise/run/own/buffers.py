"""Buffers of a model of which nothing is known: what its forward writes is rank 0's on all ranks, as with DDP."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm


class Buffers:
    """All buffers of `module` but those of the modules `alike`, which are the same on all ranks by themselves."""

    def __init__(self, module: nn.Module, alike: Collection[str], comm: Comm) -> None:
        self._comm, self._written = comm, False
        every = (name for name, _ in module.named_buffers())
        self._module, self._names = module, [name for name in every if name.rpartition(".")[0] not in alike]

    def written(self) -> None:
        """A forward pass in training may write them."""
        self._written = bool(self._names)

    def send(self) -> None:
        """Gives all ranks rank 0's, where a forward pass has been since. Every rank calls it."""
        if not self._written:
            return
        self._written, comm = False, self._comm
        buffers = [self._module.get_buffer(name) for name in self._names]
        flat = torch.cat([_bytes(buffer) for buffer in buffers])
        others = range(1, comm.size) if comm.rank == 0 else ()
        receives = [] if comm.rank == 0 else [(0, flat)]
        comm.exchange([(rank, flat) for rank in others], receives, "io", "the model's buffers").wait()
        if comm.rank:
            for buffer, part in zip(buffers, torch.split(flat, [b.nbytes for b in buffers]), strict=True):
                buffer.detach().copy_(part.clone().view(buffer.dtype).view(buffer.shape))


def _bytes(buffer: Tensor) -> Tensor:
    return buffer.detach().contiguous().view(-1).view(torch.uint8)
