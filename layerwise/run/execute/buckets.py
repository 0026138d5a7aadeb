"""Buckets: gradients that are sent together, their layout in memory, and the shards in them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from math import prod

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group, Handle, TrafficKind
from layerwise.geometry import Box
from layerwise.partition.groups import sharing
from layerwise.partition.place import Each
from layerwise.partition.sharding import Sharding
from layerwise.run.local_tensor import local_tensor


@dataclass(frozen=True, slots=True)
class ShardLayout:
    """The layout of one parameter on this rank, when each rank of a group holds a shard of it."""

    group: Group  # the ranks that compute with the same box of the parameter
    shape: tuple[int, ...]  # the shape of that box
    boxes: tuple[Box, ...]  # within that box, the shard of each rank of the group
    row: int  # elements of the largest shard: each shard's space in a slot
    gathered: str  # the layer for which alone the box is gathered; empty: it is always there

    @property
    def dimension(self) -> int | None:
        """Returns the dimension that is cut into equal shards in the group's order, or None."""
        first, last = self.boxes[0], self.boxes[-1]
        cut = next(k for k in range(len(self.shape)) if first.shape[k] < self.shape[k])
        size = first.shape[cut]
        equal = all(box.lo[cut] == i * size for i, box in enumerate(self.boxes)) and last.hi[cut] == self.shape[cut]
        return cut if equal and size * len(self.boxes) == self.shape[cut] else None


def shard_layout(computed: Each, sharding: Sharding, rank: int, *, gathered: str) -> ShardLayout:
    """Returns the layout of a parameter with these boxes by rank. gathered: see ShardLayout."""
    group, computed_box, owned = sharing(computed, rank), computed[rank], sharding.boxes.each
    assert computed_box is not None
    shards = [box for member in group if (box := owned[member]) is not None]
    boxes = (
        Box(*(tuple(a - b for a, b in zip(ends, computed_box.lo, strict=True)) for ends in (box.lo, box.hi)))
        for box in shards
    )
    return ShardLayout(group, computed_box.shape, tuple(boxes), int(sharding.rows[rank]), gathered)


