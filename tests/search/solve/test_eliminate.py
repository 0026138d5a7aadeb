"""Law 5: elimination = exhaustive search on small graphs, and the price of its strategy = the reported optimum."""

from __future__ import annotations

from itertools import combinations, pairwise, product

import networkx as nx
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerwise.cost.model import CostTables
from layerwise.search.solve.eliminate import (
    Factor,
    eliminate,
    eliminate_variables,
    join,
    min_fill_order,
    min_plus,
    sums_of,
)
from tests.examples import examples
from tests.search.tables import complete_tables, every_cost, random_tables, tables


@examples(70)
@given(random_tables())
def test_it_equals_exhaustive_search(t: CostTables) -> None:
    found, best = eliminate(t), every_cost(t).min()
    assert found.cost_s == pytest.approx(best)
    assert found.lower_bound_s == pytest.approx(best)
    assert found.proven
    strategy = {name: t.configs[name][i] for name, i in found.choice.items()}
    assert t.price(strategy) == pytest.approx(found.cost_s)


@examples(45)
@given(random_tables(nodes=9, most=2))
def test_the_order_is_one_of_node_and_edge_eliminations_to_a_fixed_point(t: CostTables) -> None:
    """Replayed on a graph (the paper's algorithm 1): a digraph merges parallel edges by itself."""
    found = eliminate(t)
    assert sorted(found.order) == sorted(t.node)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(t.node)
    graph.add_edges_from((u, v) for u, v, _ in t.transfer)
    for name in found.order[: len(found.order) - found.final_nodes]:
        (before,), (after,) = graph.predecessors(name), graph.successors(name)
        graph.remove_node(name)
        graph.add_edge(before, after)
    assert len(graph) == found.final_nodes
    assert not [name for name in graph if graph.in_degree(name) == graph.out_degree(name) == 1]


def test_graphs_that_are_not_series_parallel_keep_more_than_two_nodes_and_stay_exact() -> None:
    t = complete_tables(5, 4)
    found = eliminate(t)
    assert found.final_nodes == 5
    assert found.cost_s == pytest.approx(every_cost(t).min())


def test_a_chain_is_eliminated_from_its_source() -> None:
    t = tables({"a": 1, "b": 8, "c": 8, "d": 1}, [("a", "b", 0), ("b", "c", 0), ("c", "d", 0)], seed=1)
    assert eliminate(t).order[:2] == ("b", "c")  # the source has one configuration: vectors, not matrices


matrix_sizes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))


@given(matrix_sizes, st.integers(0, 2**32 - 1))
@example((70, 40, 50), 0)  # more than the cache holds
def test_min_plus_is_equation_2(sizes: tuple[int, int, int], seed: int) -> None:
    a, b = _matrices(sizes, seed)
    value, best = min_plus(a, b)
    sums = a[:, :, None] + b[None, :, :]
    assert (value == sums.min(1)).all()
    assert (np.take_along_axis(sums, best[:, None, :], 1)[:, 0] == value).all()


