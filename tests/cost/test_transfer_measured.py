"""Transfers and collectives over measured links: by their curves, and as the analytic model says where these are it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.collectives import all_reduce_s, group_shape, overlap, reduce_scatter_s
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.simulate import timeline
from layerwise.cost.transfer import seconds, telling_devices, traffic
from layerwise.graph.layer import LayerGraph
from layerwise.machine import Curve, DeviceGraph, Links, Overlap
from tests.cost import brute, networks
from tests.cost.test_timeline import linear
from tests.examples import examples

NETWORKS = networks.windows() | networks.branches()
FAR = 1e12  # bytes, beyond any here


def as_stated(graph: DeviceGraph) -> DeviceGraph:
    """The same graph, as if its levels' alpha and beta had been measured."""
    curves = []
    for at, level in enumerate(graph.levels):
        alpha, beta = level.alpha_s, level.beta_s_per_byte
        knots = ((1e-3, alpha), (FAR, alpha + beta * FAR))
        curves.append(Curve("exchange", (*(1,) * at, 2), 1, knots, alpha))
    return replace(graph, links=Links(tuple(curves)))


def kinked(graph: DeviceGraph) -> DeviceGraph:
    """Small messages for their latency alone, large ones at a quarter of the bandwidth."""
    curves = tuple(
        Curve("exchange", (*(1,) * at, 2), 2, ((8.0, 1e-5), (64.0, 2e-5), (128.0, 9e-5)), 1e-6)
        for at in range(len(graph.levels))
    )
    return replace(graph, links=Links(curves))


def costs(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """What some devices see is a bound of what all do, and that is what the ports' loads take."""
    model = CostModel(network, graph)
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count)) for layer in network.layers}
    for edge in network.edges():
        ends = chosen[edge[0]], chosen[edge[1]]
        exact = model.edge_cost(edge, *ends)
        found = model.directions(edge) * seconds(traffic(model.edge(edge, *ends), graph), graph, "port")
        np.testing.assert_allclose(exact, found, atol=1e-15)
        assert (model.edge_cost(edge, *ends, telling_devices(graph)) <= exact * (1 + 1e-9)).all()


@given(NETWORKS, brute.machines(), st.data())
@examples(25)
def test_ports_loads_and_bounds_agree_on_a_curve_with_kinks(
    network: LayerGraph, graph: DeviceGraph, data: st.DataObject
) -> None:
    costs(network, kinked(graph), data)


@given(NETWORKS, st.sampled_from([(4,), (6,)]), st.data())
@examples(25)
def test_a_measured_line_is_the_analytic_one(network: LayerGraph, sizes: tuple[int, ...], data: st.DataObject) -> None:
    graph = brute.machine(sizes)
    plain, measured = CostModel(network, graph), CostModel(network, as_stated(graph))
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count)) for layer in network.layers}
    for edge in network.edges():
        ends = chosen[edge[0]], chosen[edge[1]]
        np.testing.assert_allclose(measured.edge_cost(edge, *ends), plain.edge_cost(edge, *ends), rtol=1e-6, atol=1e-15)


def test_collectives_of_a_measured_shape_and_of_others() -> None:
    """Pairs in nodes of four were measured, alone at a port and two at once; fours were not."""
    graph = brute.machine((4, 8), (1, 4))
    curve = Curve("all_reduce", (1, 2), 2, ((1.0, 1.0), (101.0, 2.0)))
    measured = replace(graph, links=Links((curve, replace(curve, operation="reduce_scatter", load=4))))
    two = group_shape(np.array([0, 1, -1, -1, 0, 1, -1, -1]), graph)
    four = group_shape(np.array([0, 1, 2, 3, 0, 1, 2, 3]), graph)
    all_of_them = group_shape(np.zeros(8, np.int64), graph)
    assert all_reduce_s(51.0, two, measured) == pytest.approx(1.5)
    assert all_reduce_s(0.0, two, measured) == 0.0
    assert all_reduce_s(51.0, four, measured) == all_reduce_s(51.0, four, graph)  # four at once are more than two
    assert reduce_scatter_s(201.0, four, measured) == pytest.approx(3.0)
    assert all_reduce_s(51.0, all_of_them, measured) == all_reduce_s(51.0, all_of_them, graph)


def test_the_step_has_the_overlap_that_was_measured() -> None:
    """Sums beside computation: as if alone, one after the other, and between."""
    network = linear(64, 3000, 4000, 3500)
    config = Config.of({"n": 4})
    strategy = {"linear0": config, "linear1": config}
    graph = brute.machine((4,))
    size = 2 * 4 * 3000 * 4000
    curve = Curve("all_reduce", (4,), 1, ((1.0, 1e-4), (float(size), 1e-4 + size * 1e-9)))

    def found(compute: float, sync: float) -> float:
        links = Links((curve,), (Overlap((4,), 1, compute, sync),))
        return timeline(CostModel(network, replace(graph, links=links)), strategy).total_s

    model = CostModel(network, replace(graph, links=Links((curve,))))
    both = [model.node_cost(network[name], (config,)).compute for name in strategy]
    computed = sum(float(c.total[0]) for c in both)
    group = group_shape(np.zeros(4, np.int64), graph)
    sums = [all_reduce_s(4.0 * a * b, group, model.devices) for a, b in ((4000, 3500), (3000, 4000))]
    assert overlap(group, graph) == Overlap((4,), 1, 1.0, 1.0)
    assert found(1.0, 1.0) == pytest.approx(timeline(model, strategy).total_s)
    hidden = float(both[0].backward[0])
    assert sums[0] > hidden
    assert found(1.0, 1.0) == pytest.approx(computed + sum(sums) - hidden)
    assert found(0.5, 0.5) == pytest.approx(computed + sum(sums))
    assert found(1.0, 1.0) < found(0.8, 0.8) < found(0.5, 0.5)
