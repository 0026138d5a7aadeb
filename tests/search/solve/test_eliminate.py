"""Law 5: elimination = exhaustive search on small graphs, and the price of its strategy = the reported optimum."""

from __future__ import annotations

from collections.abc import Callable

import networkx as nx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostTables
from layerwise.cost.price import complete, price
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.machine import load
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.find import configurations
from layerwise.search.solve.eliminate import eliminate, min_plus
from tests.examples import examples
from tests.importers.networks import chain, crossing, inception, residual
from tests.search.exhaustive import exhaustive
from tests.search.tables import complete_tables, random_tables, tables


@examples(120)
@given(random_tables())
def test_it_equals_exhaustive_search(t: CostTables) -> None:
    found, best = eliminate(t), exhaustive(t)
    assert found.cost_s == pytest.approx(best.cost_s)
    assert found.lower_bound_s == pytest.approx(best.cost_s)
    assert found.proven
    strategy = {name: t.configs[name][i] for name, i in found.choice.items()}
    assert t.price(strategy) == pytest.approx(found.cost_s)


@examples(80)
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
    assert found.cost_s == pytest.approx(exhaustive(t).cost_s)


def test_a_chain_is_eliminated_from_its_source() -> None:
    t = tables({"a": 1, "b": 8, "c": 8, "d": 1}, [("a", "b", 0), ("b", "c", 0), ("c", "d", 0)], seed=1)
    assert eliminate(t).order[:2] == ("b", "c")  # the source has one configuration: vectors, not matrices


matrix_sizes = st.tuples(st.integers(1, 12), st.integers(1, 12), st.integers(1, 12))


@given(matrix_sizes, st.integers(0, 2**32 - 1))
def test_min_plus_is_equation_2(sizes: tuple[int, int, int], seed: int) -> None:
    a, b = _matrices(sizes, seed)
    value, best = min_plus(a, b)
    sums = a[:, :, None] + b[None, :, :]
    assert (value == sums.min(1)).all()
    assert (np.take_along_axis(sums, best[:, None, :], 1)[:, 0] == value).all()


def test_min_plus_of_more_than_the_cache_holds() -> None:
    a, b = _matrices((70, 40, 50), 0)
    assert (min_plus(a, b)[0] == (a[:, :, None] + b[None, :, :]).min(1)).all()


def _matrices(sizes: tuple[int, int, int], seed: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    rng = np.random.default_rng(seed)
    return rng.random(sizes[:2]), rng.random(sizes[1:])


@pytest.mark.parametrize("network", [chain, residual, inception, crossing])
@pytest.mark.parametrize("devices", [4, 6])
def test_the_price_of_a_real_networks_strategy_is_the_optimum_and_no_baseline_is_cheaper(
    network: Callable[[int], LayerGraph], devices: int
) -> None:
    model = CostModel(fuse(network(8)), load("p100").device_graph(devices, 2))
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    t = model.tables(configurations(model, SearchSpace(devices, spread=True), named, {}))
    found = eliminate(t)
    strategy = {name: t.configs[name][i] for name, i in found.choice.items()}
    assert price(model, strategy).step_time_s == pytest.approx(found.cost_s)
    assert found.proven
    for baseline_strategy in named.values():
        assert found.cost_s <= price(model, baseline_strategy).step_time_s * (1 + 1e-12)
