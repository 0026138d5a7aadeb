"""The largest cell of a layer, and the sizes of needed boxes, under many configurations at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from layerwise.geometry import WEIGHTED, AxisMap, Box, boundaries, degree_of
from layerwise.geometry.arrays import Floats, Ints
from layerwise.graph.layer import Layer
from layerwise.ops.facts import Dim, Maps, Space
from layerwise.partition.layout import Layout

FEW = 16  # configurations whose degrees are looked up directly: finding equal ones would take longer


def largest_extents(dims: Sequence[Dim], cuts: Ints) -> Ints:
    """(C, D) extents of the largest cell; a grid is a product, so one cell is the largest in every dimension."""
    columns = [_largest(dim, cuts[:, i]) for i, dim in enumerate(dims)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(cuts), 0), np.int64)


def _largest(dim: Dim, numbers: Ints) -> Ints:
    if not len(numbers) or numbers.max() < WEIGHTED:
        return -(-(dim.extent // dim.unit) // numbers) * dim.unit
    known, which = np.unique(numbers, return_inverse=True)
    return np.array([np.diff(boundaries(dim.extent, n, dim.unit)).max() for n in known.tolist()], np.int64)[which]


def intervals(axis: AxisMap, dims: Sequence[Dim], cuts: Ints) -> tuple[Ints, Ints]:
    """(C,) the longest interval of one dimension that any cell needs, and the sum over the cells along its source."""
    if axis.source is None:
        lengths, which = _lengths(axis, Dim(None, 1), (1,)), np.zeros(len(cuts), np.int64)
    else:
        dim, column = dims[axis.source], cuts[:, axis.source]
        if len(column) <= FEW:
            longest, total = _lengths(axis, Dim(None, dim.extent, dim.unit), tuple(column.tolist()))
            return longest, total
        if column.max() >= WEIGHTED:
            numbers, which = np.unique(column, return_inverse=True)
        else:
            there = np.bincount(column) > 0
            numbers, which = np.flatnonzero(there), (there.cumsum() - 1)[column]
        lengths = _lengths(axis, Dim(None, dim.extent, dim.unit), tuple(numbers.tolist()))
    return lengths[0][which], lengths[1][which]


@lru_cache(maxsize=16384)
def _lengths(axis: AxisMap, dim: Dim, degrees: tuple[int, ...]) -> Ints:
    """(2, degrees): the longest interval that a cell needs, for each number of cells, and the sum over all cells."""
    found = np.zeros((2, len(degrees)), np.int64)
    for at, degree in enumerate(degrees):
        cuts = boundaries(dim.extent, degree, dim.unit)
        lo, hi = axis(cuts[:-1], cuts[1:])
        found[:, at] = (hi - lo).max(), (hi - lo).sum()
    found.setflags(write=False)
    return found


def largest_box(maps: Maps, dims: Sequence[Dim], cuts: Ints) -> Floats:
    """(C,) volume of the largest box that any cell needs."""
    volume = np.ones(len(cuts))
    for axis in maps:
        volume = volume * intervals(axis, dims, cuts)[0]
    return volume


def all_boxes(maps: Maps, dims: Sequence[Dim], cuts: Ints) -> Floats:
    """(C,) sum of the volumes of the boxes that all cells need: what all devices together hold."""
    drivers = [axis.source for axis in maps]
    spare = [i for i in range(cuts.shape[1]) if i not in drivers]  # cells along these need the same box
    volume: Floats = degree_of(cuts[:, spare]).prod(1).astype(np.float64)
    for axis in maps:
        volume = volume * intervals(axis, dims, cuts)[1]
    return volume


@dataclass(frozen=True, slots=True)
class LargestCell:
    """One cell for each of C configurations."""

    lo: Ints  # (C, D), in the iteration space
    hi: Ints
    own_lo: Ints  # (C, R), in the output that its device owns
    own_hi: Ints

    def bounds(self, epilogue: bool) -> tuple[Ints, Ints]:
        """The bounds that an input's or a parameter's needs depend on; see `Layout.at`."""
        return (self.own_lo, self.own_hi) if epilogue else (self.lo, self.hi)

    def cell(self, row: int) -> Box:
        """The cell of one configuration, a box of the iteration space."""
        return _box(self.lo[row], self.hi[row])

    def owned(self, row: int, rank: int) -> Box:
        """The box of the output, of `rank` dimensions, that the cell's device owns afterwards."""
        return _box(self.own_lo[row, :rank], self.own_hi[row, :rank])


def largest_cell(layer: Layer, layout: Layout) -> LargestCell:
    """The longest interval in every dimension that also needs most of what it drives (the middle of a halo)."""
    space = layer.space
    scalar = not space.out.shape  # layouts count it as one dimension
    count, dims = len(layout.computed.degrees), space.dims
    bounds = np.zeros((2, count, len(dims)), np.int64)
    own = np.zeros((2, count, layout.owned.degrees.shape[1]), np.int64)
    if scalar:
        own[1] = 1
    part = np.zeros(count, np.int64)  # in the reduction: the part of the cell that it owns after the scatter
    for i in reversed(range(len(dims))):  # reductions come last, and are needed first
        column, owned = layout.computed.cuts[:, i + scalar], layout.owned.cuts
        for number in np.unique(column).tolist():
            rows = column == number
            index, cuts = _index(space, i, number)
            bounds[:, rows, i] = cuts[index : index + 2, None]
            if i in space.reductions:
                part[rows] = index
            elif not scalar:
                for finer, j in {(int(owned[row, i]), int(part[row])) for row in np.flatnonzero(rows)}:
                    fine = boundaries(dims[i].extent, finer, dims[i].unit)
                    split = (len(fine) - 1) // (len(cuts) - 1)
                    first = index * split + (j if split > 1 else 0)
                    within = rows & (owned[:, i] == finer) & ((part == j) | (split == 1))
                    own[:, within, i] = fine[first : first + 2, None]
    return LargestCell(bounds[0], bounds[1], own[0], own[1])


@lru_cache(maxsize=65536)
def _index(space: Space, dim: int, number: int) -> tuple[int, Ints]:
    """The index of the fullest interval of one dimension, and the cuts of that dimension."""
    d = space.dims[dim]
    cuts = boundaries(d.extent, number, d.unit)
    lengths = np.diff(cuts).astype(np.float64)
    need = np.zeros(len(lengths))
    for maps in (*space.needs, *(p.maps for p in space.parameters)):
        for axis in maps:
            if axis.source == dim:
                lo, hi = axis(cuts[:-1], cuts[1:])
                need += (hi - lo) / max(1, int((hi - lo).max()))
    return int(np.lexsort((-need, -lengths))[0]), cuts


def shared_statistics(layer: Layer, layout: Layout, *, local_batch_norm: bool) -> list[Ints]:
    """`groups.statistics` for all configurations at once (tests/partition/test_layout.py compares them).

    For each stage with statistics, (C,): whether a cell shares them with others (otherwise a plain kernel runs).
    """
    shared = []
    for stage in layer.stages:
        statistics = stage.statistics()
        if statistics is None:
            continue
        among = layout.at(stage.epilogue).degrees[:, list(statistics.over)].prod(1)
        local = stage.statistics(local_batch_norm=local_batch_norm) is None
        shared.append(((among > 1) & (not local)).astype(np.int64))
    return shared


def _box(lo: Ints, hi: Ints) -> Box:
    return Box(tuple(lo.tolist()), tuple(hi.tolist()))