class BucketSlots:
    """The layout in a bucket of some parameters of one group: `members` slots of `size` elements.

    A slot holds a shard of every parameter, one after the other; shards smaller than the largest are padded.
    """

    def __init__(self, names: Sequence[str], layouts: Mapping[str, ShardLayout]) -> None:
        self.layouts = {name: layouts[name] for name in names}
        self.group = layouts[names[0]].group
        self.members, self.size = len(self.group), sum(layout.row for layout in self.layouts.values())
        starts, start = {}, 0
        for name, layout in self.layouts.items():
            starts[name] = start
            start += layout.row
        self._starts = starts
        self._dimension = {name: layout.dimension for name, layout in self.layouts.items()}

    def shard(self, row: Tensor, name: str, member: int) -> Tensor:
        """Returns one parameter's shard in a member's slot."""
        shape = self.layouts[name].boxes[member].shape
        start = self._starts[name]
        return row[start : start + prod(shape)].view(shape)

    def pairs(self, slots: Tensor, name: str, full: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Returns one parameter's shards in all slots, each paired with the same elements of its box."""
        layout, cut = self.layouts[name], self._dimension[name]
        if cut is None:
            return [(self.shard(slots[i], name, i), full[box.slices()]) for i, box in enumerate(layout.boxes)]
        start, shape = self._starts[name], layout.boxes[0].shape
        there = slots[:, start : start + layout.row].view(self.members, *shape)
        split: Tensor = full.unflatten(cut, (self.members, shape[cut]))  # type: ignore[no-untyped-call]
        return [(there, split.movedim(cut, 0))]

    def new(self, like: Tensor, *, slots: int | None = None) -> Tensor:
        """Returns memory for all slots, or for one member's (slots=1)."""
        shape = (self.size,) if slots == 1 else (self.members, self.size)
        return torch.empty(shape, dtype=like.dtype, device=like.device)


@dataclass(slots=True)
class GradientBucket:
    """Parameters whose gradients are sent together. The memory belongs to one backward pass, then to the gradients."""

    group: Group  # the ranks that sum them
    names: list[str]
    slots: BucketSlots | None = None  # set if each rank holds a shard of them and receives the sum of that only
    flat: Tensor | None = None  # their gradients, one after another; allocated with the first
    views: dict[str, Tensor] = field(default_factory=dict)  # each gradient's place in it, if summed in full
    local: Tensor | None = None  # this rank's slot of the sum
    missing: set[str] = field(default_factory=set)  # names whose gradient this pass has not computed yet
    sent: bool = False  # whether this pass has begun the sum, or will not
    handle: Handle | None = None  # the sum under way

    @property
    def gathered(self) -> bool:
        """True if this rank has room for a shard of its parameters only, even while gradients are computed."""
        return self.slots is not None and bool(self.slots.layouts[self.names[0]].gathered)

    def begin_pass(self, trained: set[str], *, summed: bool) -> None:
        """Begins a backward pass. trained: names that may get a gradient; summed: whether the bucket is to be sent."""
        self.end()  # a pass that an error has ended
        self.give_up()
        self.missing, self.sent = trained if summed else set(), not summed

    def give_up(self) -> None:
        """Releases its memory to the gradients that were handed out of it."""
        self.flat, self.views, self.local = None, {}, None

    def place(self, name: str, parameters: Mapping[str, nn.Parameter]) -> Tensor:
        """Returns the place to write the gradient of a parameter that is summed in full."""
        if self.flat is None:
            parts = [local_tensor(parameters[each]) for each in self.names]
            self.flat = torch.empty(sum(p.numel() for p in parts), dtype=parts[0].dtype, device=parts[0].device)
            self.views = dict(zip(self.names, torch._C._nn.unflatten_dense_tensors(self.flat, parts), strict=True))
        return self.views[name]

    def begin(self, comm: Comm, what: str, parameters: Mapping[str, nn.Parameter], written: Collection[str]) -> Handle:
        """Starts the sum, with zeros for all parameters but the `written`."""
        self.sent = True
        for name in [name for name in self.names if name not in written]:
            if self.slots is None:
                self.place(name, parameters).zero_()
            else:
                zero = local_tensor(parameters[name]).new_zeros(())
                self.put(name, zero.expand(self.slots.layouts[name].shape), 1.0)
        assert self.flat is not None
        if self.slots is None:
            self.handle = comm.all_reduce(self.flat, self.group, "sync", what)
        else:
            self.local = self.slots.new(self.flat, slots=1)
            # Gathers keep the same order, so this may be awaited in the backward pass.
            stream: TrafficKind = "gathers" if self.gathered else "sync"
            self.handle = comm.reduce_scatter(self.local, self.flat, self.group, "sync", what, stream)
        return self.handle

    def end(self) -> None:
        """Waits for the sum, if one is under way, and drops the other ranks' shards."""
        if self.handle is not None:
            self.handle.wait()
            self.handle = None
        if self.slots is not None and self.sent:
            self.flat = None

    def put(self, name: str, gradient: Tensor, scale: float) -> None:
        """Writes `scale` times the gradient of a parameter that is cut into shards."""
        assert self.slots is not None
        if self.flat is None:
            self.flat = self.slots.new(gradient)
        for there, part in self.slots.pairs(self.flat, name, gradient):
            torch.mul(part, scale, out=there)

    def summed(self, name: str, rank: int) -> Tensor:
        """Returns the sum of a parameter's gradients, or this rank's shard of it."""
        if self.slots is None:
            return self.views[name]
        assert self.local is not None
        return self.slots.shard(self.local, name, self.group.index(rank))


def ready(buckets: Iterable[GradientBucket]) -> Iterator[GradientBucket]:
    """Yields the buckets to send now: the full ones that no unfinished bucket precedes."""
    return (bucket for bucket in takewhile(lambda one: not one.missing, buckets) if not bucket.sent)
