"""Law: under any limit, bounds are at most the least of exhaustive search, and what is found fits."""

from collections.abc import Iterator
from itertools import combinations, product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.cost.additive import Choice, Costs, Moved
from layerwise.geometry.arrays import Floats
from layerwise.search.priced.limited import fastest_within
from layerwise.search.priced.moves import Together, lightest
from layerwise.search.priced.prices import Minimise, Problem, by_elimination, by_messages, least_rows, simplex
from tests.examples import examples
from tests.search.problems import Random, random_problems

SHARES = st.floats(-0.1, 1.1)  # of the way from the least memory to that of the fastest choice
EXACTLY = by_elimination(2.0**31)


def limit_at(r: Random, share: float) -> float:
    least, fastest = float(r.peaks.min()), float(r.peaks[r.costs.argmin()])
    return least + share * max(fastest - least, 1e8)


def together(problem: Problem) -> Together:
    """Layers with as many variants are taken for equal: a move of these together is a move like others."""

    def moves(choice: Choice) -> Iterator[Moved]:
        sizes = {name: len(base) for name, base in problem.base.items()}
        for alike in {(sizes[name], now) for name, now in choice.items()}:
            names = [name for name, now in choice.items() if (sizes[name], now) == alike]
            yield dict.fromkeys(names, np.arange(alike[0]))

    return moves


@examples(80)
@given(random_problems(), SHARES, st.sampled_from([EXACTLY, by_messages]))
def test_bounds_are_those_of_exhaustive_search(r: Random, share: float, minimise: Minimise) -> None:
    """Where nothing is found nothing may fit, where it is proven that nothing does nothing does."""
    limit = limit_at(r, share)
    best = r.best(limit)
    seen, _, bound = fastest_within(r.problem, limit, minimise, together(r.problem))
    assert bound <= best * (1 + 1e-8)
    assert seen.cost >= best * (1 - 1e-8)
    if seen.best is not None:
        assert r.problem.peak(seen.best) <= limit
        assert r.problem.cost(seen.best) == pytest.approx(seen.cost)


@examples(60)
@given(random_problems(nodes=4, above=0.0), SHARES)
def test_where_rows_are_peaks_it_is_exhaustive_search(r: Random, share: float) -> None:
    limit = limit_at(r, share)
    best = r.best(limit)
    seen, _, bound = fastest_within(r.problem, limit, EXACTLY, together(r.problem))
    assert seen.cost == pytest.approx(best, rel=0.005)
    assert seen.cost <= bound * 1.005 or np.isinf(best)


@examples(35)
@given(random_problems())
def test_bytes_alone_bound_the_least_memory(r: Random) -> None:
    game = least_rows(r.problem, EXACTLY)
    best, size = lightest(r.problem, together(r.problem), [met.choice for met in game.met])
    assert game.bound <= r.peaks.min() * (1 + 1e-8)
    assert size == r.problem.peak(best) >= r.peaks.min()


@examples(35)
@given(random_problems())
def test_a_limit_that_does_not_bind_has_no_price(r: Random) -> None:
    seen, prices, bound = fastest_within(r.problem, float(r.peaks.max()), EXACTLY, together(r.problem))
    assert prices.price == {}
    assert seen.cost == pytest.approx(r.costs.min()) == bound


@examples(18)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 30)), min_size=3, max_size=8), st.floats(0.1, 0.9))
def test_cases_close_the_gap_of_a_knapsack(layers: list[tuple[int, int]], share: float) -> None:
    """Each layer either takes its memory or its time: prices alone leave what a part of a layer would gain."""
    time = {str(i): np.array([1.0, 1.0 + seconds]) for i, (seconds, _) in enumerate(layers)}
    taken = {str(i): np.array([1e9 * much, 0.0]) for i, (_, much) in enumerate(layers)}
    base, bytes_ = {name: np.zeros(2, np.int64) for name in time}, Costs(taken, {})
    limit = share * sum(float(of[0]) for of in taken.values())

    def peak(choice: Choice) -> float:
        return bytes_.of(choice, base)

    problem = Problem(
        Costs(time, {}),
        base,
        lambda _: bytes_,
        lambda choice: np.array([peak(choice)]),
        lambda choice, move: bytes_.change(choice, move, base, dict.fromkeys(base, ()))[:, None],
        peak,
    )
    choices = [dict(zip(time, picked, strict=True)) for picked in product((0, 1), repeat=len(time))]
    best = min(problem.cost(choice) for choice in choices if peak(choice) <= limit)
    seen, _, bound = fastest_within(problem, limit, EXACTLY, together(problem))
    assert bound <= best * (1 + 1e-9)
    assert best <= seen.cost <= bound * 1.02


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
