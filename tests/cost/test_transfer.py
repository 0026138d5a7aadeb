"""Bytes, messages and ports of transfers against an ownership count of every element."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import isclose

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost import transfer
from layerwise.cost.compute.measured import COPY
from layerwise.cost.model import CostModel
from layerwise.cost.transfer import Traffic, busiest_device, port_seconds, seconds, telling_devices, traffic
from layerwise.geometry import AxisMap, fixed, identity, scaled, whole, window
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import DeviceGraph, load
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.ops.facts import Dim, Maps, Space
from layerwise.ops.tensor.view import Expand, Reshape
from layerwise.partition.edge import Edge
from layerwise.partition.layout import layout
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

COPIES = LayerTimes(
    Conditions("device", "2.13.0", "float32", threads=1), cells={COPY: {(100,): CellTime(1.0, 2.0, 0.1, 9)}}
)
MANY, SOME = examples(100), examples(30)  # 360 cases in all, of several edges each


def check(found: Traffic, table: brute.Table, item_bytes: int, graph: DeviceGraph) -> None:
    """One pair of configurations: `found` against the elements that each device needs of each."""
    apart = table * ~np.eye(graph.count, dtype=bool)
    devices = np.arange(graph.count)
    between = np.asarray(graph.level_between(devices[:, None], devices[None, :]))
    assert found.received_bytes == apart.sum(1).max() * item_bytes
    assert found.total_bytes.tolist() == [apart[between == i].sum() * item_bytes for i in range(len(graph.levels))]
    slowest = 0.0
    for at, ports in enumerate(brute.ports(table, item_bytes, graph)):
        worst = max(cost for *_, cost in ports)
        busiest = [(size, count) for size, count, cost in ports if isclose(cost, worst)]
        assert any(found.bytes[at] == size and isclose(found.messages[at], count) for size, count in busiest)
        slowest = max(slowest, worst)
    assert isclose(seconds(found, graph, "port"), slowest)
    paper = sum(apart[between == i].sum() * item_bytes * level.beta_s_per_byte for i, level in enumerate(graph.levels))
    assert isclose(seconds(found, graph, "sum"), paper)


def _pair(found: Traffic, i: int, j: int) -> Traffic:
    return Traffic(found.bytes[i, j], found.messages[i, j], found.total_bytes[i, j], found.received_bytes[i, j])


def check_network(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """All edges of a network, each under a few configurations of both ends at once.

    Where something travels, what a device keeps is copied: where that was measured, at a time each way.
    """
    model, copying = CostModel(network, graph), CostModel(network, replace(graph, layers=(COPIES,)))
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count)) for layer in network.layers}
    for edge in network.edges():
        source, target = network[edge[0]], network[edge[1]]
        found = traffic(model.edge(edge, chosen[edge[0]], chosen[edge[1]]), graph)
        exact = model.edge_cost(edge, chosen[edge[0]], chosen[edge[1]])
        expected = model.directions(edge) * seconds(found, graph, "port")
        if edge[0] in network.unfed:
            expected[[u.total == 1 for u in chosen[edge[0]]]] = 0.0  # computed everywhere
        np.testing.assert_allclose(exact, expected)
        quick = model.edge_cost(edge, chosen[edge[0]], chosen[edge[1]], telling_devices(graph))
        assert (quick <= exact * (1 + 1e-9)).all()
        copied = copying.edge_cost(edge, chosen[edge[0]], chosen[edge[1]])
        quick = copying.edge_cost(edge, chosen[edge[0]], chosen[edge[1]], telling_devices(graph))
        assert (quick <= copied * (1 + 1e-9)).all()
        for i, u in enumerate(chosen[edge[0]]):
            for j, v in enumerate(chosen[edge[1]]):
                if any(name in network.unfed and c.total == 1 for name, c in zip(edge[:2], (u, v), strict=True)):
                    continue
                ends = (source.space, u, target.space, *brute.input_of(target, edge[2]), v, graph.count)
                lattices = brute.lattices_of(target, edge[2])
                table = brute.exchanged(*ends, lattices)
                assert i or j or (brute.by_pieces(*ends, lattices) == table).all()
                check(_pair(found, i, j), table, source.out.item_bytes, graph)
                a_byte = (0.0, 0.01, 0.03)[model.directions(edge)] if exact[i, j] > 0 else 0.0
                assert isclose(copied[i, j], exact[i, j] + table.diagonal().max() * source.out.item_bytes * a_byte)


@given(networks.windows(), brute.machines(), st.data())
@MANY
def test_halos(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    check_network(network, graph, data)


@given(networks.views(), brute.machines(), st.data())
@MANY
def test_views(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    check_network(network, graph, data)


def test_a_batch_of_one_is_squeezed() -> None:
    b = GraphBuilder("squeezed")
    x = b.input("x", TensorSpec((1, 2, 3), ("n", "c", "l")))
    for i, shape in enumerate(((1, 1, 2, 3), (1, 2, 3))):
        x = networks.add(b, f"view{i}", Expand(shape) if i == 0 else Reshape(shape), [x])
    network = b.finish([x])
    assert all(networks.one_to_one(maps) for layer in network.layers for maps in layer.space.needs)


@given(networks.branches(), brute.machines(), st.data())
@SOME
def test_concats_and_followers(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    check_network(network, graph, data)


@given(networks.sequences(), brute.machines(), st.data())
@SOME
def test_tied_parameters_attention_and_scalars(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    check_network(network, graph, data)


@st.composite
def dims(draw: st.DrawFn, labels: str) -> tuple[Dim, ...]:
    """Dimensions of any extents and units, under some of these labels or none."""
    found = []
    for label in labels[: draw(st.integers(0, len(labels)))]:
        unit = draw(st.sampled_from([1, 1, 2, 3]))
        found.append(Dim(draw(st.sampled_from([label, label, None])), unit * draw(st.integers(1, 5)), unit))
    return tuple(draw(st.permutations(found)))


@st.composite
def axis_maps(draw: st.DrawFn, extents: tuple[int, ...], over: tuple[Dim, ...], usable: int) -> Maps:
    """Each dimension of a tensor is driven by another of `over`'s first `usable`, in any way, or by none."""
    free = list(range(usable))
    found: list[AxisMap] = []
    small = st.integers(-3, 3)
    for extent in extents:
        kind = draw(st.integers(0, 5))
        if kind == 0 or not free:
            found.append(draw(st.sampled_from([whole(extent), fixed(extent, extent - 1)])))
            continue
        source = free.pop(draw(st.integers(0, len(free) - 1)))
        size = over[source].extent
        if kind == 1 and size == extent:
            found.append(identity(extent, source))
        elif kind == 2:
            found.append(scaled(size, extent, source, over=draw(st.integers(1, 3)), scale=draw(st.integers(1, 3))))
        else:  # also windows that miss the tensor altogether
            stride, divisor = draw(st.integers(1, 3)), draw(st.integers(1, 3))
            found.append(window(size, extent, source, stride=stride, first=draw(small), last=draw(small), over=divisor))
    return tuple(found)


