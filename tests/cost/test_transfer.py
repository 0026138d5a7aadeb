"""Transfers cost what every element says: of all pairs of configurations at once, by measured curves, and summed up."""

from collections.abc import Sequence
from dataclasses import replace
from math import isclose
from unittest import mock

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.collectives import all_reduce_s, group_shape, overlap, reduce_scatter_s
from layerwise.cost.compute.measured import COPY
from layerwise.cost.model import CostModel
from layerwise.cost.sums import TABLE, sums
from layerwise.cost.timeline.simulate import timeline
from layerwise.cost.transfer import Traffic, busiest_device, port_seconds, telling_devices, traffic
from layerwise.geometry import AxisMap, fixed, identity, scaled, whole, window
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import Curve, DeviceGraph, Links, Overlap, load
from layerwise.machine.curves import Operation
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.ops.facts import Dim, Maps, Space
from layerwise.ops.tensor.view import Expand, Reshape
from layerwise.partition.edge import Edge
from layerwise.partition.layout import layout
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.cost.test_timeline import linear
from tests.examples import examples

COPIES = LayerTimes(
    Conditions("device", "2.13.0", "float32", threads=1), cells={COPY: {(100,): CellTime(1.0, 2.0, 0.1, 9)}}
)


def check(found: Traffic, seconds: float, table: brute.Table, item_bytes: int, graph: DeviceGraph) -> None:
    """One pair of configurations: bytes and seconds of one way, against the elements that each device needs of each."""
    apart = table * ~np.eye(graph.count, dtype=bool)
    devices = np.arange(graph.count)
    between = np.asarray(graph.level_between(devices[:, None], devices[None, :]))
    assert found.received_bytes == apart.sum(1).max() * item_bytes
    assert found.total_bytes.tolist() == [apart[between == i].sum() * item_bytes for i in range(len(graph.levels))]
    assert isclose(seconds, max(cost for ports in brute.ports(table, item_bytes, graph) for *_, cost in ports))


def _pair(found: Traffic, i: int, j: int) -> Traffic:
    return Traffic(found.total_bytes[i, j], found.received_bytes[i, j])


def check_network(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """All edges of a network, each under a few configurations of both ends at once.

    Where something travels, what a device keeps is copied: where that was measured, at a time each way.
    """
    model, copying = CostModel(network, graph), CostModel(network, replace(graph, layers=(COPIES,)))
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count)) for layer in network.layers}
    for edge in network.edges():
        source, target = network[edge[0]], network[edge[1]]
        priced = model.edge(edge, chosen[edge[0]], chosen[edge[1]])
        found, one_way = traffic(priced, graph), port_seconds(priced, graph)
        exact = model.edge_cost(edge, chosen[edge[0]], chosen[edge[1]])
        expected = model.directions(edge) * one_way
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
                table = brute.exchanged(*ends)
                check(_pair(found, i, j), one_way[i, j], table, source.out.item_bytes, graph)
                a_byte = (0.0, 0.01, 0.03)[model.directions(edge)] if exact[i, j] > 0 else 0.0
                assert isclose(copied[i, j], exact[i, j] + table.diagonal().max() * source.out.item_bytes * a_byte)


ALL = networks.windows() | networks.views() | networks.branches() | networks.sequences()


