"""Boxes: a box of a tensor on each of N devices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from layerwise.geometry import Box, boundaries, interval_overlap, needed
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.ops.facts import Dim, Maps

Each = tuple[Box | None, ...]  # by device; None: it has none


@dataclass(frozen=True, eq=False)
class Boxes:
    """The box [lo, hi) that each of N devices has of a tensor of D dimensions."""

    lo: Ints  # (N, D)
    hi: Ints
    active: Mask  # (N,) which devices have a box
    cuts: tuple[Ints, ...] = ()  # of each dimension, the boundaries between the cells of a grid

    @staticmethod
    def whole(shape: tuple[int, ...], devices: int) -> Boxes:
        """All of a tensor, on every device."""
        hi = np.tile(np.array(shape, np.int64), (devices, 1))
        cuts = tuple(np.array([0, extent], np.int64) for extent in shape)
        return Boxes(np.zeros_like(hi), hi, np.ones(devices, np.bool_), cuts)

    @staticmethod
    def grid(dims: Sequence[Dim], degrees: Ints, index: Ints, active: Mask) -> Boxes:
        """The cells `index`, (N, D), of the grid that `degrees`, (D,), make of `dims`."""
        cuts = tuple(boundaries(d.extent, int(degree), d.unit) for d, degree in zip(dims, degrees, strict=True))
        clipped, none = np.maximum(index, 0), np.zeros((len(active), 0), np.int64)
        lo, hi = (
            np.stack([c[clipped[:, i] + more] for i, c in enumerate(cuts)], axis=1) if cuts else none for more in (0, 1)
        )
        return Boxes(np.where(active[:, None], lo, 0), np.where(active[:, None], hi, 0), active, cuts)

    @cached_property
    def each(self) -> Each:
        """One by one, by device."""
        boxes = map(Box, map(tuple, self.lo.tolist()), map(tuple, self.hi.tolist()))
        return tuple(box if active else None for box, active in zip(boxes, self.active.tolist(), strict=True))

    @property
    def volume(self) -> Floats:
        """(N,) elements."""
        volume: Floats = np.where(self.active, (self.hi - self.lo).astype(np.float64).prod(-1), 0.0)
        return volume

    def on(self, devices: Ints) -> Boxes:
        """Of these devices, in this order."""
        return Boxes(self.lo[devices], self.hi[devices], self.active[devices], self.cuts)

    def needs(self, maps: Maps) -> Boxes:
        """The boxes of a tensor that `maps` need for these."""
        return Boxes(*needed(maps, self.lo, self.hi), self.active)

    def numbered(self, numbers: Maps) -> Boxes:
        """Of a tensor's boxes, those of the numbers that they hold (`geometry.lattice`)."""
        cuts = tuple(axis.cuts(own) for axis, own in zip(numbers, self.cuts, strict=False))
        return replace(self.needs(numbers), cuts=cuts)

    def overlap(self, other: Boxes) -> Floats:
        """(N,) elements of a device's box that are also in its box of the other kind."""
        lengths = interval_overlap(self.lo, self.hi, other.lo, other.hi)
        overlap: Floats = np.where(self.active & other.active, lengths.astype(np.float64).prod(-1), 0.0)
        return overlap

    def hull(self, other: Boxes) -> Boxes:
        """The smallest boxes that hold those of both; of a device that has only one, that one."""
        lo = np.where(other.active[:, None], other.lo, self.lo)
        hi = np.where(other.active[:, None], other.hi, self.hi)
        both = (self.active & other.active)[:, None]
        lo, hi = np.where(both, np.minimum(lo, self.lo), lo), np.where(both, np.maximum(hi, self.hi), hi)
        return Boxes(lo, hi, self.active | other.active)

    def filled(self) -> Boxes:
        """Devices that have none have an empty one."""
        lo, hi = (np.where(self.active[:, None], side, 0) for side in (self.lo, self.hi))
        return Boxes(lo, hi, np.ones_like(self.active))

    def first_of_each(self) -> Mask:
        """(N,) whether no device before it has the same box."""
        rows = np.concatenate([self.lo, self.hi, self.active[:, None]], axis=1)
        first = np.unique(rows, axis=0, return_index=True)[1]
        return self.active & np.isin(np.arange(len(rows)), first)

    def shared(self) -> Mask:
        """(N,) whether another device has the same box."""
        rows = np.concatenate([self.lo, self.hi, self.active[:, None]], axis=1)
        # As bytes, which are counted: np.unique would sort them, which takes ten times as long.
        each = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.strides[0]))).ravel().tolist()
        counts = Counter(each)
        alike: Mask = self.active & np.array([counts[row] > 1 for row in each])
        return alike