@given(dims("nchw"), dims("nsc"), st.booleans(), brute.machines(), st.data())
@MANY
def test_any_maps(
    held: tuple[Dim, ...], out: tuple[Dim, ...], reduced: bool, graph: DeviceGraph, data: st.DataObject
) -> None:
    """Of any tensor to any iteration space, also such as no operator has."""
    dtype = data.draw(st.sampled_from(["float32", "int64", "bool"]))
    source, result = (_spec(d, dtype) for d in (held, out))
    over = (*out, Dim("k", data.draw(st.integers(1, 6)))) if reduced else out
    epilogue = reduced and data.draw(st.booleans())
    maps = data.draw(axis_maps(source.shape, over, len(out) if epilogue or not out else len(over)))
    target = Space(result, over, (maps,), (), (epilogue,))
    held_by = brute.plain(source)
    us, vs = (data.draw(brute.configs(where, graph.count)) for where in (held_by, target))

    def edge(us: Sequence[Config], vs: Sequence[Config]) -> Edge:
        owners, needers = layout(us, held_by, graph.count).owned, layout(vs, target, graph.count).at(epilogue)
        return Edge.of(source, owners, maps, over, needers)

    found = traffic(edge(us, vs), graph)
    exact = port_seconds(edge(us, vs), graph)
    np.testing.assert_allclose(exact, seconds(found, graph, "port"))
    few = tuple(sorted(data.draw(st.sets(st.integers(0, graph.count - 1), min_size=1))))
    assert (port_seconds(edge(us, vs), graph, few) <= exact * (1 + 1e-9)).all()
    for i, j in np.ndindex(len(us), len(vs)):
        table = brute.exchanged(held_by, us[i], target, maps, epilogue, vs[j], graph.count)
        device = busiest_device(edge(us[i : i + 1], vs[j : j + 1]), graph)
        loads = brute.ports(table, source.item_bytes, graph)
        doors = [list(graph.port(at)) for at in range(len(loads))]
        behind = [loads[at][way + ports[device]][2] for at, ports in enumerate(doors) for way in (0, max(ports) + 1)]
        assert isclose(max(behind), exact[i, j])
        check(_pair(found, i, j), table, source.item_bytes, graph)


