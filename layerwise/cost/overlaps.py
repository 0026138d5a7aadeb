"""Overlaps: elements and messages between what devices own and what they need, for all pairs of configurations.

Which cells a device, its node and its rack have are ranges of indices (`Selections`). The overlap of boxes is a product
over dimensions, and so is the number of cells that overlap. Of each dimension the sums over ranges of cells are
tabulated for the few patterns that there are; all pairs of configurations gather from them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

import numpy as np

from layerwise.cost.sums import Sums, sums
from layerwise.geometry.arrays import Floats, Ints
from layerwise.machine import DeviceGraph
from layerwise.ops.facts import Dim
from layerwise.partition.edge import Edge
from layerwise.partition.layout import LayoutCells

COLUMNS = 5  # columns of rows that one number stands for
Ranges = tuple[tuple[Ints, Ints], ...]


class Selections:
    """Selections of cells, seen from each of W devices: 0 its own, 1 its node's, 2 its rack's, ...

    cuts: (C, K). boxes[selection]: boxes of cell indices lo, hi, each (C, W, K), that together are the selection: a
    single one where the degrees nest in the group's size, else a few. times[selection]: (C, W) how many devices have
    each of these cells, where there may be more than one.
    """

    def __init__(self, cells: LayoutCells, graph: DeviceGraph, watched: tuple[int, ...]) -> None:
        sizes, seen = [1, *(level.devices for level in graph.levels)], np.array(watched, np.int64)
        self.cuts = cells.cuts
        self.boxes: tuple[Ranges, ...] = tuple(_group_boxes(cells, size, seen) for size in sizes)
        self.times: tuple[Ints | None, ...] = tuple(_times(cells, size, seen) for size in sizes)
        self._patterns: dict[tuple[int, int, int | None], tuple[Ints, Ints, Ints, Ints]] = {}

    def patterns(self, selection: int, box: int, dim: int | None) -> tuple[Ints, Ints, Ints, Ints]:
        """Distinct (cut, lo of each device, hi of each device) along `dim`, and the one that each configuration has.

        dim None: a dimension that nothing drives has one cell, which every device with any cell holds.
        """
        key = (selection, box, dim)
        if key not in self._patterns:
            lo, hi = self.boxes[selection][box]
            if dim is None:
                active: Ints = np.asarray((hi > lo).all(-1), np.int64)
                rows = np.concatenate([np.ones((len(active), 1), np.int64), np.zeros_like(active), active], axis=1)
            else:
                rows = np.concatenate([self.cuts[:, dim, None], lo[..., dim], hi[..., dim]], axis=1)
            first, which = _distinct(rows)
            degree, low, high = np.split(rows[first], [1, 1 + lo.shape[1]], axis=1)
            self._patterns[key] = (degree[:, 0], low, high, which)
        return self._patterns[key]


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """The first of all rows that differ, and the index of each row among them."""
    if rows.shape[1] <= COLUMNS and (rows.max() + 1.0) ** rows.shape[1] < 2.0**63:
        keys = rows @ (rows.max() + 1) ** np.arange(rows.shape[1])
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        return first, which
    numbers: dict[bytes, int] = {}
    which = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], np.int64)
    return np.unique(which, return_index=True)[1], which


selections = lru_cache(maxsize=512)(Selections)


def _groups(cells: LayoutCells, size: int, watched: Ints) -> tuple[Ints, Ints, Ints]:
    """The bounds of each group of `size` devices with a watched one, and the group of each of these."""
    groups, which = np.unique(watched // size, return_inverse=True)
    first = groups * size
    return first, np.minimum(first + size, cells.devices), which  # a last group may be cut short


def _times(cells: LayoutCells, size: int, watched: Ints) -> Ints | None:
    """(C, W) where a configuration is copied to all devices, those of the group; else 1. None: of no configuration."""
    if not cells.copies.any():
        return None
    first, end, which = _groups(cells, size, watched)
    return np.where(cells.copies[:, None], (end - first)[which][None, :], 1)


def _group_boxes(cells: LayoutCells, size: int, watched: Ints) -> Ranges:
    """The cells of each watched device's group of `size` consecutive devices, as boxes of cell indices.

    They are consecutive cells: a box, or else in every digit what is left of a row at either end, and whole rows.
    """
    first, end, which = _groups(cells, size, watched)
    begin, stop = cells.runs(first, end)
    copied = cells.copies[:, None]  # what is copied is not cut: every device has cell 0
    begin, stop = np.where(copied, 0, begin), np.where(copied, 1, stop)
    lo, hi = _hull(cells, begin, stop)
    if ((hi - lo).prod(-1) == stop - begin).all():
        return ((lo[:, which], hi[:, which]),)
    found, row = list[tuple[Ints, Ints]](), np.ones((len(begin), 1), np.int64)
    for t in reversed(range(cells.digits.shape[1])):
        row = row * cells.digits[:, t, None]
        ahead = np.minimum(-(-begin // row) * row, stop)
        behind = np.maximum(stop // row * row, ahead)
        found += [_hull(cells, begin, ahead), _hull(cells, behind, stop)]
        begin, stop = ahead, behind
    found.append(_hull(cells, begin, stop))
    lows, highs = (np.stack(side) for side in zip(*found, strict=True))  # (pieces, C, groups, K)
    full = (highs > lows).all(-1)
    order = np.argsort(~full, axis=0, kind="stable")[: int(full.sum(0).max()), ..., None]
    lows, highs = (np.take_along_axis(side, order, axis=0)[:, :, which] for side in (lows, highs))
    return tuple(zip(lows, highs, strict=True))


def _hull(cells: LayoutCells, begin: Ints, stop: Ints) -> tuple[Ints, Ints]:
    """lo, hi (C, groups, K) of the smallest box with the cells [begin, stop); 0, 0: of none."""
    lo, hi = (np.zeros((*begin.shape, cells.digits.shape[1]), np.int64) for _ in range(2))
    first, last = begin, stop - 1
    for t in reversed(range(cells.digits.shape[1])):
        radix = cells.digits[:, t, None]
        (first, low), (last, high) = np.divmod(first, radix), np.divmod(last, radix)
        all_values = first != last
        lo[..., t], hi[..., t] = np.where(all_values, 0, low), np.where(all_values, radix - 1, high)
    none = (stop <= begin)[..., None]
    return np.where(none, 0, cells.indices(lo)), np.where(none, 0, cells.indices(hi) + 1)


MANY = 4096  # pairs of configurations for which it pays to spread a table
EXPANDED = 1 << 22  # elements of a table that is spread out over all configurations of the consumer beforehand


@dataclass(frozen=True, slots=True, eq=False)
class _Factor:
    """Elements and messages along some of the dimensions, by the patterns that configurations have there."""

    values: Floats  # (2, patterns_u, W, patterns_v)
    row: Ints  # (C_u,) the pattern of each configuration
    column: Ints | None  # (C_v,) likewise; None: each has one of its own

    def of(self, rows: slice) -> Floats:
        """(2, rows, W, C_v), which the caller may overwrite."""
        part = np.take(self.values, self.row[rows], axis=1)
        return part if self.column is None else np.take(part, self.column, axis=3)

    def spread(self) -> _Factor:
        """The factor with a pattern for each configuration of the consumer."""
        assert self.column is not None
        values = np.take(self.values, self.column, axis=3)  # in order of memory, as what indexing makes is not
        return _Factor(values, self.row, None)


class Overlaps:
    """Between the cells of an edge's owners and of its needers, seen from some devices."""

    def __init__(self, edge: Edge, graph: DeviceGraph, watched: tuple[int, ...]) -> None:
        sources = [m.source for m in edge.maps if m.source is not None]
        assert len(set(sources)) == len(sources), "a dimension may drive only one dimension of an input"
        self.edge = edge
        self.owned, self.needing = selections(edge.owners, graph, watched), selections(edge.needers, graph, watched)
        dimensions = range(self.needing.cuts.shape[1])
        self.spare = [i for i in dimensions if i not in sources]  # along these the need is replicated
        self.sums = [_sums(edge, j) for j in range(len(edge.held))]
        self._products: dict[tuple[int, int], list[list[_Factor]]] = {}

    def between(self, s: int, t: int, rows: slice) -> Floats:
        """(2, rows, W, C_v): elements and messages between each device's selection s of owners and t of needers."""
        if (s, t) not in self._products:
            boxes = range(len(self.owned.boxes[s])), range(len(self.needing.boxes[t]))
            self._products[s, t] = [self._product(s, m, t, k) for m in boxes[0] for k in boxes[1]]
        total: Floats | None = None
        for factors in self._products[s, t]:
            product = factors[0].of(rows)
            for factor in factors[1:]:
                np.multiply(product, factor.of(rows), out=product)
            total = product if total is None else np.add(total, product, out=total)
        assert total is not None
        if (times := self.owned.times[s]) is not None:
            total *= times[rows, :, None]
        return total

    def _product(self, s: int, m: int, t: int, k: int) -> list[_Factor]:
        """Factors of which the product is that between two boxes."""
        factors = [self._along(j, s, m, t, k) for j in range(len(self.sums))]
        factors.sort(key=lambda factor: factor.values.size)
        pairs = self.edge.pairs[0] * self.edge.pairs[1]
        if pairs > MANY:
            factors = [self._spread(factor) for factor in factors]
        if (needers := self._needers(t, k)) is not None:
            first = factors[0] if factors[0].column is None else factors[0].spread()
            factors[0] = replace(first, values=first.values * needers)
        return factors

    def _spread(self, factor: _Factor) -> _Factor:
        """The factor spread out, where that does not take much memory."""
        size = factor.values[..., 0].size * self.edge.pairs[1]
        return factor.spread() if size <= EXPANDED else factor

    def _along(self, j: int, s: int, m: int, t: int, k: int) -> _Factor:
        """Along one dimension of the tensor: elements that ranges of cells own of what ranges need."""
        a, ul, uh, row = self.owned.patterns(s, m, j)
        b, vl, vh, column = self.needing.patterns(t, k, self.edge.maps[j].source)
        return _Factor(self.sums[j].between(a, (ul, uh), b, (vl, vh)), row, column)

    def _needers(self, t: int, k: int) -> Floats | None:
        """(W, C_v) how many devices of the selection need what one does; None where each is the only one."""
        times = self.needing.times[t]
        if times is None and (t == 0 or not self.spare):
            return None
        lo, hi = self.needing.boxes[t][k]
        alike = (hi - lo)[..., self.spare].prod(-1) if t else np.ones(lo.shape[:2], np.int64)
        return np.asarray((alike if times is None else alike * times).T, np.float64)


def _sums(edge: Edge, j: int) -> Sums:
    """The sums along one dimension of the tensor."""
    axis = edge.maps[j]
    a_values = edge.owners.distinct[j][0]
    b_values = (1,) if axis.source is None else edge.needers.distinct[axis.source][0]
    dim = Dim(None, 1) if axis.source is None else edge.dims[axis.source]
    return sums(edge.held[j], a_values, axis, dim, b_values)
