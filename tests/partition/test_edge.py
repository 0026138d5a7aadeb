"""Which transfers are all-gathers: those that the runtime runs as such; and what they take."""

import random
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace
from layerwise.cost.collectives import all_gather_s, group_shape, reduce_scatter_s
from layerwise.cost.model import CostModel
from layerwise.cost.transfer import telling_devices
from layerwise.geometry import Box
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import Curve, DeviceGraph, Links, load
from layerwise.ops.facts import Parameter
from layerwise.ops.nn.conv import Conv
from layerwise.ops.tensor.pointwise import Unary
from layerwise.partition.edge import are_gathers
from layerwise.partition.groups import sharing
from layerwise.partition.moved import transfer
from layerwise.partition.place import data_parallel, place
from layerwise.partition.sharding import Sharding, held_configurations, may_shard, shardings, states_of
from layerwise.run.state.dtensors import placement
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
    ranks = [rank for rank in range(devices) if owned[rank] is not None or need[rank] is not None]
    return {transfer(tuple(owned), tuple(need), rank).pattern for rank in ranks}


@given(st.one_of(networks.windows(), networks.views(), networks.sequences()), brute.machines(), st.data())
@examples(25)
def test_as_the_runtime_decides(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """And what some devices see of them is a lower bound of what they take."""
    model = CostModel(network, replace(graph, collectives=True))
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count, 4)) for layer in network.layers}
    for edge in network.edges():
        us, vs = chosen[edge[0]], chosen[edge[1]]
        exact = model.edge_cost(edge, us, vs)
        assert (model.edge_cost(edge, us, vs, telling_devices(graph)) <= exact * 1.000001).all()
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
    """A 1 x 1 convolution, and one of stride 2, whose box leaves out the last row and column."""
    b = GraphBuilder("convolutions")
    b.input("x", TensorSpec((8, 16, 6, 6), ("n", "c", "h", "w")))
    networks.add(b, "first", networks.pointwise_conv(16, 2), ["x"])
    return b.finish([networks.add(b, "second", Conv(16, (1, 1), (2, 2), ((0, 0),) * 2, (1, 1)), ["first"])])


def costs(devices: DeviceGraph, source: Config, target: Config) -> float:
    return float(CostModel(convolutions(), devices).edge_cost(EDGE, (source,), (target,))[0, 0])


NEEDED = 8 * 16 * 5 * 5 * 4  # bytes of a whole batch: the box that strides of two reach, of six rows and columns


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


NETWORKS = st.one_of(networks.windows(), networks.views(), networks.sequences())
DEVICES = 6


@given(NETWORKS, st.data())
@examples(35)
def test_every_device_has_the_boxes_that_counting_says(network: LayerGraph, data: st.DataObject) -> None:
    for layer in network.inner:
        (config,) = data.draw(brute.configs(layer.space, DEVICES, 1))
        at = place(layer, config, DEVICES, "sample")
        expected = {device: (cell, own) for device, cell, own in brute.holdings(config, layer.space, DEVICES)}
        for device in range(DEVICES):
            cell, own = expected.get(device, (None, None))
            assert (at.computed.each[device], at.owned.each[device]) == (cell, own)
        for device, cell, own in brute.holdings(config, layer.space, DEVICES):
            for p in layer.space.parameters:
                assert at.holds(p).each[device] == brute.need(p.maps, own if p.epilogue else cell)


@given(NETWORKS, st.permutations(range(DEVICES)))
@examples(12)
def test_devices_in_another_order(network: LayerGraph, order: list[int]) -> None:
    """As a plan numbers its ranks."""
    layer = network.inner[-1]
    at = place(layer, data_parallel(layer, DEVICES), DEVICES, "sample")
    assert at.on(np.array(order)).computed.each == tuple(at.computed.each[device] for device in order)


