"""The fit: exact on times that the roofline's terms explain, never negative, judged on cells that it has not seen."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from layerwise.cost.compute.fit import fitted, groups, held_out_error
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes, Work

CONV = '{"op":{"kind":"conv","out_channels":4},"followers":[[{"kind":"unary","fn":"relu"},0,0]]}'
OTHER = '{"op":{"kind":"conv","out_channels":9},"followers":[[{"kind":"unary","fn":"relu"},0,0]]}'
PLAIN = '{"op":{"kind":"linear","out_features":4}}'
positive = st.floats(1e-6, 1e-2)


def cells(factors: tuple[float, float, float], count: int, seed: int = 0) -> dict[tuple[int, ...], CellTime]:
    """Times that are `factors` of random work, twice that backward."""
    rng = np.random.default_rng(seed)
    found = {}
    for i in range(count):
        work = (float(rng.integers(1, 4)), *rng.uniform(1e-5, 1e-3, 2).tolist())
        seconds = float(np.dot(factors, work))
        found[i,] = CellTime(seconds, 2 * seconds, 0.01, 9, Work(*work), Work(*work))
    return found


@given(st.tuples(positive, st.floats(0.5, 3), st.floats(0, 3)), st.integers(4, 12))
@settings(max_examples=40)
def test_times_made_of_the_terms_are_found_again(factors: tuple[float, float, float], count: int) -> None:
    fit = fitted({CONV: cells(factors, count)})
    work = np.array([[2, 3e-4, 5e-4], [1, 1e-5, 1e-3]])
    for direction, times in ((0, 1), (1, 2)):
        found = fit(CONV, direction, work)
        assert found == pytest.approx(times * (work @ np.array(factors)), rel=1e-6)


@given(st.lists(st.tuples(positive, positive, positive, positive), min_size=4, max_size=12))
@settings(max_examples=60)
def test_factors_are_never_negative(rows: list[tuple[float, float, float, float]]) -> None:
    """So no cell, however small, is predicted below nothing; and less work never takes longer."""
    known = {(i,): CellTime(t, t, 0.0, 1, Work(1, a, b), Work(1, a, c)) for i, (t, a, b, c) in enumerate(rows)}
    fit = fitted({CONV: known})
    for factors in fit.factors.values():
        assert (factors >= 0).all()
        assert factors.any()


def test_the_likest_cells_that_were_measured_are_fitted_to() -> None:
    one = np.array([[1.0, 1e-4, 1e-4]])
    slow, fast = cells((1e-5, 4, 4), 6), cells((1e-5, 1, 1), 6)
    both = fitted({CONV: slow, PLAIN: fast})
    assert both(CONV, 0, one) == pytest.approx(1e-5 + 8e-4)
    assert both(OTHER, 0, one) == pytest.approx(1e-5 + 8e-4)  # a convolution with relu, of other channels
    assert both(PLAIN, 0, one) == pytest.approx(1e-5 + 2e-4)
    pool = both('{"op":{"kind":"pool"}}', 0, one)
    assert pool is not None
    assert 1e-5 + 2e-4 < pool < 1e-5 + 8e-4  # like all of them
    assert both("update sgd", 0, one) is None
    assert fitted({CONV: dict(list(slow.items())[:3])})(CONV, 0, one) is None  # three cells for three factors
    assert groups(CONV) == (CONV, "conv+relu", "conv", "all")
    assert groups("update sgd") == ("update sgd",)


def test_the_error_is_of_cells_held_out() -> None:
    where = Conditions("device", "2.13.0", "float32")
    exact = LayerTimes(where, cells={CONV: cells((1e-5, 2, 1), 20)})
    assert held_out_error(exact) == pytest.approx(0, abs=1e-9)
    assert held_out_error(LayerTimes(where, cells={CONV: cells((1e-5, 2, 1), 9)})) is None
    # A cell in two takes double: the fit lies between, whatever it was given.
    odd = {key: t if key[0] % 2 else CellTime(2 * t.forward_s, 2 * t.backward_s, 0, 1, t.forward, t.backward)
           for key, t in cells((1e-5, 2, 1), 40).items()}  # fmt: skip
    error = held_out_error(LayerTimes(where, cells={CONV: odd}))
    assert error is not None
    assert 0.2 < error < 0.7
