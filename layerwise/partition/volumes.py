"""Volumes: how much cells need, for many configurations at once (as boxes say: tests/partition/test_volumes.py)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from layerwise.geometry import AxisMap, boundaries
from layerwise.geometry.arrays import Floats, Ints
from layerwise.ops.facts import Dim, Maps


def largest_extents(dims: Sequence[Dim], degrees: Ints) -> Ints:
    """(C, D) extents of the largest cell; a grid is a product, so one cell is the largest in every dimension."""
    columns = [-(-(dim.extent // dim.unit) // degrees[:, i]) * dim.unit for i, dim in enumerate(dims)]
    return np.stack(columns, axis=1) if columns else np.zeros((len(degrees), 0), np.int64)


def intervals(axis: AxisMap, dims: Sequence[Dim], degrees: Ints) -> tuple[Ints, Ints]:
    """(C,) the longest interval of one dimension that any cell needs, and the sum over the cells along its source."""
    if axis.source is None:
        length = np.full(len(degrees), _lengths(axis, 1, 1, 1)[0], np.int64)
        return length, length
    dim, column = dims[axis.source], degrees[:, axis.source].tolist()
    by_degree = {degree: _lengths(axis, dim.extent, degree, dim.unit) for degree in set(column)}
    longest, total = np.array([by_degree[degree] for degree in column], np.int64).reshape(-1, 2).T
    return longest, total


@lru_cache(maxsize=1 << 15)
def _lengths(axis: AxisMap, extent: int, degree: int, unit: int) -> tuple[int, int]:
    """The longest interval that a cell needs, of `degree` cells along an extent, and the sum over all of them."""
    cuts = boundaries(extent, degree, unit)
    lo, hi = axis(cuts[:-1], cuts[1:])
    return int((hi - lo).max()), int((hi - lo).sum())


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
