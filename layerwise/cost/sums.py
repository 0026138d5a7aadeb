"""Sums: what ranges of cells own of what ranges of cells need, along one dimension, for every pair of degrees.

Cells that own tile the dimension, and what cells need, [lo_q, hi_q), moves one way with q. So the first i of a cells,
which end at x, own of what the first j of b cells need

    sum over q < j of |[0, x) & [lo_q, hi_q)| = H(m_1) - L(m_2) + x (m_2 - m_1),    m_1 = min(j, #(hi_q <= x)),
                                                                                    m_2 = min(j, #(lo_q < x)),

H and L being the sums of the first hi_q and lo_q. Overlaps are counted likewise: of the cells that own anything, q
overlaps [first_q, end_q), and of these so many are among the first i, with the same m_1 and m_2.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from layerwise.geometry import AxisMap, boundaries, degree_of
from layerwise.geometry.arrays import Floats, Ints
from layerwise.ops.facts import Dim

TABLE = 1 << 16  # sums that are tabulated: they are asked for again and again; more are worked out when asked for


class Sums:
    """Sums over a dimension that is `held`: a cut of `a_values` that owns, of `b_values` that needs what `axis`
    makes of its cells of `dim`.
    """

    def __init__(
        self, held: Dim, a_values: tuple[int, ...], axis: AxisMap, dim: Dim, b_values: tuple[int, ...]
    ) -> None:
        self._a, self._b = np.array(a_values, np.int64), np.array(b_values, np.int64)
        a_degrees, b_degrees = degree_of(self._a), degree_of(self._b)
        self._a_begin, self._b_begin = _begin(a_degrees), _begin(b_degrees)
        self._b_degrees = b_degrees
        owned = [boundaries(held.extent, a, held.unit) for a in a_values]
        needed = [_needed(axis, dim, b) for b in b_values]
        self._x = np.concatenate(owned)
        # How many cells before each end are not empty, as those are of which nothing is read.
        self._full = np.concatenate([np.insert((cuts[1:] > cuts[:-1]).cumsum(), 0, 0) for cuts in owned])
        # (b_values, ends of what is owned): how many of what is needed end there or before, and begin before.
        self._ended = np.stack([hi.searchsorted(self._x, "right") for _, hi in needed])
        self._begun = np.stack([lo.searchsorted(self._x, "left") for lo, _ in needed])
        lo, hi = (np.concatenate(side) for side in zip(*needed, strict=True))
        first, end = (np.stack(side) for side in zip(*(_cells(cuts, lo, hi) for cuts in owned), strict=True))
        self._lo, self._hi = self._cumulated(lo), self._cumulated(hi)
        self._first, self._end = self._cumulated(first), self._cumulated(end)  # (a_values, ...)
        self._table: Floats | None = None
        if len(self._x) * len(self._lo) <= TABLE:
            i, j = (np.concatenate([np.arange(d + 1) for d in degrees]) for degrees in (a_degrees, b_degrees))
            at_a, at_b = (np.repeat(np.arange(len(degrees)), degrees + 1) for degrees in (a_degrees, b_degrees))
            self._table = self._until(at_a, i[:, None], at_b, j[:, None])[:, :, 0]

    def _cumulated(self, ends: Ints) -> Ints:
        """(..., all cells that need) -> (..., all sums of the first so many of each of b_values), laid end to end."""
        before = np.insert(ends, self._b_begin - np.arange(len(self._b)), 0, axis=-1).cumsum(-1)
        result: Ints = before - np.repeat(before[..., self._b_begin], self._b_degrees + 1, axis=-1)
        return result

    def between(self, a: Ints, i: tuple[Ints, Ints], b: Ints, j: tuple[Ints, Ints]) -> Floats:
        """(2, P_u, W, P_v) elements and overlaps, of P_u ranges and P_v ranges of cells, each as W devices see them.

        a: (P_u,), b: (P_v,) cuts; i: (P_u, W), j: (P_v, W) where the ranges begin and end.
        """
        at_a, at_b = np.searchsorted(self._a, a), np.searchsorted(self._b, b)
        if self._table is None:
            (low, high), (first, end) = i, j
            sums = [self._until(at_a, to, at_b, upto) for to in (high, low) for upto in (end, first)]
            return sums[0] - sums[1] - sums[2] + sums[3]
        width = self._lo.shape[-1]
        low, high = ((self._a_begin[at_a, None] + ends)[:, :, None] * width for ends in i)
        first, end = ((self._b_begin[at_b, None] + ends).T for ends in j)
        flat = self._table.reshape(2, -1)
        values: Floats = flat[:, high + end] - flat[:, low + end] - flat[:, high + first] + flat[:, low + first]
        return values

    def _until(self, at_a: Ints, i: Ints, at_b: Ints, j: Ints) -> Floats:
        """(2, P_u, W, P_v) of the first i and the first j cells."""
        x = self._a_begin[at_a, None] + i
        upto, b_begin = j.T, self._b_begin[at_b]
        m_1 = np.minimum(self._ended[at_b, x[:, :, None]], upto)
        m_2 = np.minimum(self._begun[at_b, x[:, :, None]], upto)
        both, row = m_2 - m_1, at_a[:, None, None]
        m_1 += b_begin
        m_2 += b_begin
        elements = self._hi[m_1] - self._lo[m_2] + self._x[x][:, :, None] * both
        overlaps = self._end[row, m_1] - self._first[row, m_2] + self._full[x][:, :, None] * both
        return np.stack([elements, overlaps]).astype(np.float64)


sums = lru_cache(maxsize=1024)(Sums)


def _begin(degrees: Ints) -> Ints:
    """The index at which each degree's degree + 1 numbers begin, laid end to end."""
    return np.cumsum(degrees + 1) - degrees - 1


def _needed(axis: AxisMap, dim: Dim, degree: int) -> tuple[Ints, Ints]:
    """lo, hi of what each cell needs. A cell that needs nothing does so where the last one stopped."""
    cuts = boundaries(dim.extent, degree, dim.unit)
    lo, hi = axis(cuts[:-1], cuts[1:])
    nothing = hi <= lo
    if nothing.any():
        stopped = np.maximum.accumulate(np.where(nothing, 0, hi))
        lo, hi = np.where(nothing, stopped, lo), np.where(nothing, stopped, hi)
    assert (lo[1:] >= lo[:-1]).all(), "what cells need must move one way"
    assert (hi[1:] >= hi[:-1]).all(), "what cells need must move one way"
    return lo, hi


def _cells(cuts: Ints, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The cells [first, end) between these cuts that each interval [lo, hi) overlaps, of those that are not empty."""
    full = np.unique(cuts)
    first = full[1:].searchsorted(lo, "right")
    end = np.where(hi > lo, full[:-1].searchsorted(hi, "left"), first)
    return first, end
