"""Rows: how the parts of parameters that a group of ranks shares out lie in what travels, a row a rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from layerwise.comm.base import Group
from layerwise.geometry import Box
from layerwise.partition.groups import sharing
from layerwise.partition.place import Each
from layerwise.partition.sharding import Sharding


@dataclass(frozen=True, slots=True)
class Parts:
    """One parameter on this rank."""

    group: Group  # the ranks that compute with the same box of it
    shape: tuple[int, ...]  # of that box
    boxes: tuple[Box, ...]  # of it, what each of the group keeps
    row: int  # elements that each part has in a row: those of the largest
    gathered: str  # the layer while which computes only the box is there; empty: it is there all the time

    @property
    def dimension(self) -> int | None:
        """That is cut into equal parts, in the order of the group; None where they are unequal or in another order."""
        first, last = self.boxes[0], self.boxes[-1]
        cut = next(k for k in range(len(self.shape)) if first.shape[k] < self.shape[k])
        size = first.shape[cut]
        equal = all(box.lo[cut] == i * size for i, box in enumerate(self.boxes)) and last.hi[cut] == self.shape[cut]
        return cut if equal and size * len(self.boxes) == self.shape[cut] else None


def parts(computed: Each, sharding: Sharding, rank: int, *, gathered: str) -> Parts:
    """Of a parameter with these boxes by rank. gathered: as Parts have it."""
    group, mine, held = sharing(computed, rank), computed[rank], sharding.boxes.each
    assert mine is not None
    kept = [box for member in group if (box := held[member]) is not None]
    boxes = (
        Box(*(tuple(a - b for a, b in zip(ends, mine.lo, strict=True)) for ends in (box.lo, box.hi))) for box in kept
    )
    return Parts(group, mine.shape, tuple(boxes), int(sharding.rows[rank]), gathered)


class Rows:
    """Where each of some parameters of one group lies: `members` rows of `size` elements.

    A row has a part of every parameter, one after the other; behind a part that is not the largest is room.
    """

    def __init__(self, names: Sequence[str], parts: Mapping[str, Parts]) -> None:
        self.parts = {name: parts[name] for name in names}
        self.group = parts[names[0]].group
        self.members, self.size = len(self.group), sum(one.row for one in self.parts.values())
        starts, start = {}, 0
        for name, one in self.parts.items():
            starts[name] = start
            start += one.row
        self._starts = starts
        self._dimension = {name: one.dimension for name, one in self.parts.items()}

    def part(self, row: Tensor, name: str, member: int) -> Tensor:
        """That of one parameter, in a row of a member."""
        shape = self.parts[name].boxes[member].shape
        start = self._starts[name]
        return row[start : start + prod(shape)].view(shape)

    def pairs(self, rows: Tensor, name: str, whole: Tensor) -> list[tuple[Tensor, Tensor]]:
        """Of one parameter its parts in all rows, each with the same elements of its box."""
        one, cut = self.parts[name], self._dimension[name]
        if cut is None:
            return [(self.part(rows[i], name, i), whole[box.slices()]) for i, box in enumerate(one.boxes)]
        start, shape = self._starts[name], one.boxes[0].shape
        there = rows[:, start : start + one.row].view(self.members, *shape)
        split: Tensor = whole.unflatten(cut, (self.members, shape[cut]))  # type: ignore[no-untyped-call]
        return [(there, split.movedim(cut, 0))]

    def new(self, like: Tensor, *, rows: int | None = None) -> Tensor:
        """Memory for all rows, or for one of a member (rows=1)."""
        shape = (self.size,) if rows == 1 else (self.members, self.size)
        return torch.empty(shape, dtype=like.dtype, device=like.device)
