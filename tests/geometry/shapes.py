"""Random tensors to cut, and elements to count one by one."""

import numpy as np
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerwise.geometry import Box, Grid


@st.composite
def grids(draw: st.DrawFn, *, rank: tuple[int, int] = (0, 4), extent: int = 6, unit: int = 3) -> Grid:
    """A tensor of any shape, cut in any legal way; merged dimensions among them."""
    shape, degrees, units = [], [], []
    for _ in range(draw(st.integers(*rank))):
        units.append(draw(st.integers(1, unit)))
        room = draw(st.integers(1, extent))
        degrees.append(draw(st.integers(1, room)))
        shape.append(room * units[-1])
    return Grid(tuple(shape), tuple(degrees), tuple(units))


def owners(grid: Grid) -> NDArray[np.int64]:
    """For every element of the tensor, which cell has it; fails if two have."""
    owner = np.full(grid.shape, -1, dtype=np.int64)
    for cell, box in enumerate(grid):
        assert (owner[box.slices()] == -1).all(), f"cell {cell} of {grid} is not disjoint from others"
        owner[box.slices()] = cell
    return owner


def elements(shape: tuple[int, ...], box: Box) -> NDArray[np.bool_]:
    """Which elements of a tensor a box has, by asking for each."""
    inside = np.zeros(shape, dtype=bool)
    for point in np.ndindex(*shape):
        inside[point] = point in box
    return inside
