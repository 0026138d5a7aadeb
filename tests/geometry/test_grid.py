"""Law 1: the cells of a grid tile the tensor. Grids of d and d*e nest. `bounds` are the boxes."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry import Grid, boundaries
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


@given(st.integers(1, 200), st.integers(1, 5), st.data())
def test_boundaries(room: int, unit: int, data: st.DataObject) -> None:
    """Of the declared form, in steps that differ by one unit at most."""
    degree = data.draw(st.integers(1, room))
    cuts = boundaries(room * unit, degree, unit)
    assert cuts.tolist() == [room * i // degree * unit for i in range(degree + 1)]
    steps = np.diff(cuts)
    assert unit <= steps.min() <= steps.max() <= steps.min() + unit


@given(grids(extent=12), st.data())
def test_finer_cells_nest(grid: Grid, data: st.DataObject) -> None:
    """Cells of degree d*e lie inside cells of degree d: every one in exactly one."""
    rooms = [s // u for s, u in zip(grid.shape, grid.units, strict=True)]
    factors = [data.draw(st.integers(1, room // d)) for room, d in zip(rooms, grid.degrees, strict=True)]
    fine = Grid(grid.shape, tuple(d * f for d, f in zip(grid.degrees, factors, strict=True)), grid.units)
    owner = owners(grid)
    for box in fine:
        assert len(np.unique(owner[box.slices()])) == 1


def test_nesting_exhaustively() -> None:
    for room, degree in itertools.product(range(1, 40), range(1, 40)):
        for factor in range(1, room // degree + 1):
            assert set(boundaries(room, degree).tolist()) <= set(boundaries(room, degree * factor).tolist())


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