@given(ALL, brute.machines(), st.data())
@examples(40)
def test_transfers_are_those_of_every_element(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """Halos, views, concats, followers, tied parameters, attention and scalars."""
    check_network(network, graph, data)


def test_a_batch_of_one_is_squeezed() -> None:
    b = GraphBuilder("squeezed")
    x = b.input("x", TensorSpec((1, 2, 3), ("n", "c", "l")))
    for i, shape in enumerate(((1, 1, 2, 3), (1, 2, 3))):
        x = networks.add(b, f"view{i}", Expand(shape) if i == 0 else Reshape(shape), [x])
    network = b.finish([x])
    assert all(networks.one_to_one(maps) for layer in network.layers for maps in layer.space.needs)


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
@examples(35)
def test_any_maps(
    held: tuple[Dim, ...], out: tuple[Dim, ...], reduced: bool, graph: DeviceGraph, data: st.DataObject
) -> None:
    """Of any tensor to any iteration space, also such as no operator has; sums are tabulated, or worked out."""
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

    sums.cache_clear()
    with mock.patch("layerwise.cost.sums.TABLE", data.draw(st.sampled_from([0, TABLE]))):
        found, exact = traffic(edge(us, vs), graph), port_seconds(edge(us, vs), graph)
    few = tuple(sorted(data.draw(st.sets(st.integers(0, graph.count - 1), min_size=1))))
    assert (port_seconds(edge(us, vs), graph, few) <= exact * (1 + 1e-9)).all()
    for i, j in np.ndindex(len(us), len(vs)):
        table = brute.exchanged(held_by, us[i], target, maps, epilogue, vs[j], graph.count)
        device = busiest_device(edge(us[i : i + 1], vs[j : j + 1]), graph)
        loads = brute.ports(table, source.item_bytes, graph)
        doors = [list(graph.port(at)) for at in range(len(loads))]
        behind = [loads[at][way + ports[device]][2] for at, ports in enumerate(doors) for way in (0, max(ports) + 1)]
        assert isclose(max(behind), exact[i, j])
        check(_pair(found, i, j), float(exact[i, j]), table, source.item_bytes, graph)


def _spec(dims: tuple[Dim, ...], dtype: str) -> TensorSpec:
    return TensorSpec(tuple(d.extent for d in dims), tuple(d.label for d in dims), dtype, tuple(d.unit for d in dims))


@pytest.mark.parametrize(
    ("u", "v"), [({"n": 4, "h": 35}, {"c": 2, "h": 70}), ({"h": 140}, {"n": 4, "c": 5, "h": 7}), ({"n": 3}, {"h": 137})]
)
def test_racks_of_which_the_last_is_short(u: dict[str, int], v: dict[str, int]) -> None:
    """140 GPUs of ParaDL's cluster: 35 nodes of 4 with two ports each, a rack of 136 and one of 4."""
    graph = load("v100").device_graph(140)
    assert [level.devices for level in graph.levels] == [4, 136, 140]
    spec = TensorSpec((4, 6, 140), ("n", "c", "h"))
    where, maps = brute.plain(spec), (identity(4, 0), whole(6), window(140, 140, 2, first=-1, last=1))
    ends = Config.of(u), Config.of(v)
    one, other = (layout((config,), where, 140) for config in ends)
    edge = Edge.of(spec, one.owned, maps, where.dims, other.computed)
    table = brute.exchanged(where, ends[0], where, maps, False, ends[1], 140)
    check(_pair(traffic(edge, graph), 0, 0), port_seconds(edge, graph)[0, 0], table, 4, graph)


NETWORKS = networks.windows() | networks.branches()
FAR = 1e12  # bytes, beyond any here


def as_stated(graph: DeviceGraph) -> DeviceGraph:
    """The same graph, as if its levels' alpha and beta had been measured."""
    curves = []
    for at, level in enumerate(graph.levels):
        alpha, beta = level.alpha_s, level.beta_s_per_byte
        knots = ((1e-3, alpha), (FAR, alpha + beta * FAR))
        curves.append(Curve("exchange", (*(1,) * at, 2), 1, knots, ((1.0, alpha),)))
    return replace(graph, links=Links(tuple(curves)))


def kinked(graph: DeviceGraph) -> DeviceGraph:
    """Small messages for their latency alone, large ones at a quarter of the bandwidth."""
    curves = tuple(
        Curve("exchange", (*(1,) * at, 2), 2, ((8.0, 1e-5), (64.0, 2e-5), (128.0, 9e-5)), ((1.0, 1e-6), (100.0, 5e-6)))
        for at in range(len(graph.levels))
    )
    return replace(graph, links=Links(curves))


@given(NETWORKS, brute.machines(), st.data())
@examples(15)
def test_a_few_devices_bound_all_on_a_curve_with_kinks(
    network: LayerGraph, graph: DeviceGraph, data: st.DataObject
) -> None:
    model = CostModel(network, kinked(graph))
    chosen = {layer.name: data.draw(brute.configs(layer.space, graph.count)) for layer in network.layers}
    for edge in network.edges():
        ends = chosen[edge[0]], chosen[edge[1]]
        exact = model.edge_cost(edge, *ends)
        assert (model.edge_cost(edge, *ends, telling_devices(model.devices)) <= exact * (1 + 1e-9)).all()


@given(NETWORKS, st.sampled_from([(4,), (6,)]), st.data())
@examples(15)
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


def test_states_shared_out_have_the_overlap_of_their_own_operations() -> None:
    """Not an all-reduce's: their reduce-scatters and gathers take more, or less, of a core."""
    network = linear(64, 3000, 4000, 3500)
    config = replace(Config.of({"n": 4}), states="sharded")
    strategy = {"linear0": config, "linear1": config}
    graph = brute.machine((4,))

    def found(share: float, operation: Operation) -> float:
        links = Links((), (Overlap((4,), 1, share, share, operation), Overlap((4,), 1, 1.0, 1.0)))
        return timeline(CostModel(network, replace(graph, links=links)), strategy).total_s

    assert found(0.3, "reduce_scatter") > found(1.0, "reduce_scatter")
    assert found(0.3, "all_gather") > found(1.0, "all_gather")
    assert found(0.3, "all_to_all") == found(1.0, "all_to_all")
