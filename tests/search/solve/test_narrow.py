"""Tables that are exact only where an optimum is have the optima of exact tables, on random networks and machines."""

import itertools
from collections.abc import Callable
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions, CostTables
from layerwise.cost.price import complete
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph, load
from layerwise.partition.sharding import held_configurations
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.solve import narrow as module
from layerwise.search.solve.eliminate import eliminate
from layerwise.search.solve.narrow import (
    Configs,
    Messages,
    exact_optimum,
    narrow,
    raised,
    restrict,
    strategy_of,
)
from tests.cost import brute, networks
from tests.cost.test_transfer import as_stated, kinked
from tests.examples import examples
from tests.importers.networks import chain, crossing, dense, inception, residual
from tests.search.tables import complete_tables, every_strategy, random_tables, tables

SMALL = networks.windows() | networks.branches() | networks.sequences()
NETWORKS = [chain, residual, inception, dense, crossing]
BUILT = st.builds(lambda build, batch: fuse(build(batch)), st.sampled_from(NETWORKS), st.sampled_from([1, 4, 6]))


@st.composite
def machines(draw: st.DrawFn) -> DeviceGraph:
    """Up to three levels, links stated or measured, with collectives or messages alone."""
    graph: DeviceGraph = draw(brute.machines())
    measured = draw(st.sampled_from([None, as_stated, kinked]))
    graph = graph if measured is None else measured(graph)
    return replace(graph, collectives=draw(st.booleans()))


def drawn(model: CostModel, data: st.DataObject, most: int) -> Configs:
    """A few configurations of every layer, on any number of devices."""
    return {
        layer.name: (model.end_config(layer),)
        if layer.end
        else data.draw(brute.configs(layer.space, model.devices.count, most))
        for layer in model.graph.layers
    }


