"""AxisMap: the interval of an input dimension that an interval of an output (or reduction) dimension needs.

Every operator here is separable: an input dimension depends on at most one dimension of the operator's iteration space,
and an interval needs an interval. So `needs`, the function that all of layerwise follows from, is one AxisMap for every
input dimension, and the overlap of two boxes is a product over dimensions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.geometry.arrays import Ints


@dataclass(frozen=True, slots=True)
class IntervalMap:
    """Output x needs inputs scale*((x*stride + first)//over) .. scale*((x*stride + last)//over + 1) - 1.

    Clipped to [0, extent): positions outside are padding, which is not sent. nearest: an interval that is fully outside
    needs the border, which it repeats.
    """

    extent: int
    stride: int = 1
    first: int = 0
    last: int = 0
    over: int = 1
    scale: int = 1
    nearest: bool = False

    def __call__(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        start = (lo * self.stride + self.first) // self.over * self.scale
        stop = (((hi - 1) * self.stride + self.last) // self.over + 1) * self.scale
        border = int(self.nearest)
        start = np.minimum(np.maximum(start, 0), self.extent - border)
        stop = np.minimum(np.maximum(stop, border), self.extent)
        stop = np.where(hi > lo, np.maximum(start, stop), start)  # an empty interval needs nothing
        return start, stop


@dataclass(frozen=True, slots=True)
class AxisMap:
    """The interval of one input dimension that an interval of a dimension of the iteration space needs."""

    extent: int  # of the source dimension
    source: int | None = None  # None: a fixed interval, `parts` of [0, extent)
    parts: tuple[IntervalMap, ...] = ()  # applied one after the other

    def __call__(self, lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
        """Needed intervals, of the shape of `lo` and `hi`, which are intervals of the source dimension."""
        if self.source is None:
            lo, hi = np.zeros_like(lo), np.full_like(hi, self.extent)
        for part in self.parts:
            lo, hi = part(lo, hi)
        return lo, hi

    def then(self, inner: AxisMap) -> AxisMap:
        """The composition: `inner` maps this map's dimension to one further up (a view's input)."""
        if inner.source is None:
            return inner
        return AxisMap(self.extent, self.source, self.parts + inner.parts)


def needed(maps: Sequence[AxisMap], lo: Ints, hi: Ints) -> tuple[Ints, Ints]:
    """The box of a tensor that `maps`, one a dimension, need for each box [lo, hi) of the iteration space.

    lo, hi: (..., D). Returns the bounds of the needed boxes, (..., len(maps)) each.
    """
    zero = np.zeros(lo.shape[:-1], np.int64)
    ends = [m(zero, zero + 1) if m.source is None else m(lo[..., m.source], hi[..., m.source]) for m in maps]
    if not ends:
        return np.zeros((*zero.shape, 0), np.int64), np.zeros((*zero.shape, 0), np.int64)
    first, last = (np.stack(side, axis=-1) for side in zip(*ends, strict=True))
    return first, last


def whole(extent: int) -> AxisMap:
    """A map to the full dimension, whatever the box."""
    return AxisMap(extent)


def fixed(extent: int, index: int) -> AxisMap:
    """A map to position `index` of a dimension of `extent`, whatever the box."""
    return AxisMap(1, None, (IntervalMap(extent, first=index, last=index),))


def identity(extent: int, source: int) -> AxisMap:
    """A map to the same interval of a dimension of the same extent."""
    return AxisMap(extent, source)


def window(
    out_extent: int,
    extent: int,
    source: int,
    *,
    stride: int = 1,
    first: int = 0,
    last: int = 0,
    over: int = 1,
    nearest: bool = False,
) -> AxisMap:
    """Position x needs (x*stride + first)//over .. (x*stride + last)//over: convolution, pooling, interpolation."""
    part = IntervalMap(extent, stride, first, last, over, nearest=nearest)
    return AxisMap(out_extent, source, (part,))


def scaled(out_extent: int, extent: int, source: int, *, over: int = 1, scale: int = 1) -> AxisMap:
    """Position x needs the `scale` positions of its block x//over: channel groups, reshapes."""
    return AxisMap(out_extent, source, (IntervalMap(extent, over=over, scale=scale),))


def interval_overlap(lo: Ints, hi: Ints, other_lo: Ints, other_hi: Ints) -> Ints:
    """Length of [lo, hi) & [other_lo, other_hi), broadcast. Boxes overlap in the product of this over dimensions."""
    overlap: Ints = np.maximum(np.minimum(hi, other_hi) - np.maximum(lo, other_lo), 0)
    return overlap
