"""Buckets: gradients that travel together, as they lie in memory and go over the network."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group, Handle, Kind
from layerwise.run.execute.rows import Rows

OWNERS = 2  # of the memory of a tensor that shares it with none: itself, and the storage that is asked


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients travel together."""

    group: Group  # the ranks that sum them
    names: list[str]
    rows: Rows | None = None  # where each rank keeps a part of them: it gets the sum of that only
    flat: Tensor | None = None  # their gradients, one after another; made at the first
    mine: Tensor | None = None  # this rank's row of the sum
    tensors: int = 0  # that share the memory of `flat`, as it was made
    missing: set[str] = field(default_factory=set)  # names whose gradient this pass has not made yet
    left: bool = False  # whether this pass has begun to sum it, or will not
    handle: Handle | None = None  # the sum under way

    @property
    def gathered(self) -> bool:
        """Whether this rank has room for a part of its parameters only, also while gradients are made."""
        return self.rows is not None and bool(self.rows.parts[self.names[0]].gathered)

    def begin(self, comm: Comm, what: str) -> Handle:
        """Starts the sum."""
        assert self.flat is not None
        self.left = True
        if self.rows is None:
            self.handle = comm.all_reduce(self.flat, self.group, "sync", what)
        else:
            self.mine = self.rows.new(self.flat, rows=1)
            # Where parameters are gathered, in one order with that: so it may be awaited in the backward pass.
            stream: Kind = "gathers" if self.gathered else "sync"
            self.handle = comm.reduce_scatter(self.mine, self.flat, self.group, "sync", what, stream)
        return self.handle

    def end(self) -> None:
        """Waits for it, where it is under way. What other ranks keep is given up."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        if self.rows is not None and self.left:
            self.flat = None

    def put(self, name: str, gradient: Tensor, scale: float, zero: Tensor) -> None:
        """The gradient of a parameter of which each rank keeps a part, times `scale`."""
        assert self.rows is not None
        if self.flat is None:
            self.flat = self.rows.new(zero)
        for there, part in self.rows.pairs(self.flat, name, gradient):
            torch.add(zero, part, alpha=scale, out=there)

    def put_none(self, name: str, zero: Tensor) -> None:
        """What stands for no gradient on any rank: zeros with a sign."""
        assert self.rows is not None
        if self.flat is None:
            self.flat = self.rows.new(zero)
        for member in range(self.rows.members):
            self.rows.part(self.flat[member], name, member).fill_(-0.0)

    def summed(self, name: str, rank: int) -> Tensor:
        """This rank's part of the sum."""
        assert self.rows is not None
        assert self.mine is not None
        return self.rows.part(self.mine, name, self.group.index(rank))


def full(buckets: Iterable[Bucket]) -> Iterator[Bucket]:
    """Those that are to leave now: full ones, behind nothing that is not."""
    return (bucket for bucket in takewhile(lambda one: not one.missing, buckets) if not bucket.left)


def scaled(gradient: Tensor, scale: float) -> Tensor:
    """In place where nothing else has its memory: with a copy the two would be the most that a step holds."""
    if scale == 1:
        return gradient
    if gradient.layout == torch.strided:
        owners = torch._C._storage_Use_Count(gradient.untyped_storage()._cdata)
        if owners == OWNERS:
            return gradient.mul_(scale)
    return gradient * scale