def same_optima(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """What is said of the optimum is what the strategy costs."""
    model = CostModel(network, graph, CostOptions(io=data.draw(st.sampled_from(["sample", "free"]))))
    configs = drawn(model, data, 8)
    few = data.draw(st.sampled_from([0, module.FEW]))  # with better bounds, and without
    with mock.patch.object(module, "FEW", few):
        left, upper_s = narrow(model, configs, [])
    best = eliminate(model.tables(configs)).cost_s
    small, found = exact_optimum(model, left, upper_s, 2.0**31)
    assert found.cost_s == pytest.approx(best, rel=1e-12)
    assert model.step_s(strategy_of(small.configs, found.choice)) == pytest.approx(best, rel=1e-12)


@given(SMALL, machines(), st.data())
@examples(8)
def test_optima_are_those_of_exact_tables(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    same_optima(network, graph, data)


@pytest.mark.slow
@given(SMALL | BUILT, machines(), st.data())
@examples(300)
def test_optima_are_those_of_exact_tables_on_many(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    same_optima(network, graph, data)


def test_a_bound_that_is_none_is_raised_to_what_the_pair_costs() -> None:
    """Also where a rack's uplink is shared by more devices than are watched."""
    model = CostModel(fuse(chain(8)), load("v100").device_graph(272))
    ends = Config(), Config.of({"n": 8}, "strided")
    inner = {layer.name: (ends[at % 2],) for at, layer in enumerate(model.graph.inner)}
    configs = {layer.name: inner.get(layer.name, (model.end_config(layer),)) for layer in model.graph.layers}
    full, bounds = model.tables(configs), model.tables(configs)
    for edge, cost in full.transfer.items():
        bounds.transfer[edge] = 0 * cost
    choice = dict.fromkeys(configs, 0)
    assert raised(model, bounds, choice)
    assert not raised(model, bounds, choice)
    assert all((bounds.transfer[edge] == cost).all() for edge, cost in full.transfer.items())


def test_transfers_are_raised_until_the_optimum_is_one_of_exact_tables() -> None:
    model, space = CostModel(fuse(residual(4)), load("v100").device_graph(4)), SearchSpace(4)
    configs = {
        layer.name: (model.end_config(layer),) if layer.end else held_configurations(layer, space)
        for layer in model.graph.layers
    }
    exact = model.tables(configs)
    best = eliminate(exact).cost_s
    nothing = replace(exact, transfer={edge: 0 * cost for edge, cost in exact.transfer.items()})
    assert eliminate(nothing).cost_s < best  # the bounds alone would tell another one
    assert exact_optimum(model, nothing, best, 2.0**31)[1].cost_s == pytest.approx(best, rel=1e-12)


def test_tables_that_memory_cannot_hold_are_refused_before_they_are_made() -> None:
    model, space = CostModel(fuse(residual(4)), load("v100").device_graph(4)), SearchSpace(4)
    configs = {
        layer.name: (model.end_config(layer),) if layer.end else held_configurations(layer, space)
        for layer in model.graph.layers
    }
    with (
        mock.patch.object(module, "memory_of_host", return_value=1000),
        mock.patch.object(model, "tables", side_effect=AssertionError),
        pytest.raises(LayerwiseError, match=r"on 4 devices need .*B, but this host has 1.*B of memory: search"),
    ):
        narrow(model, configs, [])


@examples(45)
@given(random_tables(nodes=5, most=4), st.floats(0, 0.5))
def test_whatever_is_part_of_a_strategy_within_the_bound_is_kept(t: CostTables, above: float) -> None:
    upper = eliminate(t).cost_s * (1 + above) + 1e-12
    keep = Messages(t.transfer, list(t.node)).bounds(t.node, 1).within(upper)
    for choice, cost in every_strategy(t).items():
        if cost <= upper:
            assert all(mask[i] for mask, i in zip(keep.values(), choice, strict=True))
    small = restrict(t, keep)
    assert eliminate(small).cost_s == pytest.approx(eliminate(t).cost_s)
    assert all(small.configs[name] == tuple(np.array(t.configs[name], object)[keep[name]]) for name in keep)


@examples(45)
@given(random_tables(nodes=5, most=4), st.integers(0, 4))
def test_messages_bound_every_strategy_by_each_of_its_configurations(t: CostTables, sweeps: int) -> None:
    bounds = Messages(t.transfer, list(t.node)).bounds(t.node, sweeps)
    for choice, cost in every_strategy(t).items():
        for name, i in zip(t.node, choice, strict=True):
            assert bounds.lower_s[name][i] <= cost * (1 + 1e-12) + 1e-12
    assert tuple(bounds.choice.values()) in every_strategy(t)


@given(st.integers(1, 5), st.integers(0, 2**32 - 1))
def test_messages_along_a_chain_are_exact(length: int, seed: int) -> None:
    names = [f"l{i}" for i in range(length)]
    t = tables(dict.fromkeys(names, 4), [(u, v, 0) for u, v in itertools.pairwise(names)], seed)
    costs = every_strategy(t)
    bounds = Messages(t.transfer, names).bounds(t.node, 1)
    for at, name in enumerate(names):
        best = [min(cost for choice, cost in costs.items() if choice[at] == i) for i in range(4)]
        assert bounds.lower_s[name] == pytest.approx(best)
    assert costs[tuple(bounds.choice.values())] == pytest.approx(min(costs.values()))


def test_messages_tighten_the_bound_where_it_is_not_exact() -> None:
    t = complete_tables(6, 4)
    best = eliminate(t).cost_s
    lower = [
        max(b.min() for b in Messages(t.transfer, list(t.node)).bounds(t.node, n).lower_s.values()) for n in (0, 4)
    ]
    assert lower[0] < 0.6 * best < 0.75 * best < lower[1] <= best


@pytest.mark.parametrize("rows", [1, 2, 3])
def test_some_rows_of_a_table_at_a_time_give_the_same_bounds(rows: int) -> None:
    t = complete_tables(5, 4)
    whole = Messages(t.transfer, list(t.node)).bounds(t.node, 2)
    with mock.patch.object(module, "CACHED", rows * 4):
        parts = Messages(t.transfer, list(t.node)).bounds(t.node, 2)
    assert parts.choice == whole.choice
    for name, lower_s in whole.lower_s.items():
        assert (parts.lower_s[name] == lower_s).all()


@pytest.mark.parametrize("network", [chain, residual, inception, dense, crossing])
@pytest.mark.parametrize(("devices", "batch"), [(4, 8), (6, 4), (8, 1)])
def test_the_search_over_pruned_tables_is_the_search_over_full_ones(
    network: Callable[[int], LayerGraph], devices: int, batch: int
) -> None:
    options = CostOptions(io="sample" if batch >= devices else "free")
    node = 2 if devices > 1 else 1
    model = CostModel(fuse(network(batch)), load("p100").device_graph(devices, node), options)
    space = SearchSpace(devices, spread=devices > 2)
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    configs = configurations(model, space, named)
    left, upper_s = narrow(model, configs, list(named.values()))
    best = eliminate(model.tables(configs)).cost_s
    last, found = exact_optimum(model, left, upper_s, 2.0**31)
    assert found.cost_s == pytest.approx(best, rel=1e-12)
    assert model.step_s(strategy_of(last.configs, found.choice)) == pytest.approx(best, rel=1e-12)
    assert best <= upper_s * (1 + 1e-12)
