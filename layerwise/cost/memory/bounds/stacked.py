"""Stacked: what all N devices have of a layer under all its C configurations; device n under c is row c * N + n.

Of V configurations many have the same cells, and differ in what saves memory: C have different ones. And what moves on
an edge under any pairs of them (`Travel`), as `partition.moved` says of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, TypeVar

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Config, distinct_cells
from layerwise.cost.model import CostModel
from layerwise.geometry import boundaries, interval_overlap
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.ops.facts import Dim, Maps
from layerwise.partition.layout import LayoutCells
from layerwise.partition.place import Boxes, Place

T = TypeVar("T", np.bool_, np.float64, np.int64)
ROWS = 2**18  # of boxes that are compared at once: bounds the memory


@dataclass(frozen=True, slots=True, eq=False)
class Stacked:
    """The places of a layer under C different cells on N devices (tests/cost/test_memory.py: those of `place`)."""

    place: Place  # of C*N devices: those of the first cells first; its boxes have no `cuts`
    everywhere: Mask  # (C,) whether every device holds the whole
    shape: tuple[int, int]  # (C, N)
    rows: Ints  # (V,) which cells each configuration has
    dims: tuple[Dim, ...]  # of the iteration space
    computed: Ints  # (C, D) how often each is cut
    owned: Ints  # (C, R) and each of the output

    def degrees(self, epilogue: bool) -> Ints:
        """The number of cells of each dimension, as `Place.at`."""
        return self.owned if epilogue else self.computed

    @property
    def full(self) -> tuple[int, int]:
        """(V, N)."""
        return len(self.rows), self.shape[1]

    def table(self, sizes: Floats | Mask | float) -> Floats:
        """(C*N,) numbers, or one for all, as (V, N)."""
        flat = np.broadcast_to(np.asarray(sizes, np.float64), self.shape[0] * self.shape[1])
        return self._of_configs(flat)

    def shared(self, boxes: Boxes) -> Mask:
        """(V, N) `Boxes.shared` under each configuration."""
        key = np.where(boxes.active, self._key(boxes), -1)
        _, which, counts = np.unique(key, return_inverse=True, return_counts=True)
        return self._of_configs(boxes.active & (counts[which.reshape(-1)] > 1))

    def groups(self, boxes: Boxes) -> Ints:
        """(V, N) a number for all devices that have the same box, under each configuration: that of the first."""
        _, first, which = np.unique(self._key(boxes), return_index=True, return_inverse=True)
        return self._of_configs(first[which.reshape(-1)] % self.shape[1])

    def _of_configs(self, array: NDArray[T]) -> NDArray[T]:
        return array.reshape(self.shape)[self.rows]

    def _key(self, boxes: Boxes) -> Ints:
        """(C*N,) equal for equal boxes of one configuration alone."""
        key = np.repeat(np.arange(self.shape[0]), self.shape[1])
        for j in range(boxes.lo.shape[1]):
            ends, row = intervals(boxes, j)
            key = key * len(ends) + row
        return key


def stacked(model: CostModel, layer: Layer, configs: tuple[Config, ...]) -> Stacked:
    """The sizes of a layer under these configurations."""
    cells, which = distinct_cells(configs)
    shape, dims, rank = (len(cells), model.devices.count), layer.space.dims, len(layer.out.shape)
    rows = np.array(which, np.int64)
    if layer.role is Role.CONSTANT or (layer.end and model.options.io != "sample"):
        # What is read of an input follows from several layers, so nothing is claimed for it.
        read = layer.role is Role.INPUT and model.options.io == "boxes"
        whole = Boxes.whole((0,) * len(layer.out.shape) if read else layer.out.shape, shape[0] * shape[1])
        ones = np.ones((shape[0], len(dims)), np.int64)
        place = Place(whole, whole, everywhere=True)
        return Stacked(place, np.ones(shape[0], np.bool_), shape, rows, dims, ones, ones[:, :rank])
    layout = model.layout(layer, cells)
    boxes = (_boxes(layout.computed, dims, not rank), _boxes(layout.owned, dims[:rank], not rank))
    uncut = [layer.name in model.graph.unfed and config.total == 1 for config in cells]
    degrees = (these.degrees[:, int(not rank) :] for these in (layout.computed, layout.owned))
    return Stacked(Place(*boxes), np.array(uncut, np.bool_), shape, rows, dims, *degrees)


def _boxes(cells: LayoutCells, dims: Sequence[Dim], skip: int) -> Boxes:
    """skip: 1 for a scalar, which layouts count as one dimension."""
    lo, hi = (np.zeros((*cells.index.shape[:2], len(dims)), np.int64) for _ in range(2))
    for i, dim in enumerate(dims):
        column = cells.degrees[:, skip + i]
        for degree in np.unique(column).tolist():
            cuts, rows = boundaries(dim.extent, degree, dim.unit), column == degree
            index = np.maximum(cells.index[rows, :, skip + i], 0)
            lo[rows, :, i], hi[rows, :, i] = cuts[index], cuts[index + 1]
    active = cells.active.reshape(-1)
    lo, hi = (np.where(active[:, None], side.reshape(len(active), len(dims)), 0) for side in (lo, hi))
    return Boxes(lo, hi, active)


def intervals(boxes: Boxes, dim: int) -> tuple[Ints, Ints]:
    """The different intervals of one dimension, (I, 2), and which each box has."""
    lo, hi = boxes.lo[:, dim], boxes.hi[:, dim]
    _, first, row = np.unique(lo * (int(hi.max()) + 1) + hi, return_index=True, return_inverse=True)
    return np.stack([lo[first], hi[first]], axis=1), row.reshape(-1)


def inside(owned: Boxes, need: Boxes, pairs: tuple[int, int]) -> Mask:
    """(C_u, C_v): whether every device owns all that it needs, under each pair of configurations."""
    ends = _by_configuration(owned, pairs[0]), _by_configuration(need, pairs[1])
    devices = len(owned.lo) // pairs[0]
    few = np.unique([0, min(1, devices - 1), devices // 3, devices - 1])  # most pairs fail on these
    u, v = (which.reshape(-1) for which in np.indices(pairs))
    for some in (few, np.arange(devices)):
        step, held = max(1, ROWS // len(some)), list[Mask]()
        for first in range(0, len(u), step):
            which = slice(first, first + step)
            held.append(_inside(*ends, u[which, None], v[which, None], some))
        found = np.concatenate(held) if held else np.zeros(0, np.bool_)
        u, v = u[found], v[found]
    result: Mask = np.zeros(pairs, np.bool_)
    result[u, v] = True
    return result


def _inside(owned: Boxes, need: Boxes, u: Ints, v: Ints, d: Ints) -> Mask:
    """(P,) of P pairs, on devices d."""
    held: Mask = np.broadcast_to(owned.active[u, d], (len(u), len(d))).copy()
    for j in range(owned.lo.shape[-1]):
        for less, more in ((owned.lo[u, d, j], need.lo[v, d, j]), (need.hi[v, d, j], owned.hi[u, d, j])):
            np.logical_and(held, np.less_equal(less, more), out=held)
    empty = ~need.active | (need.hi <= need.lo).any(-1)
    return np.asarray((held | empty[v, d]).all(1), np.bool_)


def _by_configuration(boxes: Boxes, count: int) -> Boxes:
    """The boxes as arrays (C, N, ...)."""
    shape = (count, len(boxes.active) // count)
    return Boxes(
        boxes.lo.reshape(*shape, boxes.lo.shape[1]),
        boxes.hi.reshape(*shape, boxes.lo.shape[1]),
        boxes.active.reshape(shape),
    )


# What is sent comes back as gradients; of what goes back some must be made contiguous; these are added up.
Part = Literal["sent", "back", "returned"]


class Travel:
    """An edge on which something travels under some pairs of configurations (tests/cost/test_memory.py)."""

    def __init__(
        self,
        source: Stacked,
        target: Stacked,
        maps: Maps,
        epilogue: bool,
        item_bytes: int,
        local: Mask,
    ) -> None:
        self.source, self.target, self.maps, self.epilogue = source, target, maps, epilogue
        self.item_bytes, self.local = item_bytes, local
        self.own = source.place.owned
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
        """A mask: true if the parts of what a device needs that others own are not contiguous."""
        found: Mask = np.zeros(np.broadcast_shapes(u.shape, v.shape, d.shape), np.bool_)
        for scattered, column in self._cuts:
            found = found | scattered[v, d, column[u]]
        return found

    @cached_property
    def _lengths(self) -> list[tuple[Floats, Ints]]:
        """Sums over the target's cells for each dimension (C_u, N, degrees), and the degree of each of its C_v."""
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
        """A mask for each dimension (C_v, N, degrees): the source's cells cut what is needed; and their degrees."""
        rows, degrees = [], self.source.degrees(True)
        for j in range(len(self.maps)):
            values, which = np.unique(degrees[:, j], return_inverse=True)
            dim, flags = self.source.dims[j], []
            for degree in values.tolist():
                cuts = boundaries(dim.extent, degree, dim.unit)
                flags.append(_scattered(self.need, j, cuts))
            rows.append((self._of_target(np.stack(flags, axis=1)), which.reshape(-1)))
        return rows

    def _of_source(self, array: NDArray[T]) -> NDArray[T]:
        return array.reshape(*self.source.shape, *array.shape[1:])

    def _of_target(self, array: NDArray[T]) -> NDArray[T]:
        return array.reshape(*self.target.shape, *array.shape[1:])


def _scattered(boxes: Boxes, dim: int, cuts: Ints) -> Mask:
    """A mask: true if parts of boxes between these cuts of one dimension are not contiguous, as `moved` has it."""
    ends, row = intervals(boxes, dim)
    lengths = interval_overlap(ends[:, :1], ends[:, 1:], cuts[:-1], cuts[1:])
    whole = ((lengths == 0) | (lengths == ends[:, 1:] - ends[:, :1])).all(1)
    result: Mask = ~(whole[row] | ((boxes.hi - boxes.lo)[:, :dim].prod(1) <= 1))
    return result
