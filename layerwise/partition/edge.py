"""Edge: a tensor that one layer owns and another needs; and which edges are all-gathers.

An all-gather is a transfer that runs as one collective on networks that have them (NCCL): all members of a group need
the same box, and each owns an equal part of it. Its backward is a reduce-scatter. All other transfers are messages.
This is `partition.moved.transfer` for all pairs of configurations at once (tests/partition/test_edge.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from math import prod

import numpy as np

from layerwise.geometry import AxisMap, boundaries, identity, whole
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.ops.facts import Dim, Maps
from layerwise.partition.largest import all_boxes, largest_box
from layerwise.partition.layout import LayoutCells
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class Edge:
    """All that a transfer depends on, for C_u configurations of the producer and C_v of the consumer.

    It has no names of layers or labels of dimensions: equal edges cost the same.
    """

    held: tuple[Dim, ...]  # the tensor's dimensions, without labels; a scalar counts as one dimension of extent 1
    item_bytes: int
    maps: Maps  # the box of the tensor that a cell of the consumer needs
    dims: tuple[Dim, ...]  # dimensions of the consumer's cells, without labels
    owners: LayoutCells  # of the tensor
    needers: LayoutCells  # of `dims`

    @staticmethod
    def of(source: TensorSpec, owners: LayoutCells, maps: Maps, dims: tuple[Dim, ...], needers: LayoutCells) -> Edge:
        """The edge of `source` from its owners to devices that need `maps` of it for their cells of `dims`."""
        rows = zip(source.shape or (1,), source.units or (1,), strict=True)
        held = tuple(Dim(None, extent, unit) for extent, unit in rows)
        unlabelled = tuple(Dim(None, d.extent, d.unit) for d in dims)
        return Edge(held, source.item_bytes, maps or (whole(1),), unlabelled, owners, needers)

    def to(self, columns: Ints) -> Edge:
        """The edge for some of the consumer's configurations only."""
        return replace(self, needers=self.needers.take(columns))

    @property
    def pairs(self) -> tuple[int, int]:
        """(C_u, C_v)."""
        return len(self.owners.degrees), len(self.needers.degrees)

    @property
    def volume(self) -> int:
        """Elements of the tensor."""
        return prod(held.extent for held in self.held)

    @property
    def largest_bytes(self) -> Floats:
        """(C_v,) bytes of the largest box that a device needs."""
        return largest_box(self.maps, self.dims, self.needers.cuts) * self.item_bytes

    @property
    def needed_volume(self) -> Floats:
        """(C_v,) elements that all devices together need."""
        return all_boxes(self.maps, self.dims, self.needers.cuts)


PAIRS = 256  # of configurations, compared at once on all devices, to bound memory
IDLE, NEVER = -1, -2  # instead of a number of elements: a device without a part; one whose part cannot be equal


