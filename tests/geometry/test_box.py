"""Boxes, the grids that cut a tensor into them, positions that a stride reads, and what two grids share."""

import itertools
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerwise.geometry import (
    AxisMap,
    Box,
    Grid,
    boundaries,
    identity,
    interval_overlap,
    nests,
    scaled,
    whole,
    window,
)
from tests.examples import examples
from tests.geometry.shapes import elements, grids, owners


@st.composite
def boxes(draw: st.DrawFn, rank: int) -> Box:
    """Any bounds within 6: empty ones too, also with hi below lo."""
    lo, hi = (tuple(draw(st.integers(0, 6)) for _ in range(rank)) for _ in range(2))
    return Box(lo, hi)


@given(st.data())
def test_volume_and_intersection(data: st.DataObject) -> None:
    rank = data.draw(st.integers(0, 3))
    a, b = data.draw(boxes(rank)), data.draw(boxes(rank))
    in_a, in_b = (elements((6,) * rank, box) for box in (a, b))
    assert a.volume == in_a.sum() == np.prod(a.shape)
    assert (elements((6,) * rank, a & b) == (in_a & in_b)).all()
    assert (a & b).volume == (b & a).volume == (in_a & in_b).sum()


@given(st.data())
def test_slices(data: st.DataObject) -> None:
    """Of the whole tensor, and of a buffer that holds a larger box."""
    rank = data.draw(st.integers(0, 3))
    tensor = np.arange(6**rank).reshape((6,) * rank)
    origin = data.draw(boxes(rank).filter(lambda b: b.volume))
    box = data.draw(boxes(rank)) & origin
    if box.volume:
        assert tensor[box.slices()].shape == box.shape
        assert (tensor[origin.slices()][box.slices(origin)] == tensor[box.slices()]).all()
        assert set(np.ravel(tensor[box.slices()])) == set(tensor[elements(tensor.shape, box)])


def test_all_of_a_tensor() -> None:
    assert Box.full([2, 3]) == Box((0, 0), (2, 3))


def test_a_scalar_is_one_element() -> None:
    assert (Box((), ()).volume, Box((), ()).shape, Box((), ()).slices()) == (1, (), ())


def test_bounds_of_different_rank() -> None:
    with pytest.raises(AssertionError, match="different rank"):
        Box((0,), (1, 2))


@given(grids(extent=9))
def test_cells_tile_the_tensor(grid: Grid) -> None:
    """Disjoint, complete, none empty."""
    assert (owners(grid) >= 0).all(), "not complete"
    assert len(list(grid)) == len(grid) == np.prod(grid.degrees)
    for box in grid:
        assert box.volume > 0
        assert all(b % u == 0 for ends in (box.lo, box.hi) for b, u in zip(ends, grid.units, strict=True))


@given(grids(rank=(1, 3)))
def test_cells_are_in_row_major_order(grid: Grid) -> None:
    index = {box.lo: cell for cell, box in enumerate(grid)}
    edges = [boundaries(*dim) for dim in zip(grid.shape, grid.degrees, grid.units, strict=True)]
    for place in np.ndindex(*grid.degrees):
        corner = tuple(int(e[i]) for e, i in zip(edges, place, strict=True))
        assert index[corner] == np.ravel_multi_index(place, grid.degrees)


def chunked(room: int, degree: int) -> list[int]:
    """The cells' lengths, as torch.chunk makes them for each prime factor in turn; empty ones where it makes fewer."""
    parts, rest, factor = [torch.empty(room)], degree, 2
    while rest > 1:
        if rest % factor:
            factor += 1
            continue
        rest //= factor
        cut = [list(part.chunk(factor)) for part in parts]
        parts = [part for row in cut for part in (*row, *[torch.empty(0)] * (factor - len(row)))]
    return [len(part) for part in parts]


