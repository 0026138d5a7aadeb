"""Cells: which cells each device, its node and its rack hold, as ranges of cell indices, for many configurations."""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Layout
from layerwise.machine import DeviceGraph

Ints = NDArray[np.int64]
Boxes = tuple[tuple[Ints, Ints], ...]


class Cells:
    """Selections of cells, seen from each device: 0 its own, 1 its node's, 2 its rack's, ...

    degrees: (C, K). boxes[selection]: boxes of cell indices lo, hi, each (C, N, K), that together are the selection: a
    single one where the degrees nest in the group's size, else one for each device of the group.
    """

    def __init__(self, degrees: Ints, index: Ints, active: NDArray[np.bool_], graph: DeviceGraph) -> None:
        there = active[..., None]
        own = (np.where(there, index, 0), np.where(there, index + 1, 0))
        self.degrees = degrees
        self.boxes: tuple[Boxes, ...] = (
            (own,),
            *(_group_boxes(index, active, level.devices) for level in graph.levels),
        )
        self._patterns: dict[tuple[int, int, int | None], tuple[Ints, Ints, Ints, Ints]] = {}

    def patterns(self, selection: int, box: int, dim: int | None) -> tuple[Ints, Ints, Ints, Ints]:
        """Distinct (degree, lo of each device, hi of each device) along `dim`, and the one that each configuration has.

        dim None: a dimension that nothing drives has one cell, which every device with any cell holds.
        """
        key = (selection, box, dim)
        if key not in self._patterns:
            lo, hi = self.boxes[selection][box]
            if dim is None:
                there = (hi > lo).all(-1).astype(np.int64)
                rows = np.concatenate([np.ones((len(there), 1), np.int64), np.zeros_like(there), there], axis=1)
            else:
                rows = np.concatenate([self.degrees[:, dim, None], lo[..., dim], hi[..., dim]], axis=1)
            found: dict[bytes, int] = {}
            which = np.array([found.setdefault(row.tobytes(), len(found)) for row in rows], np.int64)
            first = np.unique(which, return_index=True)[1]
            degree, low, high = np.split(rows[first], [1, 1 + lo.shape[1]], axis=1)
            self._patterns[key] = (degree[:, 0], low, high, which)
        return self._patterns[key]


@lru_cache(maxsize=512)
def cells(layout: Layout, owned: bool, graph: DeviceGraph) -> Cells:
    """Of what a layer owns of its output, or of what it computes (its iteration space)."""
    if owned:
        return Cells(layout.own_degrees, layout.own_index, layout.active, graph)
    return Cells(layout.degrees, layout.index, layout.active, graph)


def _group_boxes(index: Ints, active: NDArray[np.bool_], size: int) -> Boxes:
    """The cells of each device's group of `size` consecutive devices, as boxes of cell indices."""
    configs, devices, rank = index.shape
    groups = -(-devices // size)
    pad = groups * size - devices
    cell = np.pad(index, ((0, 0), (0, pad), (0, 0))).reshape(configs, groups, size, rank)
    there = np.pad(active, ((0, 0), (0, pad))).reshape(configs, groups, size, 1)
    hi = np.where(there, cell + 1, 0).max(2)
    lo = np.minimum(np.where(there, cell, np.iinfo(np.int64).max).min(2), hi)  # a group without cells: an empty box
    nested = np.prod(hi - lo, axis=-1) == there[..., 0].sum(2)

    def spread(lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        low, high = (np.repeat(a, size, axis=1)[:, :devices] for a in (lo, hi))
        return low, high

    if nested.all():
        return (spread(lo, hi),)
    boxes = []
    for m in range(size):  # where cells do not nest: each device of the group is a box of its own
        single = there[:, :, m] & ~nested[..., None]
        whole = nested[..., None] & (m == 0)
        boxes.append(
            spread(
                np.where(single, cell[:, :, m], np.where(whole, lo, 0)),
                np.where(single, cell[:, :, m] + 1, np.where(whole, hi, 0)),
            )
        )
    return tuple(boxes)
