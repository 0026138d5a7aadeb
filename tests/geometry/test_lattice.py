"""Lattices count the positions that are read: boxes of positions become boxes of numbers."""

from __future__ import annotations

from math import prod

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry import AxisMap, Box, Lattice, numbering, slices


@st.composite
def lattices(draw: st.DrawFn) -> tuple[int, Lattice]:
    """An extent, and positions in it."""
    extent, step = draw(st.integers(1, 20)), draw(st.integers(1, 5))
    first = draw(st.integers(0, extent - 1))
    return extent, Lattice(first, step, draw(st.integers(1, (extent - 1 - first) // step + 1)))


def box(draw: st.DrawFn, extents: list[int]) -> Box:
    ends = [sorted(draw(st.tuples(st.integers(0, extent), st.integers(0, extent)))) for extent in extents]
    return Box(tuple(lo for lo, _ in ends), tuple(hi for _, hi in ends))


def of(axes: tuple[AxisMap, ...], box: Box) -> Box:
    ends = [axis(np.array([lo]), np.array([hi])) for axis, lo, hi in zip(axes, box.lo, box.hi, strict=True)]
    return Box(tuple(int(lo[0]) for lo, _ in ends), tuple(int(hi[0]) for _, hi in ends))


@given(st.lists(st.tuples(lattices(), st.booleans()), min_size=1, max_size=3), st.data())
def test_a_box_holds_the_numbers_of_its_positions(drawn: list, data: st.DataObject) -> None:
    """Also none; and a buffer that holds the box has them where `slices` says."""
    extents = [extent for (extent, _), _ in drawn]
    found = tuple(lattice if there else None for (_, lattice), there in drawn)
    whole = np.arange(prod(extents)).reshape(extents)
    lying = data.draw(st.composite(box)(extents))
    numbered = of(numbering(extents, found), lying)
    read = [
        [x for x in range(lo, hi) if n is None or x in range(n.first, n.first + n.count * n.step, n.step)]
        for n, lo, hi in zip(found, lying.lo, lying.hi, strict=True)
    ]
    assert numbered.shape == tuple(map(len, read))
    assert np.array_equal(whole[lying.slices()][slices(found, lying, numbered)], whole[np.ix_(*read)])


@given(lattices(), st.data())
def test_cuts_count_what_lies_before_them(drawn: tuple[int, Lattice], data: st.DataObject) -> None:
    extent, lattice = drawn
    inner = data.draw(st.sets(st.integers(1, max(extent - 1, 1)).filter(lambda x: x < extent)))
    cuts = np.array([0, *sorted(inner), extent])
    there = range(lattice.first, lattice.first + lattice.count * lattice.step, lattice.step)
    assert lattice.axis(extent, 0).cuts(cuts).tolist() == [sum(x < cut for x in there) for cut in cuts]
