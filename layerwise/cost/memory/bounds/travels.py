"""Travels: what `partition.moved` says of an edge, under any pairs of configurations at once."""

from __future__ import annotations

from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from layerwise.cost.memory.bounds.stacked import Stacked, intervals
from layerwise.geometry import Lattices, boundaries, interval_overlap, numbering, through
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.ops.facts import Dim, Maps
from layerwise.partition.place import Boxes

# What is sent comes back as gradients; of what goes back some must be made contiguous; these are added up.
T = TypeVar("T", np.bool_, np.float64, np.int64)
Part = Literal["sent", "back", "returned"]


class Travel:
    """An edge on which something travels under some pairs of configurations (tests/cost/test_bounds.py)."""

    def __init__(
        self,
        source: Stacked,
        target: Stacked,
        maps: Maps,
        epilogue: bool,
        item_bytes: int,
        local: Mask,
        lattices: Lattices = (),
    ) -> None:
        self.numbers = numbering(tuple(dim.extent for dim in source.dims[: len(maps)]), lattices)
        self.source, self.target, self.maps, self.epilogue = source, target, through(maps, self.numbers), epilogue
        self.item_bytes, self.local = item_bytes, local
        self.own = source.place.owned.numbered(self.numbers) if lattices else source.place.owned
        self.need = target.place.at(epilogue).needs(self.maps)

    def bytes(self, part: Part, u: Ints, v: Ints, d: Ints) -> Floats:
        """On devices d under configurations u and v of its ends; they are broadcast."""
        kept = self._kept(u, v, d)
        if part == "back":
            found = np.where(self._scattered(u, v, d), self._of_target(self.need.volume)[v, d] - kept, 0.0)
        else:
            sent = np.maximum(self._wanted(u, v, d) - kept, 0.0)
            own = self._of_source(self.source.place.owned.volume)[u, d]
            found = sent if part == "sent" else np.where((kept == own) & (sent == 0), 0.0, own)
        size: Floats = np.where(self.local[u, v], 0.0, found * self.item_bytes)
        return size

    def _kept(self, u: Ints, v: Ints, d: Ints) -> Floats:
        """Elements that a device owns and needs."""
        kept: Floats = np.float64(1) * (
            self._of_source(self.own.active)[u, d] & self._of_target(self.need.active)[v, d]
        )
        for j in range(len(self.maps)):
            own = self._of_source(self.own.lo)[u, d, j], self._of_source(self.own.hi)[u, d, j]
            kept = kept * interval_overlap(
                *own, self._of_target(self.need.lo)[v, d, j], self._of_target(self.need.hi)[v, d, j]
            )
        return kept

    def _wanted(self, u: Ints, v: Ints, d: Ints) -> Floats:
        """Elements that all devices together want of what a device owns: a product of sums over the target's cells."""
        degrees, wanted = self.target.degrees(self.epilogue), np.float64(1) * self._of_source(self.own.active)[u, d]
        for lengths, column in self._lengths:
            wanted = wanted * lengths[u, d, column[v]]
        driven = {axis.source for axis in self.maps}
        for i in range(degrees.shape[1]):
            if i not in driven:
                wanted = wanted * degrees[v, i]
        return wanted

    def _scattered(self, u: Ints, v: Ints, d: Ints) -> Mask:
        """Whether the parts of what a device needs that others own are not contiguous."""
        found: Mask = np.zeros(np.broadcast_shapes(u.shape, v.shape, d.shape), np.bool_)
        for scattered, column in self._cuts:
            found = found | scattered[v, d, column[u]]
        return found

    @cached_property
    def _lengths(self) -> list[tuple[Floats, Ints]]:
        """For each dimension (C_u, N, degrees) sums over the target's cells, and which degree each of its C_v has."""
        rows, degrees = [], self.target.degrees(self.epilogue)
        for j, axis in enumerate(self.maps):
            column = np.ones(len(degrees), np.int64) if axis.source is None else degrees[:, axis.source]
            values, which = np.unique(column, return_inverse=True)
            dim = Dim(None, 1) if axis.source is None else self.target.dims[axis.source]
            ends, row = intervals(self.own, j)
            sums = []
            for degree in values.tolist():
                cuts = boundaries(dim.extent, degree, dim.unit)
                lengths = interval_overlap(ends[:, :1], ends[:, 1:], *axis(cuts[:-1], cuts[1:]))
                sums.append(lengths.sum(1).astype(np.float64)[row])
            rows.append((self._of_source(np.stack(sums, axis=1)), which.reshape(-1)))
        return rows

    @cached_property
    def _cuts(self) -> list[tuple[Mask, Ints]]:
        """For each dimension (C_v, N, degrees) whether the source's cells cut what is needed so, and their degrees."""
        rows, degrees = [], self.source.degrees(True)
        for j in range(len(self.maps)):
            values, which = np.unique(degrees[:, j], return_inverse=True)
            dim, flags = self.source.dims[j], []
            for degree in values.tolist():
                cuts = self.numbers[j].cuts(boundaries(dim.extent, degree, dim.unit))
                flags.append(_scattered(self.need, j, cuts))
            rows.append((self._of_target(np.stack(flags, axis=1)), which.reshape(-1)))
        return rows

    def _of_source(self, array: NDArray[T]) -> NDArray[T]:
        return array.reshape(*self.source.shape, *array.shape[1:])

    def _of_target(self, array: NDArray[T]) -> NDArray[T]:
        return array.reshape(*self.target.shape, *array.shape[1:])


def _scattered(boxes: Boxes, dim: int, cuts: Ints) -> Mask:
    """Whether parts of boxes between these cuts of one dimension are not contiguous, as `moved` has it."""
    ends, row = intervals(boxes, dim)
    lengths = interval_overlap(ends[:, :1], ends[:, 1:], cuts[:-1], cuts[1:])
    whole = ((lengths == 0) | (lengths == ends[:, 1:] - ends[:, :1])).all(1)
    result: Mask = ~(whole[row] | ((boxes.hi - boxes.lo)[:, :dim].prod(1) <= 1))
    return result
