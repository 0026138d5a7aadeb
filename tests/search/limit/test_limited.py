"""Law: under any limit the answer is that of exhaustive search, and what is said to be proven is true."""

from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.geometry.arrays import Floats
from layerwise.search.limit import rest
from layerwise.search.limit.additive import Choice, Costs, Problem
from layerwise.search.limit.limited import GAP, fastest_within, least_memory
from layerwise.search.limit.multipliers import simplex
from tests.examples import examples
from tests.search.problems import Random, random_problems

SHARES = st.floats(-0.1, 1.1)  # of the way from the least memory to that of the fastest choice


def limit_at(r: Random, share: float) -> float:
    least, fastest = float(r.peaks.min()), float(r.peaks[r.costs.argmin()])
    return least + share * max(fastest - least, 1e8)


@examples(80)
@given(random_problems(), SHARES)
def test_it_equals_exhaustive_search(r: Random, share: float) -> None:
    limit = limit_at(r, share)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest, "CHECKS", 10**6)  # with fewer it may end before the proof
        found, best = fastest_within(r.problem, limit), r.best(limit)
    assert found.proven
    assert found.cost_s == pytest.approx(best)
    assert found.lower_bound_s == pytest.approx(best)
    if found.choice is not None:
        assert r.problem.peak(found.choice) <= limit
        assert r.problem.time.of(found.choice, r.problem.base) == pytest.approx(best)


@examples(35)
@given(random_problems(), SHARES, st.sampled_from([1, 50, 500]), st.sampled_from([0, 10, 100]))
def test_where_little_is_enumerated_the_bounds_are_still_true(r: Random, share: float, room: int, checks: int) -> None:
    limit = limit_at(r, share)
    best = r.best(limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest, "NUMBERS", room)
        patch.setattr(rest, "CHECKS", checks)
        found, least = fastest_within(r.problem, limit), least_memory(r.problem)
    assert found.lower_bound_s <= best * (1 + 1e-8)
    assert found.cost_s >= best * (1 - 1e-8)
    assert least.lower_bound_bytes <= r.peaks.min() * (1 + 1e-8)
    assert least.bytes >= r.peaks.min()


@examples(35)
@given(random_problems())
def test_the_least_memory_is_that_of_exhaustive_search(r: Random) -> None:
    least = least_memory(r.problem)
    assert least.proven
    assert least.bytes == pytest.approx(r.peaks.min())
    assert r.problem.peak(least.best) == least.bytes


@examples(35)
@given(random_problems())
def test_a_limit_that_does_not_bind_has_no_price(r: Random) -> None:
    found = fastest_within(r.problem, float(r.peaks.max()))
    assert found.price == {}
    assert found.proven
    assert found.cost_s == pytest.approx(r.costs.min())


@examples(18)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=3, max_size=8), st.floats(0.1, 0.9))
def test_branches_alone_close_the_gap_of_a_knapsack(layers: list[tuple[int, int]], share: float) -> None:
    """Each layer either takes its memory or its time: multipliers alone leave what a part of a layer would gain."""
    time = {str(i): np.array([1.0, 1.0 + seconds]) for i, (seconds, _) in enumerate(layers)}
    taken = {str(i): np.array([1e9 * much, 0.0]) for i, (_, much) in enumerate(layers)}
    base, bytes_ = {name: np.zeros(2, np.int64) for name in time}, Costs(taken, {})
    limit = share * sum(float(of[0]) for of in taken.values())

    def peak(choice: Choice) -> float:
        return bytes_.of(choice, base)

    problem = Problem(Costs(time, {}), base, lambda _: bytes_, lambda choice: np.array([peak(choice)]), peak)
    choices = [dict(zip(time, picked, strict=True)) for picked in product((0, 1), repeat=len(time))]
    best = min(problem.cost(choice) for choice in choices if peak(choice) <= limit)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rest, "ENTRIES", 0)  # nothing is enumerated
        found = fastest_within(problem, limit)
    assert found.lower_bound_s <= best * (1 + 1e-9)
    assert best <= found.cost_s <= found.lower_bound_s * (1 + GAP) * (1 + 1e-9)


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


@examples(60)
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
