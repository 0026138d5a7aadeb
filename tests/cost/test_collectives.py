"""Collectives: who takes part, and how long they take."""

from math import log2

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.collectives import BUCKET_BYTES, GroupShape, all_reduce_s, bucket_s, group_shape, reduce_scatter_s
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.terms import gradients_of, reductions_of, statistics_of
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.partition.groups import replicas
from layerwise.partition.layout import layout
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

NETWORKS = networks.windows() | networks.branches() | networks.sequences()


# Two nodes of 4 with a NIC for each pair of GPUs, and a rack of them beside a rack that is short.
NODES = brute.machine((4, 8), ports=(1, 2))
RACKS = brute.machine((2, 4, 6), ports=(1, 2, 4))


@pytest.mark.parametrize(
    ("graph", "row", "size", "fan", "rings", "members", "server"),
    [
        (NODES, [0] * 8, 8, (4, 2), (1, 1), (1, 2), 3 * 1 + 4 * 4),
        (NODES, [0, 1] * 4, 4, (2, 2), (1, 2), (1, 2), 1 + 2 * 4),  # each NIC is behind both groups
        (NODES, [0, 0, 1, 1] * 2, 4, (2, 2), (1, 1), (1, 2), 1 + 2 * 4),
        (NODES, [0, 1, 2, 3] * 2, 2, (1, 2), (1, 2), (1, 2), 4),
        (NODES, [0, 0, 0, 0, 1, 1, 1, 1], 4, (4, 1), (1, 1), (1, 1), 3),
        (NODES, [0, 0, 0, 1, 1, 1, -1, -1], 3, (3, 2), (1, 1), (1, 2), 2 * 4),  # the second one crosses: 3 | 4, 5
        (NODES, [0, -1, -1, -1, 0, -1, -1, -1], 2, (1, 2), (1, 1), (1, 1), 4),
        (NODES, [3, 1, 2, 0, -1, -1, -1, -1], 1, (1, 1), (1, 1), (1, 1), 0),
        (RACKS, [0] * 6, 6, (2, 2, 2), (1, 1, 1), (1, 2, 4), 1 + 2 * 4 + 2 * 7),
        (RACKS, [0, 1, 2, 3, 0, 1], 2, (1, 1, 2), (1, 2, 2), (1, 2, 2), 7),  # passes NIC and uplink
        (RACKS, [0, 1, 0, 1, 2, 2], 2, (2, 2, 1), (1, 2, 1), (1, 2, 1), 4),  # fan: the largest of each level
    ],
)
def test_groups_by_hand(
    graph: DeviceGraph,
    row: list[int],
    size: int,
    fan: tuple[int, ...],
    rings: tuple[int, ...],
    members: tuple[int, ...],
    server: int,
) -> None:
    found = group_shape(np.array(row), graph)
    assert (found.size, found.fan, found.rings, found.members) == (size, fan, rings, members)
    assert found.server_s_per_byte == pytest.approx(server * 1e-9)


def uniform(size: int, alpha: float, beta: float) -> tuple[DeviceGraph, GroupShape]:
    graph = brute.machine((size,))
    level = graph.levels[0]
    assert (level.alpha_s, level.beta_s_per_byte) == (alpha, beta)
    return graph, group_shape(np.zeros(size, np.int64), graph)


@pytest.mark.parametrize("r", [2, 3, 4, 8, 16])
@pytest.mark.parametrize("size_bytes", [1.0, 1e3, 1e4, 1e5, 1e6, 1e8])
def test_all_reduce_is_the_faster_of_ring_and_tree(r: int, size_bytes: float) -> None:
    """Equations 14 to 18; the tree by trying numbers of chunks, and within the bandwidth that there is."""
    alpha, beta = 1e-6, 1e-9
    graph, group = uniform(r, alpha, beta)
    ring = 2 * (r - 1) * (alpha + size_bytes / r * beta)
    depth = np.ceil(log2(r))
    chunks = np.geomspace(1, 1e4, 10_000)
    tree = (2 * (depth + chunks) * (alpha + size_bytes / (2 * chunks) * beta)).min()
    expected = min(ring, max(tree, 2 * (r - 1) / r * size_bytes * beta))
    assert all_reduce_s(size_bytes, group, graph) == pytest.approx(expected, rel=1e-4)
    assert reduce_scatter_s(size_bytes, group, graph) == pytest.approx(ring / 2)
    assert bucket_s(size_bytes, group, graph, "parameter-server") == pytest.approx(2 * (r - 1) * size_bytes * beta)


