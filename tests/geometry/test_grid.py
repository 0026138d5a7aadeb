"""Law 1: the cells of a grid tile the tensor. They are torch.chunk's, and nest. `bounds` are the boxes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry import Grid, boundaries, nests
from tests.geometry.shapes import grids, owners


@given(grids(extent=9))
def test_cells_tile_the_tensor(grid: Grid) -> None:
    """Disjoint, complete, none empty."""
    assert (owners(grid) >= 0).all(), "not complete"
    assert len(list(grid)) == len(grid) == np.prod(grid.degrees)
    for box in grid:
        assert box.volume > 0
        assert all(b % u == 0 for ends in (box.lo, box.hi) for b, u in zip(ends, grid.units, strict=True))


@given(grids(extent=9))
def test_iteration_is_bounds(grid: Grid) -> None:
    lo, hi = grid.bounds()
    assert lo.shape == hi.shape == (len(grid), len(grid.shape))
    assert [tuple(row) for row in lo.tolist()] == [box.lo for box in grid]
    assert [tuple(row) for row in hi.tolist()] == [box.hi for box in grid]


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
