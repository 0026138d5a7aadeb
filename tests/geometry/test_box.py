"""Boxes are sets of elements: asked for each."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry import Box
from tests.geometry.shapes import elements


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


def test_a_scalar_is_one_element() -> None:
    assert (Box((), ()).volume, Box((), ()).shape, Box((), ()).slices()) == (1, (), ())


def test_bounds_of_different_rank() -> None:
    with pytest.raises(AssertionError, match="different rank"):
        Box((0,), (1, 2))
