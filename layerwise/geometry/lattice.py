"""Lattice: the positions of a dimension that are read at all, where a stride skips the others. Counted, they are boxes.

What a convolution of kernel 1 and stride 2 needs lies in a box, of which it reads every second row. These rows,
numbered 0, 1, 2, ..., are a dimension of their own: a box of the tensor becomes one of it, and so does what is needed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from layerwise.geometry.axis import AxisMap, IntervalMap, identity
from layerwise.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Lattice:
    """The positions first, first + step, ... of a dimension, `count` of them. Their numbers begin at 0."""

    first: int
    step: int
    count: int

    def axis(self, extent: int, source: int) -> AxisMap:
        """The numbers of those that lie in an interval of the dimension, of `extent`: they are an interval, too."""
        after = IntervalMap(self.count, first=self.step - 1 - self.first, last=-self.first, over=self.step)
        return AxisMap(extent, source, (after,))

    def slice(self, begin: int, lo: int, hi: int) -> slice:
        """The index of the numbers [lo, hi) in a buffer that starts at position `begin`."""
        start = self.first + lo * self.step - begin if hi > lo else 0
        return slice(start, start + (hi - lo - 1) * self.step + 1 if hi > lo else 0, self.step)


Lattices = tuple[Lattice | None, ...]  # one a dimension, None: all of it is read; (): all of all


def numbering(shape: Sequence[int], lattices: Lattices) -> tuple[AxisMap, ...]:
    """A map a dimension of a tensor, which makes a box of it the box of those numbers that it holds."""
    return tuple(
        identity(extent, i) if lattice is None else lattice.axis(extent, i)
        for i, (extent, lattice) in enumerate(zip(shape, lattices or (None,) * len(shape), strict=True))
    )


def through(maps: Sequence[AxisMap], counted: Sequence[AxisMap]) -> tuple[AxisMap, ...]:
    """Maps to the dimensions of a tensor, as maps to the numbers of their positions."""
    return tuple(axis.then(inner) for axis, inner in zip(maps, counted, strict=True))


def slices(lattices: Lattices, box: Box, numbered: Box) -> tuple[slice, ...]:
    """The index of those positions of a buffer for `box` whose numbers are in `numbered`."""
    rows = zip(lattices, box.lo, numbered.lo, numbered.hi, strict=True)
    return tuple(slice(lo - begin, hi - begin) if n is None else n.slice(begin, lo, hi) for n, begin, lo, hi in rows)
