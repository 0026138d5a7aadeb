"""Overlaps: elements and messages between what devices own and what they need, for all pairs of configurations.

The overlap of boxes is a product over dimensions, and so is the number of cells that overlap. Of each dimension the
sums over ranges of cells are tabulated for the few patterns that there are; the tables of several dimensions are
multiplied with each other where these have few patterns together, too; all pairs of configurations gather from them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwise.cost.selections import selections
from layerwise.cost.sums import Sums, sums
from layerwise.geometry.arrays import Floats, Ints
from layerwise.machine import DeviceGraph
from layerwise.ops.facts import Dim
from layerwise.partition.edge import Edge

FEW = 8  # patterns are few where there are so many times more pairs of configurations
MANY = 4096  # pairs of configurations for which it pays to look for that
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
        """With a pattern for each configuration of the consumer."""
        assert self.column is not None
        values = np.take(self.values, self.column, axis=3)  # in order of memory, as what indexing makes is not
        return _Factor(values, self.row, None)

    def times(self, other: _Factor) -> _Factor | None:
        """The product; None where it has so many patterns that it saves nothing."""
        assert self.column is not None
        assert other.column is not None
        us, row = np.unique(self.row * other.values.shape[1] + other.row, return_inverse=True)
        vs, column = np.unique(self.column * other.values.shape[3] + other.column, return_inverse=True)
        if len(us) * len(vs) * FEW > len(row) * len(column):
            return None
        (u, other_u), (v, other_v) = np.divmod(us, other.values.shape[1]), np.divmod(vs, other.values.shape[3])
        ours, others = self.values.take(u, 1).take(v, 3), other.values.take(other_u, 1).take(other_v, 3)
        return _Factor(ours * others, row, column)


class Overlaps:
    """Between the cells of an edge's owners and of its needers, seen from some devices."""

    def __init__(self, edge: Edge, graph: DeviceGraph, watched: tuple[int, ...]) -> None:
        sources = [m.source for m in edge.maps if m.source is not None]
        assert len(set(sources)) == len(sources), "a dimension may drive only one dimension of an input"
        self.edge = edge
        self.owned, self.needing = selections(edge.owners, graph, watched), selections(edge.needers, graph, watched)
        dimensions = range(self.needing.degrees.shape[1])
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
            factors = [self._spread(factor) for factor in _merged(factors)]
        if (needers := self._needers(t, k)) is not None:
            first = factors[0] if factors[0].column is None else factors[0].spread()
            factors[0] = replace(first, values=first.values * needers)
        return factors

    def _spread(self, factor: _Factor) -> _Factor:
        """Where that does not take much memory."""
        size = factor.values[..., 0].size * self.edge.pairs[1]
        return factor.spread() if size <= EXPANDED else factor

    def _along(self, j: int, s: int, m: int, t: int, k: int) -> _Factor:
        """Of one dimension of the tensor: what ranges of cells own of what ranges need."""
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


def _merged(factors: Sequence[_Factor]) -> list[_Factor]:
    """Multiplied with each other as long as that leaves few patterns; smallest first."""
    made = [factors[0]]
    for factor in factors[1:]:
        product = made[-1].times(factor)
        if product is None:
            made.append(factor)
        else:
            made[-1] = product
    return made


def _sums(edge: Edge, j: int) -> Sums:
    """Of one dimension of the tensor."""
    axis = edge.maps[j]
    a_values = edge.owners.distinct[j][0]
    b_values = (1,) if axis.source is None else edge.needers.distinct[axis.source][0]
    dim = Dim(None, 1) if axis.source is None else edge.dims[axis.source]
    return sums(edge.held[j], a_values, axis, dim, b_values)