def are_gathers(edge: Edge, *, roughly: bool = False) -> Mask:
    """(C_u, C_v): whether every device that takes part is in an all-gather.

    Owned boxes are disjoint: if the members' parts fill what they need, nobody else has any of it. roughly: only by the
    first device, so some may not be all-gathers.
    """
    result = np.zeros(edge.pairs, np.bool_)
    rows, columns = _on_device_0(edge)
    if roughly or not len(rows):
        result[rows, columns] = True
        return result
    (us, i), (vs, j) = (np.unique(side, return_inverse=True) for side in (rows, columns))
    few = replace(edge, owners=edge.owners.take(us), needers=edge.needers.take(vs))
    count = edge.owners.devices
    kept = np.flatnonzero(_fit(few, i, j, np.unique([1 % count, count // 3, count - 1])))
    for start in range(0, len(kept), PAIRS):  # few are left
        some = kept[start : start + PAIRS]
        (u, a), (v, b) = (np.unique(side[some], return_inverse=True) for side in (i, j))
        part = replace(few, owners=few.owners.take(u), needers=few.needers.take(v))
        fits = _fit(part, a, b, np.arange(count))
        result[rows[some[fits]], columns[some[fits]]] = True
    return result


def _fit(edge: Edge, i: Ints, j: Ints, devices: Ints) -> Mask:
    """A mask of the pairs that are all-gathers as far as these devices show: each owns its share of what it needs."""
    own, need = boxes_on(edge.held, edge.owners, devices), _boxes(edge.maps, edge.dims, edge.needers, devices)
    has, needs = edge.owners.numbers(devices) >= 0, edge.needers.numbers(devices) >= 0
    of, wanted = _members(edge, devices), (need[1] - need[0]).prod(-1)
    gathers = needs & (of > 1) & (wanted > 0) & (wanted % of == 0)
    share = np.where(gathers, wanted // of, np.where(needs, NEVER, IDLE))
    fits: Mask = (np.where(has[i], _overlap(own, need, i, j), IDLE) == share[j]).all(1)
    return fits


def _on_device_0(edge: Edge) -> tuple[Ints, Ints]:
    """Pairs that may be all-gathers: the same devices take part, and the first one, which always
    does, has its share.
    """
    members = _members_of_device_0(edge)
    tables, wanted = list[tuple[Ints, Ints, Ints]](), np.ones(len(members), np.int64)
    for j, axis in enumerate(edge.maps):
        degrees, which = edge.owners.distinct[j]
        end = np.array([boundaries(edge.held[j].extent, degree, edge.held[j].unit)[1] for degree in degrees], np.int64)
        lo, hi, column = _first_cells(edge, axis)
        tables.append((np.maximum(np.minimum(end[:, None], hi) - lo, 0), which, column))
        wanted *= (hi - lo)[column]
    columns = np.flatnonzero((members > 1) & (wanted > 0) & (wanted % members == 0))
    formula = edge.owners.before is None and edge.needers.before is None
    rows, which = np.nonzero(_devices(edge.owners, formula)[:, None] == _devices(edge.needers, formula)[columns])
    columns = columns[which]
    part = np.ones(len(rows), np.int64)
    for table, row, column in tables:
        part *= table[row[rows], column[columns]]
    shares = part * members[columns] == wanted[columns]
    return rows[shares], columns[shares]


def _members_of_device_0(edge: Edge) -> Ints:
    """(C_v,) `_members` of device 0: its cell is the first, so only leading cells of each dimension need the same."""
    cells, sources = edge.needers, driven(edge)
    spare = [i for i in range(cells.degrees.shape[1]) if i not in sources]
    members: Ints = cells.degrees[:, spare].prod(1)
    for axis in edge.maps:
        if axis.source is not None:
            degrees, which = cells.distinct[axis.source]
            members = members * _alike(axis, edge.dims[axis.source], degrees)[which]
    return np.where(cells.copies, cells.devices, members)


@lru_cache(maxsize=4096)
def _alike(axis: AxisMap, dim: Dim, degrees: tuple[int, ...]) -> Ints:
    """The number of cells along a dimension that need the same as the first one, by degree."""
    found = list[int]()
    for degree in degrees:
        cuts = boundaries(dim.extent, degree, dim.unit)
        lo, hi = axis(cuts[:-1], cuts[1:])
        found.append(int(((lo == lo[0]) & (hi == hi[0])).sum()))
    return np.array(found, np.int64)


def _first_cells(edge: Edge, axis: AxisMap) -> tuple[Ints, Ints, Ints]:
    """lo, hi of what the first device needs of a dimension, by degree, and each configuration's degree."""
    if axis.source is None:
        return *axis(np.zeros(1, np.int64), np.ones(1, np.int64)), np.zeros(edge.pairs[1], np.int64)
    dim, (degrees, column) = edge.dims[axis.source], edge.needers.distinct[axis.source]
    end = np.array([boundaries(dim.extent, degree, dim.unit)[1] for degree in degrees], np.int64)
    return *axis(np.zeros_like(end), end), column


def _devices(cells: LayoutCells, formula: bool) -> Ints:
    """(C,) equal where the same devices have cells: the first ones, or every so many-th; else whoever they are."""
    if not formula:
        return cells.active @ (np.arange(cells.devices, dtype=np.int64) ** 5 + 1)  # `_fit` looks at each
    count = cells.count
    last = (count - 1) * cells.devices // count
    apart: Ints = count * 2 + (cells.strided & (last != count - 1))
    return apart


def _overlap(own: tuple[Ints, Ints], need: tuple[Ints, Ints], i: Ints, j: Ints) -> Ints:
    """(pairs, N) elements of the overlap of boxes (C_u, N, J) and (C_v, N, J), for these pairs."""
    part = np.ones((1, 1), np.int64)
    for axis in range(own[0].shape[2]):
        (a, b), (c, d) = ([ends[k, :, axis] for ends in box] for box, k in ((own, i), (need, j)))
        part = part * np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
    return part


def _members(edge: Edge, devices: Ints) -> Ints:
    """(C_v, W) for each of these devices, how many devices need the same box."""
    cells = edge.needers
    apart = cells.degrees[:, list(driven(edge))].prod(1)
    members = np.tile((cells.total // apart)[:, None], (1, len(devices)))
    rows = np.flatnonzero(coincide(edge))
    for row, numbers in zip(rows, needers(edge.to(rows)) + 1 if len(rows) else (), strict=True):
        members[row] = np.bincount(numbers)[numbers[devices]]
    return members


def driven(edge: Edge) -> tuple[int, ...]:
    """The dimensions of the consumer's cells that determine the needed box."""
    return tuple(sorted({axis.source for axis in edge.maps if axis.source is not None}))


def coincide(edge: Edge) -> Mask:
    """(C_v,): whether cells that differ in a driven dimension may need the same box, or all devices have one cell."""
    found = edge.needers.copies.copy()
    for axis in edge.maps:
        if axis.source is not None:
            dim, (degrees, column) = edge.dims[axis.source], edge.needers.distinct[axis.source]
            found |= ~_distinct(axis, dim, degrees)[column]
    return found


@lru_cache(maxsize=4096)
def _distinct(axis: AxisMap, dim: Dim, degrees: tuple[int, ...]) -> Mask:
    """A mask by degree: True if no two cells along a dimension need the same."""
    found = list[bool]()
    for degree in degrees:
        cuts = boundaries(dim.extent, degree, dim.unit)
        found.append(len(np.unique(np.stack(axis(cuts[:-1], cuts[1:])), axis=1).T) == len(cuts) - 1)
    return np.array(found, np.bool_)


def needers(edge: Edge) -> Ints:
    """(C_v, N): devices that need the same box have the same number, also where their cells differ; -1: none."""
    numbers, index = edge.needers.cuts, edge.needers.index
    number = np.zeros(index.shape[:2], np.int64)
    for axis in edge.maps:
        if axis.source is not None:
            dim = edge.dims[axis.source]
            for degree in edge.needers.distinct[axis.source][0]:
                cuts = boundaries(dim.extent, degree, dim.unit)
                rows, ends = numbers[:, axis.source] == degree, np.stack(axis(cuts[:-1], cuts[1:]))
                same = np.unique(ends, axis=1, return_inverse=True)[1].reshape(-1)
                number[rows] = number[rows] * (len(cuts) - 1) + same[index[rows, :, axis.source]]
    return np.where(edge.needers.active, number, -1)


def cells_on(dims: Sequence[Dim], cells: LayoutCells, devices: Ints) -> Floats:
    """(C, W) elements of the cells of these devices."""
    lo, hi = boxes_on(dims, cells, devices)
    volume: Floats = (hi - lo).astype(np.float64).prod(-1)
    return np.where(cells.numbers(devices) >= 0, volume, 0.0)


def boxes_on(dims: Sequence[Dim], cells: LayoutCells, devices: Ints) -> tuple[Ints, Ints]:
    """lo, hi (C, W, D) of the cells of these devices; empty where a device has none."""
    dims = dims if len(dims) == cells.cuts.shape[1] else (Dim(None, 1), *dims)  # of a scalar
    return _boxes(tuple(identity(d.extent, i) for i, d in enumerate(dims)), dims, cells, devices)


def _boxes(maps: Maps, dims: Sequence[Dim], cells: LayoutCells, devices: Ints) -> tuple[Ints, Ints]:
    """lo, hi (C, W, J) of what `maps` make of the cells of these devices; empty where a device has none."""
    numbers, index = cells.cuts, cells.at(devices)
    shape = (*index.shape[:2], len(maps))
    lo, hi = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for j, axis in enumerate(maps):
        if axis.source is None:
            ends = axis(np.zeros(1, np.int64), np.ones(1, np.int64))
            lo[..., j], hi[..., j] = int(ends[0][0]), int(ends[1][0])
            continue
        dim = dims[axis.source]
        for degree in cells.distinct[axis.source][0]:
            cuts = boundaries(dim.extent, degree, dim.unit)
            rows, (start, stop) = numbers[:, axis.source] == degree, axis(cuts[:-1], cuts[1:])
            lo[rows, :, j], hi[rows, :, j] = (ends[index[rows, :, axis.source]] for ends in (start, stop))
    idle = index[..., 0] < 0
    hi[idle] = lo[idle]
    return lo, hi
