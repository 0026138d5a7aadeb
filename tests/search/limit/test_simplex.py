"""Law: the simplex method finds the least of all vertices, and its prices prove it."""

from __future__ import annotations

from itertools import combinations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry.arrays import Floats
from layerwise.search.limit.multipliers import simplex
from tests.examples import examples


def least_vertex(cost: Floats, matrix: Floats, right: Floats) -> float:
    """The least cost of all feasible choices of as many columns as there are rows."""
    least = np.inf
    for columns in map(list, combinations(range(len(cost)), len(right))):
        square = matrix[:, columns]
        if abs(np.linalg.det(square)) > 1e-9:
            level = np.linalg.solve(square, right)
            if (level >= -1e-9).all():
                least = min(least, float(cost[columns] @ level))
    return least


@examples(100)
@given(st.integers(1, 3), st.integers(1, 5), st.integers(0, 2**32 - 1), st.booleans())
def test_it_is_the_best_vertex_and_prices_prove_it(rows: int, columns: int, seed: int, tied: bool) -> None:
    random = np.random.default_rng(seed)
    numbers = random.integers(-2, 3, (rows, columns)) if tied else random.normal(size=(rows, columns))
    matrix: Floats = np.hstack([numbers, np.eye(rows)])
    right: Floats = random.integers(0, 3, rows).astype(np.float64) if tied else random.random(rows)
    cost: Floats = np.r_[random.random(columns), random.random(rows)]  # above 0: the least is finite
    solution, prices = simplex(cost, matrix, right, range(columns, columns + rows))
    assert (solution >= 0).all()
    assert matrix @ solution == pytest.approx(right, abs=1e-7)
    assert (prices @ matrix <= cost + 1e-7).all()
    assert cost @ solution == pytest.approx(least_vertex(cost, matrix, right), abs=1e-7)
    assert prices @ right == pytest.approx(cost @ solution, abs=1e-7)