def test_a_hierarchical_all_reduce_by_hand() -> None:
    """Reduce-scatter in nodes of 4, all-reduce of quarters by two devices a NIC, all-gather."""
    group = group_shape(np.zeros(8, np.int64), NODES)
    inner, outer = NODES.levels
    m = 64e6
    one_way = 3 * (inner.alpha_s + m / 4 * inner.beta_s_per_byte)
    one_way += 1 * (outer.alpha_s + m / 8 * 2 * outer.beta_s_per_byte)
    assert reduce_scatter_s(m, group, NODES) == pytest.approx(one_way)
    assert all_reduce_s(m, group, NODES) == pytest.approx(2 * one_way)
    assert one_way < 7 * m / 8 * outer.beta_s_per_byte  # than the ring


def test_between_racks_a_slow_nic_counts_as_well_as_the_uplink() -> None:
    """Four pairs across two racks: both of a node's GPUs share its NIC, which is slower than the rack's uplink."""
    graph = brute.machine((2, 4, 8), ports=(1, 2, 4), slowness=(1, 20, 1))
    group = group_shape(np.arange(8) % 4, graph)
    nic, uplink = (level.beta_s_per_byte for level in graph.levels[1:])
    assert 2 * nic > 4 * uplink
    m = 1e9
    assert all_reduce_s(m, group, graph) == pytest.approx(m * 2 * nic, rel=1e-3)


def test_unequal_groups_take_as_long_as_the_slowest_of_them() -> None:
    """Three, three and four devices in nodes of two: only the four could reduce inside of their nodes first."""
    graph = brute.machine((2, 6, 10))
    row = np.repeat([0, 1, 2], [3, 3, 4])
    assert all_reduce_s(1e9, group_shape(row, graph), graph) >= _least_s(1e9, row, graph)


