"""Volumes: how much cells need, for many configurations at once (as boxes say: tests/partition/test_volumes.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from layerwise.geometry import AxisMap, boundaries
from layerwise.geometry.arrays import Floats, Ints
from layerwise.ops.facts import Dim, Maps

FEW = 16  # configurations whose degrees are known by themselves: to look for equal ones would take longer


def largest_extents(dims: Sequence[Dim], degrees: Ints) -> Ints:
    """(C, D) extents of the largest cell; a grid is a product, so one cell is the largest in every dimension."""
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
    """(2, degrees): the longest interval that a cell needs, of so many along a dimension, and the sum over them all."""
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
    """(C,) sum of the volumes of the boxes that all cells need: what all devices together hold."""
    drivers = [axis.source for axis in maps]
    spare = [i for i in range(degrees.shape[1]) if i not in drivers]  # cells along these need the same box
    volume: Floats = degrees[:, spare].prod(1).astype(np.float64)
    for axis in maps:
        volume = volume * intervals(axis, dims, degrees)[1]
    return volume
