"""Which transfers are all-gathers: those that the runtime runs as such; and what they take."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.collectives import all_gather_s, group_shape, reduce_scatter_s
from layerwise.cost.model import CostModel
from layerwise.cost.transfer import telling_devices
from layerwise.geometry import Box, numbering
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import LayerGraph
from layerwise.machine import Curve, DeviceGraph, Links, load
from layerwise.ops.nn.conv import Conv
from layerwise.partition.edge import are_gathers
from layerwise.partition.moved import transfer
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

EDGE = ("first", "second", 0)


def patterns(network: LayerGraph, edge: tuple[str, str, int], u: Config, v: Config, devices: int) -> set[str]:
    """How the runtime's ranks that take part move an edge's tensor."""
    source, target = network[edge[0]], network[edge[1]]
    maps, epilogue = brute.input_of(target, edge[2])
    owned: list[Box | None] = [None] * devices
    need: list[Box | None] = [None] * devices
    for device, _, own in brute.holdings(u, source.space, devices):
        owned[device] = own
    for device, cell, own in brute.holdings(v, target.space, devices):
        need[device] = brute.need(maps, own if epilogue else cell)
    if transfer(tuple(owned), tuple(need), 0).pattern != "local":
        counted = numbering(source.out.shape, brute.lattices_of(target, edge[2]))
        owned, need = ([box and brute.need(counted, box) for box in boxes] for boxes in (owned, need))
    ranks = [rank for rank in range(devices) if owned[rank] is not None or need[rank] is not None]
    return {transfer(tuple(owned), tuple(need), rank).pattern for rank in ranks}


@given(st.one_of(networks.windows(), networks.views(), networks.sequences()), brute.machines(), st.data())
@examples(40)
def test_as_the_runtime_decides(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    model = CostModel(network, graph)
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count, 4)) for layer in network.layers}
    for edge in network.edges():
        us, vs = chosen[edge[0]], chosen[edge[1]]
        if network[edge[0]].out.shape:
            found = are_gathers(model.edge(edge, us, vs))
            for i, u in enumerate(us):
                for j, v in enumerate(vs):
                    assert found[i, j] == (patterns(network, edge, u, v, graph.count) == {"gather"}), (edge, u, v)


@pytest.mark.parametrize("source", [{"h": 2, "w": 2}, {"c": 4}, {"n": 2, "h": 2}, {"n": 4}], ids=str)
@pytest.mark.parametrize("target", [{"h": 2, "w": 2}, {"c": 2, "h": 2}, {"n": 2, "h": 2}, {"n": 4}], ids=str)
def test_cells_that_need_the_same_box(source: dict[str, int], target: dict[str, int]) -> None:
    """Every pixel of 3 x 3 windows on 2 x 2 pixels needs them all: one group, as the runtime has it."""
    b = GraphBuilder("convolutions")
    b.input("x", TensorSpec((8, 16, 2, 2), ("n", "c", "h", "w")))
    networks.add(b, "first", networks.pointwise_conv(16, 2), ["x"])
    whole = networks.add(b, "second", Conv(16, (3, 3), (1, 1), ((1, 1),) * 2, (1, 1)), ["first"])
    network, graph, u, v = b.finish([whole]), load("v100").device_graph(4), Config.of(source), Config.of(target)
    found = are_gathers(CostModel(network, graph).edge(EDGE, (u,), (v,)))
    assert found.item() == (patterns(network, EDGE, u, v, 4) == {"gather"})


@cache
def convolutions() -> LayerGraph:
    """A 1 x 1 convolution, and one of stride 2, which does not read the last row and column."""
    b = GraphBuilder("convolutions")
    b.input("x", TensorSpec((8, 16, 6, 6), ("n", "c", "h", "w")))
    networks.add(b, "first", networks.pointwise_conv(16, 2), ["x"])
    return b.finish([networks.add(b, "second", Conv(16, (1, 1), (2, 2), ((0, 0),) * 2, (1, 1)), ["first"])])


def costs(devices: DeviceGraph, source: Config, target: Config) -> float:
    return float(CostModel(convolutions(), devices).edge_cost(EDGE, (source,), (target,))[0, 0])


NEEDED = 8 * 16 * 3 * 3 * 4  # bytes of a whole batch, of every second row and column


@pytest.mark.parametrize(
    ("config", "row", "size"),
    [
        (Config.of({"c": 8}), [0] * 8, NEEDED),
        (Config.of({"n": 2, "c": 4}), [0] * 4 + [1] * 4, NEEDED / 2),  # groups of a node
        (Config.of({"n": 4, "c": 2}), [0, 0, 1, 1, 2, 2, 3, 3], NEEDED / 4),
    ],
    ids=str,
)
def test_priced_as_a_collective(config: Config, row: list[int], size: float) -> None:
    graph = load("v100").device_graph(8)
    group = group_shape(np.array(row), graph)
    expected = all_gather_s(size, group, graph) + reduce_scatter_s(size, group, graph)
    assert costs(graph, config, config) == pytest.approx(expected)


def test_gloo_sends_messages() -> None:
    config, nccl = Config.of({"c": 8}), load("v100").device_graph(8)
    gloo = replace(nccl, collectives=False)
    assert costs(gloo, config, config) > 1.1 * costs(nccl, config, config)  # two V100 share a NIC
    halves = Config.of({"n": 4}), Config.of({"n": 8})
    assert costs(gloo, *halves) == costs(nccl, *halves) > 0


def test_unequal_parts_are_messages() -> None:
    nccl = load("v100").device_graph(8)
    config = Config.of({"c": 3})
    assert costs(nccl, config, config) == costs(replace(nccl, collectives=False), config, config) > 0


def test_as_measured() -> None:
    """Each way by its own curve."""
    knots = {"all_gather": 1.0, "reduce_scatter": 2.0}
    curves = tuple(Curve(name, (8,), 1, ((1.0, s), (1e9, s + 1e-6))) for name, s in knots.items())  # type: ignore[arg-type]
    graph = load("h100").device_graph(8)
    config = Config.of({"c": 8})
    assert costs(replace(graph, links=Links(curves)), config, config) == pytest.approx(3.0, rel=1e-6)


@given(networks.windows(), brute.machines(), st.data())
@examples(30)
def test_some_devices_give_a_lower_bound(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    model = CostModel(network, replace(graph, collectives=True))
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count, 4)) for layer in network.layers}
    for edge in network.edges():
        exact = model.edge_cost(edge, chosen[edge[0]], chosen[edge[1]])
        assert (
            model.edge_cost(edge, chosen[edge[0]], chosen[edge[1]], telling_devices(graph)) <= exact * 1.000001
        ).all()
