"""Region: a part of samples, or more than them, as a source that the network's input is read from."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerwise.geometry import Box
from layerwise.volumes.sources import Array, SampleSource, Slices


@dataclass(frozen=True, slots=True)
class Region:
    """A box of every sample of a source. Where it is larger than a sample there are zeros.

    Attributes:
        source: Where the samples lie.
        box: The region, in positions of a sample; it may begin before it and end after it.
        mirrored: The dimensions that are read backwards.
    """

    source: SampleSource
    box: Box
    mirrored: frozenset[int] = frozenset()

    def __len__(self) -> int:
        return len(self.source)

    def shape(self, index: int) -> tuple[int, ...]:
        return self.box.shape

    def file(self, index: int) -> str | None:
        return self.source.file(index)

    def read(self, index: int, slices: Slices) -> Array:
        lo, hi = zip(*map(self._place, range(len(slices)), slices), strict=True)
        inside = Box(lo, hi) & Box((0,) * len(lo), self.source.shape(index))
        if not inside.volume:
            return np.zeros(Box(lo, hi).shape, np.float32)
        read = self.source.read(index, inside.slices())
        margins = [(a - x, y - b) for x, y, a, b in zip(lo, hi, inside.lo, inside.hi, strict=True)]
        padded = np.pad(read, margins) if any(map(any, margins)) else read
        return np.flip(padded, tuple(self.mirrored))

    def _place(self, dim: int, s: slice) -> tuple[int, int]:
        """Where in a sample a slice of the region lies."""
        if dim in self.mirrored:
            return self.box.hi[dim] - s.stop, self.box.hi[dim] - s.start
        return self.box.lo[dim] + s.start, self.box.lo[dim] + s.stop
