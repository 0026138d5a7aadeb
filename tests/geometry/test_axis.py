"""AxisMaps map an interval to the hull of what its positions need, and compose as functions do."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry import AxisMap, fixed, identity, needed, scaled, whole, window


@st.composite
def maps(draw: st.DrawFn, out: int, extent: int, source: int | None = 0) -> AxisMap:
    """Any map from a dimension of extent `out` to one of `extent`."""
    kind = draw(st.sampled_from(["window", "scaled", "whole", "fixed", "identity"]))
    if kind == "whole":
        return whole(extent)
    if kind == "fixed":
        return fixed(extent, draw(st.integers(0, extent - 1)))
    if kind == "scaled":
        return scaled(out, extent, 0, over=draw(st.integers(1, 4)), scale=draw(st.integers(1, 4)))
    if kind == "identity" and out == extent:
        return identity(extent, 0)
    first = draw(st.integers(-4, 4))
    last = first + draw(st.integers(0, 5))
    return window(out, extent, 0, stride=draw(st.integers(0, 3)), first=first, last=last, over=draw(st.integers(1, 3)))


def interval(axis: AxisMap, lo: int, hi: int) -> tuple[int, int]:
    a, b = axis(np.array([lo]), np.array([hi]))
    return int(a[0]), int(b[0])


@st.composite
def parts(draw: st.DrawFn, extent: int) -> tuple[int, int]:
    lo = draw(st.integers(0, extent))
    return lo, draw(st.integers(lo, extent))


EXTENTS = st.integers(1, 12)


@given(EXTENTS, EXTENTS, st.data())
def test_an_interval_needs_what_its_positions_need(out: int, extent: int, data: st.DataObject) -> None:
    """In bounds, all of it; nothing needs nothing."""
    axis = data.draw(maps(out, extent))
    lo, hi = data.draw(parts(out))
    start, stop = interval(axis, lo, hi)
    assert 0 <= start <= stop <= extent
    for at in range(lo, hi):
        assert set(range(*interval(axis, at, at + 1))) <= set(range(start, stop))
    if axis.source is not None and lo == hi:
        assert start == stop


@given(EXTENTS, st.integers(0, 3), st.integers(-4, 4), st.integers(0, 5), st.integers(1, 3), st.data())
def test_windows_are_hulls(extent: int, stride: int, first: int, more: int, over: int, data: st.DataObject) -> None:
    """From the first to the last of what the positions need, padding included, then without the padding."""
    lo, hi = data.draw(parts(10).filter(lambda ends: ends[0] < ends[1]))
    axis = window(10, extent, 0, stride=stride, first=first, last=first + more, over=over)
    taps = [tap for x in range(lo, hi) for tap in ((x * stride + first) // over, (x * stride + first + more) // over)]
    within = [p for p in range(min(taps), max(taps) + 1) if 0 <= p < extent]
    assert list(range(*interval(axis, lo, hi))) == within


@given(EXTENTS, EXTENTS, EXTENTS, EXTENTS, st.data())
def test_composition(a: int, b: int, c: int, d: int, data: st.DataObject) -> None:
    """`then` is the function of the function, and it does not matter how three are grouped."""
    first, second, third = data.draw(maps(a, b)), data.draw(maps(b, c)), data.draw(maps(c, d))
    lo, hi = data.draw(parts(a))
    if hi == lo:
        return
    both = first.then(second)
    assert interval(both, lo, hi) == interval(second, *interval(first, lo, hi))
    assert interval(both.then(third), lo, hi) == interval(first.then(second.then(third)), lo, hi)
    assert interval(both.then(third), lo, hi) == interval(third, *interval(second, *interval(first, lo, hi)))


def test_composition_keeps_the_source() -> None:
    """The source of the outer map, unless what follows does not depend on it."""
    assert identity(4, 2).then(window(4, 8, 0, stride=2)).source == 2
    assert identity(4, 2).then(whole(8)).source is None
    assert whole(4).then(window(4, 8, 0, stride=2, last=1)).source is None
    assert interval(whole(4).then(window(4, 8, 0, stride=2, last=1)), 1, 2) == (0, 8)


@given(EXTENTS, EXTENTS, st.data())
def test_arrays_of_any_shape(out: int, extent: int, data: st.DataObject) -> None:
    axis = data.draw(maps(out, extent))
    rows = np.array([[data.draw(parts(out)) for _ in range(3)] for _ in range(2)])
    lo, hi = axis(rows[..., 0], rows[..., 1])
    assert lo.shape == hi.shape == (2, 3)
    for place in np.ndindex(2, 3):
        assert (lo[place], hi[place]) == interval(axis, *rows[place].tolist())


@pytest.mark.parametrize(("over", "scale", "need"), [(1, 1, (3, 5)), (2, 3, (3, 9)), (1, 4, (12, 20))])
def test_blocks(over: int, scale: int, need: tuple[int, int]) -> None:
    assert interval(scaled(8, 40, 0, over=over, scale=scale), 3, 5) == need


@given(st.lists(EXTENTS, max_size=3), st.integers(0, 3), st.data())
def test_boxes_need_in_each_dimension_what_its_map_says(out: list[int], rank: int, data: st.DataObject) -> None:
    """Also of a scalar's boxes, which have no dimensions, and for a scalar, which needs none."""
    drawn = [data.draw(maps(out[0] if out else 1, data.draw(EXTENTS))) for _ in range(rank)]
    axes = [axis if out or axis.source is None else whole(axis.extent) for axis in drawn]
    boxes = data.draw(st.lists(st.tuples(*map(parts, out)), min_size=1, max_size=3))
    lo, hi = (
        np.array([[ends[side] for ends in box] for box in boxes]).reshape(len(boxes), len(out)) for side in (0, 1)
    )
    first, last = needed(axes, lo, hi)
    assert first.shape == last.shape == (len(boxes), rank)
    for i, box in enumerate(boxes):
        for j, axis in enumerate(axes):
            assert (first[i, j], last[i, j]) == interval(
                axis, *(box[axis.source] if axis.source is not None else (0, 1))
            )