def _spec(dims: tuple[Dim, ...], dtype: str) -> TensorSpec:
    return TensorSpec(tuple(d.extent for d in dims), tuple(d.label for d in dims), dtype, tuple(d.unit for d in dims))


@pytest.mark.parametrize("chunk", [1, 300, 10_000])
@pytest.mark.parametrize("sizes", [(3, 6), (2, 4, 6)])
def test_all_pairs_at_once_are_each_pair_by_itself(
    chunk: int, sizes: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the size of the pieces that the pairs are worked off in."""
    source = TensorSpec((4, 6, 5), ("n", "c", "l"))
    out = TensorSpec((4, 4, 3), ("n", "c", "l"))
    over = (*brute.plain(out).dims, Dim("k", 6))
    maps = (identity(4, 0), identity(6, 3), window(3, 5, 2, stride=2, first=-1, last=1))
    target = Space(out, over, (maps,), (), (False,))
    graph = brute.machine(sizes)
    us, vs = (brute.legal(where.dims, graph.count) for where in (brute.plain(source), target))
    monkeypatch.setattr(transfer, "CHUNK", chunk)
    u, v = layout(us, brute.plain(source), 6).owned, layout(vs, target, 6).computed
    at_once = traffic(Edge.of(source, u, maps, over, v), graph)
    monkeypatch.undo()
    assert len(us) > 20
    assert len(vs) > 40
    for i in range(0, len(us), 7):
        u = layout((us[i],), brute.plain(source), 6).owned
        for j, config in enumerate(vs):
            single = traffic(Edge.of(source, u, maps, over, layout((config,), target, 6).computed), graph)
            for name in ("bytes", "messages", "total_bytes", "received_bytes"):
                assert (getattr(at_once, name)[i, j] == getattr(single, name)[0, 0]).all(), (name, us[i], config)


@pytest.mark.parametrize(
    ("shortcut", "times"),
    [("layer2.0.downsample.0", 3.86), ("layer3.0.downsample.0", 3.72), ("layer4.0.downsample.0", 3.45)],
)
def test_shortcuts_get_a_quarter_of_their_boxes(shortcut: str, times: float) -> None:
    """ResNet-50's, from space to samples: of 7 x 7 positions in a box of 13 x 13 the last one."""
    network = fuse(load_model("resnet50", 64))
    model, layer = CostModel(network, load("v100").device_graph(16)), network[shortcut]
    name, u, v = (layer.inputs[0], shortcut, 0), (Config.of({"h": 4, "w": 4}),), (Config.of({"n": 16}),)
    edge, boxes = model.edge(name, u, v), layer.space.needs[0]
    whole = Edge.of(layer.specs[0], edge.owners, boxes, layer.space.dims, edge.needers)
    packed, box = (traffic(one, model.devices).total_bytes.sum() for one in (edge, whole))
    assert packed == 64 * layer.specs[0].shape[1] * layer.out.shape[2] ** 2 * 15 / 16 * 4
    assert box / packed == pytest.approx(times, abs=0.01)


@pytest.mark.parametrize(
    ("u", "v"),
    [
        ({"n": 4, "h": 35}, {"c": 2, "h": 70}),
        ({"h": 140}, {"n": 4, "c": 5, "h": 7}),
        ({"n": 3}, {"h": 137}),
    ],
)
def test_racks_of_which_the_last_is_short(u: dict[str, int], v: dict[str, int]) -> None:
    """140 GPUs of ParaDL's cluster: 35 nodes of 4 with two ports each, a rack of 136 and one of 4."""
    graph = load("v100").device_graph(140)
    assert [level.devices for level in graph.levels] == [4, 136, 140]
    spec = TensorSpec((4, 6, 140), ("n", "c", "h"))
    where, maps = brute.plain(spec), (identity(4, 0), whole(6), window(140, 140, 2, first=-1, last=1))
    ends = Config.of(u), Config.of(v)
    one, other = (layout((config,), where, 140) for config in ends)
    found = traffic(Edge.of(spec, one.owned, maps, where.dims, other.computed), graph)
    check(_pair(found, 0, 0), brute.exchanged(where, ends[0], where, maps, False, ends[1], 140), 4, graph)
