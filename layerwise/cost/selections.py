"""Selections: which cells a device, its node and its rack have, as ranges of indices, for many configurations."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from layerwise.geometry.arrays import Ints
from layerwise.machine import DeviceGraph
from layerwise.partition.layout import Cells

FEW = 5  # columns of rows that one number stands for
Ranges = tuple[tuple[Ints, Ints], ...]


class Selections:
    """Selections of cells, seen from each of W devices: 0 its own, 1 its node's, 2 its rack's, ...

    degrees: (C, K). boxes[selection]: boxes of cell indices lo, hi, each (C, W, K), that together are the selection: a
    single one where the degrees nest in the group's size, else a few. times[selection]: (C, W) how many devices have
    each of these cells, where there may be more than one.
    """

    def __init__(self, cells: Cells, graph: DeviceGraph, watched: Ints) -> None:
        sizes = [1, *(level.devices for level in graph.levels)]
        self.degrees = cells.degrees
        self.boxes: tuple[Ranges, ...] = tuple(_group_boxes(cells, size, watched) for size in sizes)
        self.times: tuple[Ints | None, ...] = tuple(_times(cells, size, watched) for size in sizes)
        self._patterns: dict[tuple[int, int, int | None], tuple[Ints, Ints, Ints, Ints]] = {}

    def patterns(self, selection: int, box: int, dim: int | None) -> tuple[Ints, Ints, Ints, Ints]:
        """Distinct (degree, lo of each device, hi of each device) along `dim`, and the one that each configuration has.

        dim None: a dimension that nothing drives has one cell, which every device with any cell holds.
        """
        key = (selection, box, dim)
        if key not in self._patterns:
            lo, hi = self.boxes[selection][box]
            if dim is None:
                active: Ints = np.asarray((hi > lo).all(-1), np.int64)
                rows = np.concatenate([np.ones((len(active), 1), np.int64), np.zeros_like(active), active], axis=1)
            else:
                rows = np.concatenate([self.degrees[:, dim, None], lo[..., dim], hi[..., dim]], axis=1)
            first, which = _distinct(rows)
            degree, low, high = np.split(rows[first], [1, 1 + lo.shape[1]], axis=1)
            self._patterns[key] = (degree[:, 0], low, high, which)
        return self._patterns[key]


def _distinct(rows: Ints) -> tuple[Ints, Ints]:
    """Of rows the first of each that differs, and which of these each row is."""
    if rows.shape[1] <= FEW and (rows.max() + 1.0) ** rows.shape[1] < 2.0**63:
        keys = rows @ (rows.max() + 1) ** np.arange(rows.shape[1])
        _, first, which = np.unique(keys, return_index=True, return_inverse=True)
        return first, which
    numbers: dict[bytes, int] = {}
    which = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], np.int64)
    return np.unique(which, return_index=True)[1], which


@lru_cache(maxsize=512)
def selections(cells: Cells, graph: DeviceGraph, watched: tuple[int, ...]) -> Selections:
    """Seen from some devices."""
    return Selections(cells, graph, np.array(watched, np.int64))


def _groups(cells: Cells, size: int, watched: Ints) -> tuple[Ints, Ints, Ints]:
    """Where each group of `size` devices with a watched one begins and ends, and which each of these is in."""
    groups, which = np.unique(watched // size, return_inverse=True)
    first = groups * size
    return first, np.minimum(first + size, cells.devices), which  # a last group may be cut short


def _times(cells: Cells, size: int, watched: Ints) -> Ints | None:
    """(C, W) where a configuration is copied to all devices, those of the group; else 1. None: of no configuration."""
    if not cells.copies.any():
        return None
    first, end, which = _groups(cells, size, watched)
    return np.where(cells.copies[:, None], (end - first)[which][None, :], 1)


def _group_boxes(cells: Cells, size: int, watched: Ints) -> Ranges:
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


def _hull(cells: Cells, begin: Ints, stop: Ints) -> tuple[Ints, Ints]:
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
