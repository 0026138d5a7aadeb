"""Curves of few lines through measured points."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.measure.links import TOLERANCE, knots

SIZES = [float(1024 * 4**i) for i in range(9)]
times = st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=9)


@given(times)
def test_no_point_is_missed_by_more_than_the_tolerance(seconds: list[float]) -> None:
    """But for noise: a time that falls as the size grows counts as the one before."""
    points = list(zip(SIZES, seconds, strict=False))
    found = knots(points)
    risen = np.maximum.accumulate(seconds)
    line = np.interp(SIZES[: len(seconds)], *np.array(found).T)
    assert np.abs(line - risen).max() <= TOLERANCE * risen.max()
    assert (np.abs(line / risen - 1) <= TOLERANCE + 1e-9).all()
    assert set(found) <= set(zip(SIZES, risen.tolist(), strict=False))
    assert (found[0][0], found[-1][0]) == (SIZES[0], SIZES[len(seconds) - 1])


def test_a_line_needs_two_knots() -> None:
    assert len(knots([(size, 1e-4 + size * 1e-9) for size in SIZES])) == 2


@pytest.mark.parametrize("switch", [3, 4, 6])
def test_the_switch_point_is_found(switch: int) -> None:
    """Latency until some size, then a slower line."""
    points = [(size, 1e-4 + max(0.0, size - SIZES[switch]) * 1e-8) for size in SIZES]
    assert [size for size, _ in knots(points)] == [SIZES[0], SIZES[switch], SIZES[-1]]


def test_two_points_may_be_anything() -> None:
    assert knots([(1.0, 2.0), (4.0, 1.0)]) == ((1.0, 2.0), (4.0, 2.0))
