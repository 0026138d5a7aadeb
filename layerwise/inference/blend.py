"""Blend: the weighted mean of passes over parts of a sample; each rank has only its box."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.geometry import Box
from layerwise.inference.windows import LEAST
from layerwise.partition.moved import transfer
from layerwise.partition.place import Each
from layerwise.run.schedule.redistribute import Redistribution
from layerwise.tensorfile import dtype_name

Profiles = Sequence[Tensor | None]  # by dimension, the weights of a pass's positions; None: all equal


def move(comm: Comm, x: Tensor | None, owned: Each, needed: Each, like: Tensor, what: str) -> Tensor | None:
    """Returns this rank's box in `needed` of a tensor whose boxes `owned` the ranks hold. Every rank must call it."""
    plan = transfer(owned, needed, comm.rank)
    if plan.pattern != "local":
        plan = replace(plan, pattern="messages", group=())  # no collective is prepared for it
    return Redistribution(plan, comm, what).begin(x, like).finish()


def full_of(comm: Comm, boxes: Each, x: Tensor | None) -> tuple[Box, torch.dtype]:
    """Returns the full box and the element type of a tensor whose boxes the ranks hold; `x` is this rank's."""
    owned = [box for box in boxes if box is not None]
    dtype = next(filter(None, comm.all_gather_text("" if x is None else dtype_name(x.dtype))))
    return Box.full(map(max, *(box.hi for box in owned), owned[0].hi)), getattr(torch, dtype)


def gather(comm: Comm, boxes: Each, x: Tensor | None, ranks: Collection[int]) -> Tensor | None:
    """Returns the full tensor on these ranks, from the ranks' boxes. Every rank must call it."""
    full, dtype = full_of(comm, boxes, x)
    needed = tuple(full if rank in ranks else None for rank in range(comm.size))
    return move(comm, x, boxes, needed, torch.empty(0, dtype=dtype, device=comm.device), "an answer")


def slab(full: Box, rank: int, ranks: int, first: int) -> Box | None:
    """Returns a rank's part of a tensor, which is cut along the longest of its dimensions from `first` on."""
    dim = max(range(first, len(full.hi)), key=full.hi.__getitem__)
    lo, hi = list(full.lo), list(full.hi)
    lo[dim], hi[dim] = (full.hi[dim] * (rank + more) // ranks for more in (0, 1))
    box = Box(tuple(lo), tuple(hi))
    return box if box.volume else None


class Blend:
    """Sums the results of passes into the boxes that ranks own of the sample.

    Args:
        comm: The ranks.
        owned: Each rank's box of the sample's output.
        like: A tensor on the device of the sums, which are float64 if it is, else float32.
    """

    def __init__(self, comm: Comm, owned: Each, like: Tensor) -> None:
        self.comm, self.owned = comm, owned
        self.box = owned[comm.rank]
        self._like = like.new_empty(0, dtype=torch.promote_types(like.dtype, torch.float32))
        shape = () if self.box is None else self.box.shape
        self._total, self._weights = self._like.new_zeros(shape), self._like.new_zeros(shape[2:])

    def add(self, boxes: Each, x: Tensor | None, region: Box, profiles: Profiles) -> None:
        """Adds a pass over `region`, of which the ranks hold `boxes` (of the full output). Every rank must call it.

        profiles: weights by dimension of the region, without samples and channels.
        """
        needed = tuple(None if own is None or not (own & region).volume else own & region for own in self.owned)
        x = None if x is None else x.to(self._like.dtype)
        part, box = move(self.comm, x, boxes, needed, self._like, "a window's output"), needed[self.comm.rank]
        if part is None or box is None:
            return
        weights = torch.ones((), dtype=self._like.dtype, device=self._like.device)
        for dim, values in enumerate(profiles, 2):
            along = slice(box.lo[dim] - region.lo[dim], box.hi[dim] - region.lo[dim])
            own = torch.ones(box.shape[dim]) if values is None else values[along]
            weights = weights.unsqueeze(-1) * own.to(weights)
        weights = weights.clamp(min=LEAST)
        place = box.slices(self.box)
        self._total[place] += part * weights
        self._weights[place[2:]] += weights

    def mean(self) -> Tensor | None:
        """Returns this rank's box of the mean, or None."""
        return None if self.box is None else self._total / self._weights