def test_what_is_fed() -> None:
    """With io free all devices have all of it, else each its samples, as many devices as there are samples."""
    b = GraphBuilder("fed")
    b.input("x", TensorSpec((4, 3), ("n", "c")))
    layer = b.finish([networks.add(b, "first", Unary("relu"), ["x"])]).layers[0]
    assert layer.end
    assert data_parallel(layer, DEVICES) == Config.of({"n": 4})
    assert place(layer, data_parallel(layer, DEVICES), DEVICES, "free").everywhere
    rows = place(layer, data_parallel(layer, DEVICES), DEVICES, "sample").owned.each
    assert rows == (*(Box((i, 0), (i + 1, 3)) for i in range(4)), None, None)


def network(name: str) -> LayerGraph:
    return fuse(load_model(name, 8))


def of(graph: LayerGraph, layer: str, config: Config, devices: int, number: int = 0) -> Sharding | None:
    """Of one of a layer's parameters."""
    return shardings(graph[layer], graph[layer].own_parameters()[number][1], (config,), devices)[0]


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "mlp:12x8x6"])
def test_parts_fill_a_groups_box_and_are_a_dtensors(name: str) -> None:
    graph, chance, found = network(name), random.Random(0), 0
    for devices in (2, 3, 4, 6, 8, 12):
        space = SearchSpace(devices, dims=("n", "c", "h", "w", "k"), spread=True)
        for layer in graph.inner:
            configs = held_configurations(layer, space)
            for config in chance.sample(configs, min(len(configs), 3)):
                computed = place(layer, config, devices, "sample")
                for _, p in layer.own_parameters():
                    made = shardings(layer, p, (config,), devices)[0]
                    if made is not None:
                        found += 1
                        check(made, p, computed.holds(p).each, devices)
    assert found > 20


def check(made: Sharding, p: Parameter, computed: tuple, devices: int) -> None:
    held = made.boxes.each
    assert placement(held, p.shape, tuple(range(devices))) is not None
    for device in range(devices):
        group = sharing(computed, device)
        if not group:  # no part of the layer
            assert held[device] is None
            assert not made.rows[device]
            continue
        parts = [held[member] for member in group]
        assert len(group) == made.members == len(set(parts))
        assert all(part & computed[device] == part for part in parts)
        assert sum(part.volume for part in parts) == computed[device].volume
        assert [part.lo for part in parts] == sorted(part.lo for part in parts)
        assert made.rows[device] == max(part.volume for part in parts)
    assert made.total == made.members * made.rows.sum() >= sum(box.volume for box in computed if box)
    assert made.largest == made.members * made.rows.max()


def test_what_is_cut() -> None:
    """The dimension that the mesh can cut further, with the least to fill up."""
    graph = network("mlp:12x8x6")
    names = [layer.name for layer in graph.inner]
    wide, last = names[0], names[-1]

    def cut(layer: str, devices: int, number: int = 0, **degrees: int) -> int | None:
        made = of(graph, layer, Config.of(degrees), devices, number)
        return None if made is None else made.dimension

    assert cut(wide, 4, n=4) == 0  # 8 outputs x 12 inputs
    assert cut(wide, 3, n=3) == 1  # by 3 the inputs are cut into equal parts
    assert cut(wide, 4, n=2, c=2) == 1  # copies are outside of the cuts of dimension 0
    assert cut(wide, 4, 1, n=2, c=2) is None  # so a bias stays whole
    assert cut(wide, 4, c=2, k=2) is None  # nobody holds the same
    assert cut(last, 8, 1, n=8) is None  # 6 elements
    assert of(graph, last, Config.of({"n": 4}), 4, 1).boxes.volume.tolist() == [2, 1, 2, 1]
    assert of(graph, wide, Config.of({"n": 2}, "strided"), 4).boxes.volume.tolist() == [48, 0, 48, 0]


def test_where_states_mean_anything() -> None:
    graph = network("mlp:12x8x6")
    layer = graph.inner[0]
    assert may_shard(layer, Config.of({"n": 4}), 4)
    assert not may_shard(layer, Config.of({"c": 4}), 4)
    assert not may_shard(layer, Config(), 1)
    assert not may_shard(next(one for one in graph.layers if one.end), Config.of({"n": 4}), 4)
    assert states_of(layer, Config(states="gathered")) == "gathered"