@given(NETWORKS, brute.machines(), st.data())
@examples(30)
def test_no_all_reduce_is_faster_than_the_links(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """Whatever the algorithm: out of a node and into it, each group that reaches beyond moves the buffer once; and all
    nodes together move it 2(f-1) times, f being the nodes of the group. The same holds for racks, and for devices."""
    m = 1e9
    for layer in network.inner:
        config = data.draw(st.sampled_from(brute.held(layer, graph.count)))
        cells = layout((config,), layer.space, graph.count)
        model = CostModel(network, graph)
        summed = [*reductions_of(model, layer, cells, False), *statistics_of(model, layer, cells, False)]
        for c in (*gradients_of(model, layer, cells), *summed):
            row = replicas(c.cells, c.keys)[0]
            time = all_reduce_s(m, c.group_shapes[0], graph)
            least = _least_s(m, row, graph)
            assert time >= least * (1 - 1e-9), f"{row}: {time} < {least}"
            assert 2 * reduce_scatter_s(m, c.group_shapes[0], graph) >= time


def _least_s(m: float, row: np.ndarray, graph: DeviceGraph) -> float:
    least = 0.0
    inner = np.arange(graph.count)
    for at, level in enumerate(graph.levels):
        spans = {i: set(inner[row == i].tolist()) for i in set(row.tolist()) - {-1}}
        port = graph.port(at)
        if at or all(len({d // level.devices for d in np.nonzero(row == i)[0]}) == 1 for i in spans):
            total = sum(2 * (len(s) - 1) * m for s in spans.values())
            least = max(least, total / (port.max() + 1) * level.beta_s_per_byte)
            for g in set(inner.tolist()):
                crossing = sum(g in s and len(s) > 1 for s in spans.values())
                doors = len(set(port[inner == g].tolist()))
                least = max(least, crossing * m / doors * level.beta_s_per_byte)
        inner = np.arange(graph.count) // level.devices
    return least


def two_layers(n: int = 8) -> LayerGraph:
    b = GraphBuilder("two")
    x = b.input("x", TensorSpec((n, 6, 4), ("n", "c", "l")))
    x = networks.add(b, "conv", networks.pointwise_conv(8, 1, bias=True), [x])
    x = networks.add(b, "norm", BatchNorm(), [x])
    return fuse(b.finish([networks.add(b, "linear", Linear(1000), [x])]))


def test_gradients_share_the_latency_of_their_bucket() -> None:
    """t_S = bytes·β + (bytes/bucket)·α, α and β those of the all-reduce of a bucket."""
    model = CostModel(two_layers(), brute.machine((2,)))
    level = model.devices.levels[0]
    beta, alpha = 2 * (2 - 1) / 2 * level.beta_s_per_byte, 2 * (2 - 1) * level.alpha_s
    for name, elements in (("linear", 4 * 1000 + 1000), ("conv", 6 * 8 + 8 + 2 * 8)):
        size = 4 * elements
        cost = model.node_cost(model.graph[name], (Config.of({"n": 2}), Config()))
        assert cost.seconds["sync"] == pytest.approx([size * beta + size / BUCKET_BYTES * alpha, 0.0])
    server = CostModel(two_layers(), brute.machine((2, 4)), CostOptions(sync="parameter-server"))
    cost = server.node_cost(server.graph["linear"], (Config.of({"n": 4}), Config.of({"n": 2, "k": 2})))
    near, far = (level.beta_s_per_byte for level in server.devices.levels)
    whole, half = 2 * (near + 2 * far), 2 * far  # all four devices have the bias, two each half of the weights
    assert cost.seconds["sync"] == pytest.approx([20_000 * whole, 4_000 * whole + 8_000 * half])


def test_statistics_are_reduced_once_each_way_and_over_all_that_is_split_but_channels() -> None:
    """Two numbers a channel of the device's, float64 forward and float32 back; none with own statistics."""
    network, graph = two_layers(), brute.machine((8,))
    configs = tuple(Config.of(d) for d in ({"n": 8}, {"n": 2, "c": 2, "l": 2}, {"c": 8}, {"n": 2, "k": 2}))
    model = CostModel(network, graph)
    found = model.node_cost(network["conv"], configs).seconds["statistics"]
    groups = [group_shape(np.array(row), graph) for row in ([0] * 8, [0, 0, 1, 1] * 2, [0, 1, 0, 1, -1, -1, -1, -1])]
    pairs = zip((8, 4, 4), groups, strict=True)
    expected = [all_reduce_s(8 * 2 * c, g, graph) + all_reduce_s(4 * 2 * c, g, graph) for c, g in pairs]
    assert found == pytest.approx([expected[0], expected[1], 0.0, expected[2]])
    local = CostModel(network, graph, CostOptions(local_batch_norm=True))
    assert (local.node_cost(network["conv"], configs).seconds["statistics"] == 0).all()


def test_partial_sums_are_scattered_and_their_gradient_gathered() -> None:
    network, graph = two_layers(), brute.machine((8,))
    model = CostModel(network, graph)
    configs = Config.of({"n": 2, "k": 3}), Config.of({"n": 2, "c": 3})
    found = model.node_cost(network["conv"], configs).seconds["reduction"]
    group = group_shape(np.array([0, 0, 0, 1, 1, 1, -1, -1]), graph)
    assert found == pytest.approx([2 * reduce_scatter_s(4 * 4 * 8 * 4, group, graph), 0.0])
