"""Selections: which cells a device, its node and its rack have, as ranges of indices, for many configurations."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from layerwise.geometry.arrays import Ints
from layerwise.machine import DeviceGraph
from layerwise.partition.layout import Cells

Ranges = tuple[tuple[Ints, Ints], ...]


class Selections:
    """Selections of cells, seen from each of W devices: 0 its own, 1 its node's, 2 its rack's, ...

    degrees: (C, K). boxes[selection]: boxes of cell indices lo, hi, each (C, W, K), that together are the selection: a
    single one where the degrees nest in the group's size, else one for each device of the group.
    """

    def __init__(self, cells: Cells, graph: DeviceGraph, watched: Ints) -> None:
        sizes = [1, *(level.devices for level in graph.levels)]
        self.degrees = cells.degrees
        self.boxes: tuple[Ranges, ...] = tuple(_group_boxes(cells.index, size, watched) for size in sizes)
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
            numbers: dict[bytes, int] = {}
            which = np.array([numbers.setdefault(row.tobytes(), len(numbers)) for row in rows], np.int64)
            first = np.unique(which, return_index=True)[1]
            degree, low, high = np.split(rows[first], [1, 1 + lo.shape[1]], axis=1)
            self._patterns[key] = (degree[:, 0], low, high, which)
        return self._patterns[key]


@lru_cache(maxsize=512)
def selections(cells: Cells, graph: DeviceGraph, watched: tuple[int, ...]) -> Selections:
    """Seen from some devices."""
    return Selections(cells, graph, np.array(watched, np.int64))


def _group_boxes(index: Ints, size: int, watched: Ints) -> Ranges:
    """The cells of each watched device's group of `size` consecutive devices, as boxes of cell indices."""
    devices = index.shape[1]
    groups, which = np.unique(watched // size, return_inverse=True)
    members = groups[:, None] * size + np.arange(size)  # a last group may be cut short
    cell = index[:, np.minimum(members, devices - 1)]  # (C, groups, size, K)
    active = (cell[..., :1] >= 0) & (members < devices)[None, ..., None]
    hi = np.where(active, cell + 1, 0).max(2)
    lo = np.minimum(np.where(active, cell, np.iinfo(np.int64).max).min(2), hi)  # a group without cells: an empty box
    nested = np.prod(hi - lo, axis=-1) == active[..., 0].sum(2)
    if nested.all():
        return ((lo[:, which], hi[:, which]),)
    boxes = []
    for m in range(size):  # where cells do not nest: each device of the group is a box of its own
        single = active[:, :, m] & ~nested[..., None]
        whole = nested[..., None] & (m == 0)
        first = np.where(single, cell[:, :, m], np.where(whole, lo, 0))
        end = np.where(single, cell[:, :, m] + 1, np.where(whole, hi, 0))
        boxes.append((first[:, which], end[:, which]))
    return tuple(boxes)