def _matrices(sizes: tuple[int, int, int], seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    return rng.random(sizes[:2]), rng.random(sizes[1:])


Problem = tuple[list[Factor], dict[str, int]]


@st.composite
def problems(draw: st.DrawFn) -> Problem:
    """Cost tables of one to three variables each."""
    sizes = {name: draw(st.integers(1, 3)) for name in "abcdef"[: draw(st.integers(1, 6))]}
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    scopes = draw(st.lists(st.lists(st.sampled_from(list(sizes)), min_size=1, max_size=3, unique=True), max_size=7))
    return [Factor(tuple(s), rng.random([sizes[name] for name in s])) for s in scopes], sizes


def cost(factors: list[Factor], choice: dict[str, int]) -> float:
    return sum(float(f.cost[tuple(choice[name] for name in f.scope)]) for f in factors)


def cheapest(factors: list[Factor], sizes: dict[str, int]) -> float:
    every = (dict(zip(sizes, values, strict=True)) for values in product(*map(range, sizes.values())))
    return min(cost(factors, choice) for choice in every)


@examples(60)
@given(problems(), st.randoms(use_true_random=False))
def test_any_order_finds_the_cheapest_choice(problem: Problem, random: object) -> None:
    factors, sizes = problem
    order = list(sizes)
    random.shuffle(order)  # type: ignore[attr-defined]
    choice, bound = eliminate_variables(factors, sizes, order, memory_bytes=2**20)
    assert cost(factors, choice) == pytest.approx(cheapest(factors, sizes))
    assert bound == pytest.approx(cheapest(factors, sizes))


@examples(60)
@given(problems(), st.integers(0, 1000))
def test_with_too_little_memory_the_optimum_lies_between_bound_and_choice(problem: Problem, memory: int) -> None:
    factors, sizes = problem
    choice, bound = eliminate_variables(factors, sizes, min_fill_order(sizes, [f.scope for f in factors]), memory)
    best = cheapest(factors, sizes)
    assert bound <= best * (1 + 1e-12)
    assert best <= cost(factors, choice) * (1 + 1e-12)
    for name, size in sizes.items():  # no change of one variable alone is an improvement
        assert all(cost(factors, choice | {name: i}) >= cost(factors, choice) * (1 - 1e-11) for i in range(size))
    assert sorted(choice) == sorted(sizes)


@examples(60)
@given(random_tables(nodes=8), st.integers(1, 2000))
def test_only_what_is_equal_to_its_bound_counts_as_proven(t: CostTables, memory: int) -> None:
    found, best = eliminate(t, memory_bytes=memory), every_cost(t).min()
    assert found.lower_bound_s <= best * (1 + 1e-12)
    assert found.cost_s >= best * (1 - 1e-12)
    assert found.proven == (found.cost_s <= found.lower_bound_s * (1 + 1e-9))
    assert not found.proven or found.cost_s == pytest.approx(best)


def test_what_does_not_fit_into_memory_is_not_proven_and_what_fits_is() -> None:
    t = complete_tables(7, 4)
    best = every_cost(t).min()
    little, enough = eliminate(t, memory_bytes=16 * 4**3), eliminate(t, memory_bytes=16 * 4**7)
    assert enough.proven
    assert enough.cost_s == pytest.approx(best)
    assert not little.proven
    assert 0.5 * best < little.lower_bound_s < best <= little.cost_s < 1.5 * best


def test_no_larger_table_is_made_than_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []

    def spy(factors: list[Factor], sizes: dict[str, int], last: str) -> Factor:
        made.append(join(factors, sizes, last).cost.nbytes)
        return join(factors, sizes, last)

    monkeypatch.setattr("layerwise.search.solve.eliminate.join", spy)
    for memory, largest in ((16 * 4**4, 4**4), (16 * 4**4 - 1, 4**3)):  # as much again is for a temporary
        made.clear()
        eliminate(complete_tables(7, 4), memory_bytes=memory)
        assert max(made) == 8 * largest


def test_min_fill_order_needs_no_larger_tables_than_the_width_of_the_graph() -> None:
    assert _largest(nx.balanced_tree(3, 3)) == 2
    assert _largest(nx.cycle_graph(9)) == 3
    assert _largest(nx.grid_2d_graph(3, 8)) == 4
    assert _largest(nx.complete_graph(6)) == 6


def _largest(graph: nx.Graph[str]) -> int:
    """Variables in the largest table of the elimination."""
    sizes = {str(name): 2 for name in graph}
    scopes = [(str(a), str(b)) for a, b in graph.edges]
    filled = nx.Graph(scopes)
    largest = 0
    for name in min_fill_order(sizes, scopes):
        around = list(filled[name])
        largest = max(largest, 1 + len(around))
        filled.add_edges_from((a, b) for a in around for b in around if a < b)
        filled.remove_node(name)
    return largest


def test_sums_are_counted_on_the_graph() -> None:
    """Of a chain of four those of pairs; where each is joined to each, those of all four."""
    sizes, names = dict.fromkeys("abcd", 3), "abcd"
    assert sums_of(sizes, pairwise(names)) == 3 * 9 + 3
    assert sums_of(sizes, combinations(names, 2)) == 81 + 27 + 9 + 3
