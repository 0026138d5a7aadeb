"""The largest cell of a layer, and the sizes of needed boxes, under many configurations at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from layerwise.geometry import AxisMap, Box, boundaries
from layerwise.geometry.arrays import Floats, Ints
from layerwise.graph.layer import Layer
from layerwise.ops.facts import Dim, Maps, Space
from layerwise.partition.layout import Layout

FEW = 16  # configurations whose degrees are looked up directly: finding equal ones would take longer


def largest_extents(dims: Sequence[Dim], degrees: Ints) -> Ints:
    """(C, D) extents of the largest cell; a grid is a product, so one cell is largest in every dimension."""
    columns = [-(-(dim.extent // dim.unit) // degrees[:, i]) * dim.unit for i, dim in enumerate(dims)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(degrees), 0), np.int64)


def intervals(axis: AxisMap, dims: Sequence[Dim], degrees: Ints) -> tuple[Ints, Ints]:
    """(C,) the longest interval of one dimension that any cell needs, and the sum over the cells along its source."""
    if axis.source is None:
        lengths, which = _lengths(axis, Dim(None, 1), (1,)), np.zeros(len(degrees), np.int64)
    else:
        dim, column = dims[axis.source], degrees[:, axis.source]
        if len(column) <= FEW:
            longest, total = _lengths(axis, Dim(None, dim.extent, dim.unit), tuple(column.tolist()))
            return longest, total
        there = np.bincount(column) > 0
        lengths = _lengths(axis, Dim(None, dim.extent, dim.unit), tuple(np.flatnonzero(there).tolist()))
        which = (there.cumsum() - 1)[column]
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


def largest_box(maps: Maps, dims: Sequence[Dim], degrees: Ints) -> Floats:
    """(C,) volume of the largest box that any cell needs."""
    volume = np.ones(len(degrees))
    for axis in maps:
        volume = volume * intervals(axis, dims, degrees)[0]
    return volume


def all_boxes(maps: Maps, dims: Sequence[Dim], degrees: Ints) -> Floats:
    """(C,) total volume of the boxes that all cells need: what all devices together hold."""
    drivers = [axis.source for axis in maps]
    spare = [i for i in range(degrees.shape[1]) if i not in drivers]  # cells along these need the same box
    volume: Floats = degrees[:, spare].prod(1).astype(np.float64)
    for axis in maps:
        volume = volume * intervals(axis, dims, degrees)[1]
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
        column = layout.computed.degrees[:, i + scalar]
        for degree in np.unique(column).tolist():
            rows = column == degree
            index, cuts = _index(space, i, degree)
            bounds[:, rows, i] = cuts[index : index + 2, None]
            if i in space.reductions:
                part[rows] = index
            elif not scalar:
                finer = layout.owned.degrees[:, i] // degree
                for split, j in {(int(finer[row]), int(part[row])) for row in np.flatnonzero(rows)}:
                    fine = boundaries(dims[i].extent, degree * split, dims[i].unit)
                    first = index * split + (j if split > 1 else 0)
                    within = rows & (finer == split) & ((part == j) | (split == 1))
                    own[:, within, i] = fine[first : first + 2, None]
    return LargestCell(bounds[0], bounds[1], own[0], own[1])


@lru_cache(maxsize=65536)
def _index(space: Space, dim: int, degree: int) -> tuple[int, Ints]:
    """The index of the longest interval of one dimension, and that dimension's boundaries."""
    d = space.dims[dim]
    cuts = boundaries(d.extent, degree, d.unit)
    lengths = np.diff(cuts).astype(np.float64)
    need = np.zeros(degree)
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