@given(st.integers(1, 200), st.integers(1, 5), st.data())
def test_boundaries(room: int, unit: int, data: st.DataObject) -> None:
    """torch.chunk's where it leaves no cell empty, else in steps that differ by one unit at most."""
    degree = data.draw(st.integers(1, room))
    steps = (np.diff(boundaries(room * unit, degree, unit)) // unit).tolist()
    wanted = chunked(room, degree)
    assert steps == (wanted if min(wanted) else np.diff([room * i // degree for i in range(degree + 1)]).tolist())
    assert (min(steps) > 0, sum(steps), max(steps)) == (True, room, -(-room // degree))


@given(st.integers(0, 6), st.data())
def test_powers_of_two_are_balanced(power: int, data: st.DataObject) -> None:
    room = data.draw(st.integers(2**power, 300))
    steps = np.diff(boundaries(room, 2**power))
    assert steps.max() - steps.min() <= 1
    assert steps.tolist() == chunked(room, 2**power)


def test_finer_cells_nest_exhaustively() -> None:
    """`nests` says where each cell of degree d is `split` cells of degree d * split: of powers of two always."""
    for room, degree in itertools.product(range(1, 40), range(1, 40)):
        coarse = boundaries(room, degree)
        for split in range(1, room // degree + 1):
            owner = np.searchsorted(coarse, boundaries(room, degree * split)[:-1], side="right") - 1
            ends = np.searchsorted(coarse, boundaries(room, degree * split)[1:], side="left") - 1
            inside = bool((owner == np.arange(degree * split) // split).all() and (owner == ends).all())
            assert nests(room, degree, split) == inside
            product = degree * split
            assert inside or (product & (product - 1) and room % product)


def test_boundaries_are_shared_and_so_read_only() -> None:
    with pytest.raises(ValueError, match="read-only"):
        boundaries(10, 3)[0] = 1


@pytest.mark.parametrize("grid", [((4,), (5,), (1,)), ((6,), (4,), (2,)), ((4,), (0,), (1,)), ((4, 4), (2,), (1,))])
def test_grids_that_cannot_be(grid: tuple[tuple[int, ...], ...]) -> None:
    with pytest.raises(AssertionError):
        Grid(*grid)


def test_extents_that_are_no_multiple_of_the_unit() -> None:
    with pytest.raises(AssertionError, match="not a multiple"):
        boundaries(7, 2, 3)


Positions = Callable[[int], range]  # positions of the input that one position of the output needs, by definition


@st.composite
def axes(draw: st.DrawFn, dim: int) -> tuple[int, int, int, AxisMap, Positions]:
    """A dimension of an operator: extent and unit of the output, extent of the input, the map, and what it means."""
    kind = draw(st.sampled_from(["same", "convolution", "transposed", "groups", "merged", "part", "slice", "whole"]))
    room = draw(st.integers(1, 7))
    if kind == "convolution":  # halos, strides, paddings
        kernel, stride, dilation = draw(st.integers(1, 4)), draw(st.integers(1, 3)), draw(st.integers(1, 2))
        low, high = draw(st.integers(0, 3)), draw(st.integers(0, 3))
        reach = (kernel - 1) * dilation + 1
        extent = max((room - 1) * stride + reach - low - high, 1)
        axis = window(room, extent, dim, stride=stride, first=-low, last=reach - 1 - low)
        return room, 1, extent, axis, lambda x: range(x * stride - low, x * stride - low + reach)
    if kind == "transposed":  # interpolation by a whole factor, too
        stride, kernel = draw(st.integers(1, 3)), draw(st.integers(1, 4))
        extent = draw(st.integers(1, 4))
        out = (extent - 1) * stride + kernel
        axis = window(out, extent, dim, first=stride - kernel, last=0, over=stride)
        reached = {x: [i for i in range(extent) if 0 <= x - i * stride < kernel] for x in range(out)}
        return out, 1, extent, axis, lambda x: range(min(reached[x], default=0), max(reached[x], default=-1) + 1)
    if kind == "groups":  # grouped convolution: all input channels of the group
        per_out, per_in = draw(st.integers(1, 3)), draw(st.integers(1, 3))
        axis = scaled(room * per_out, room * per_in, dim, over=per_out, scale=per_in)
        group = [range(g * per_in, (g + 1) * per_in) for g in range(room)]
        return room * per_out, 1, room * per_in, axis, lambda x: group[x // per_out]
    if kind == "merged":  # flatten: the outer dimension of which `inner` positions each were merged
        inner = draw(st.integers(1, 4))
        outer = [range(i, i + 1) for i in range(room) for _ in range(inner)]
        return room * inner, inner, room, scaled(room * inner, room, dim, over=inner), lambda x: outer[x]
    if kind == "part":  # one input of a concat: positions from `start` on
        start, extent = draw(st.integers(0, 4)), draw(st.integers(1, 5))
        out = start + extent + draw(st.integers(0, 3))
        axis = window(out, extent, dim, first=-start, last=-start)
        return out, 1, extent, axis, lambda x: range(x - start, x - start + 1)
    if kind == "slice":
        start, step = draw(st.integers(0, 3)), draw(st.integers(1, 3))
        extent = start + (room - 1) * step + 1 + draw(st.integers(0, 2))
        axis = window(room, extent, dim, stride=step, first=start, last=start)
        return room, 1, extent, axis, lambda x: range(start + x * step, start + x * step + 1)
    extent = draw(st.integers(1, 6))
    if kind == "whole":
        return room, 1, extent, whole(extent), lambda x: range(extent)
    return room, 1, room, identity(room, dim), lambda x: range(x, x + 1)


@st.composite
def transfers(draw: st.DrawFn) -> tuple[Grid, Grid, tuple[AxisMap, ...], list[Positions]]:
    """An edge: the producer's grid, the consumer's, and what the consumer's operator needs."""
    drawn = [draw(axes(dim)) for dim in range(draw(st.integers(1, 3)))]
    degrees = [draw(st.integers(1, min(out // unit, 4))) for out, unit, *_ in drawn]
    consumer = Grid(tuple(d[0] for d in drawn), tuple(degrees), tuple(d[1] for d in drawn))
    shape = tuple(d[2] for d in drawn)
    producer = Grid(shape, tuple(draw(st.integers(1, min(e, 4))) for e in shape))
    return producer, consumer, tuple(d[3] for d in drawn), [d[4] for d in drawn]


def hull(needs: Positions, lo: int, hi: int, extent: int) -> list[int]:
    """The tensor's positions from the first to the last that [lo, hi) reads, with what lies between strides."""
    read = [p for x in range(lo, hi) for p in needs(x)]
    return list(range(max(min(read), 0), min(max(read) + 1, extent))) if read else []


def corners(grid: Grid) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """lo and hi of every cell."""
    return np.array([box.lo for box in grid]), np.array([box.hi for box in grid])


@examples(200)
@given(transfers())
def test_transfers_are_the_elements_counted(case: tuple[Grid, Grid, tuple[AxisMap, ...], list[Positions]]) -> None:
    producer, consumer, maps, needs = case
    lo, hi = corners(consumer)
    dims = [m(lo[:, i], hi[:, i]) for i, m in enumerate(maps)]
    needed = [Box(*(tuple(int(ends[side][cell]) for ends in dims) for side in (0, 1))) for cell in range(len(consumer))]

    # Scalar: boxes.
    by_boxes = np.array([[(need & own).volume for own in producer] for need in needed])

    # Vectorised: a product over dimensions.
    own_lo, own_hi = corners(producer)
    volumes = np.ones_like(by_boxes)
    for i, (a, b) in enumerate(dims):
        volumes *= interval_overlap(a[:, None], b[:, None], own_lo[None, :, i], own_hi[None, :, i])
    assert (volumes == by_boxes).all()

    # Element by element: who owns each one that is needed (by the operator's definition, not by its AxisMap).
    owner = owners(producer)
    for cell, box in enumerate(consumer):
        taken = [hull(*dim) for dim in zip(needs, box.lo, box.hi, producer.shape, strict=True)]
        counted = np.bincount(owner[np.ix_(*taken)].ravel(), minlength=len(producer))
        assert (counted == by_boxes[cell]).all(), f"cell {cell} needs {needed[cell]}"


@given(st.lists(st.tuples(*[st.integers(0, 9)] * 4), min_size=1, max_size=8))
def test_interval_overlap(rows: list[tuple[int, int, int, int]]) -> None:
    counted = [len(set(range(a, b)) & set(range(c, d))) for a, b, c, d in rows]
    assert interval_overlap(*np.array(rows).T).tolist() == counted
