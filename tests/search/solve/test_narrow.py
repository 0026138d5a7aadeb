"""Tables that are exact only where an optimum is have the optima of exact tables, on random networks and machines."""

from __future__ import annotations

from dataclasses import replace
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.machine import DeviceGraph, load
from layerwise.partition.sharding import held_configurations
from layerwise.search.solve import narrow as module
from layerwise.search.solve.eliminate import eliminate
from layerwise.search.solve.narrow import (
    Configs,
    exact_costs,
    exact_optimum,
    narrow,
    raised,
    strategy_of,
)
from tests.cost import brute, networks
from tests.cost.test_transfer import as_stated, kinked
from tests.examples import examples
from tests.importers.networks import chain, crossing, dense, inception, residual

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
        narrowed = narrow(model, configs, [])
    best = eliminate(model.tables(configs)).cost_s
    small, found = exact_optimum(model, narrowed.tables, narrowed.upper_s, 2.0**31)
    assert found.cost_s == pytest.approx(best, rel=1e-12)
    assert sum(exact_costs(model, [strategy_of(small.configs, found.choice)])[0]) == pytest.approx(best, rel=1e-12)


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
        pytest.raises(
            LayerwiseError, match=r"4 devices need .*B for their tables, and here are 1.*B of memory: search"
        ),
    ):
        narrow(model, configs, [])
