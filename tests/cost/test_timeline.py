"""The simulated step: computation, transfers and sums on the devices' clocks, and the streams that they share."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.collectives import bucket_rate, bucket_s, group_shape
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.cost.terms import gradients_of
from layerwise.cost.timeline.simulate import SimulatedSpan, timeline
from layerwise.cost.timeline.stream import Flow, Stream
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.along import Concat
from layerwise.partition.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.examples import examples

NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()
FREE = CostOptions(io="free")


def linear(batch: int, *widths: int) -> LayerGraph:
    b = GraphBuilder("linear")
    x = b.input("x", TensorSpec((batch, widths[0]), ("n", None)))
    for i, width in enumerate(widths[1:]):
        x = networks.add(b, f"linear{i}", Linear(width, bias=False), [x])
    return b.finish([x])


def recomputed(data: st.DataObject, network: LayerGraph, strategy: dict[str, Config]) -> dict[str, Config]:
    """Some of the layers are."""
    wanted = [name for name in strategy if network.differentiates(network[name])]
    chosen = data.draw(st.sets(st.sampled_from(wanted))) if wanted else set()
    return {name: replace(config, recompute=name in chosen) for name, config in strategy.items()}


def slower(graph: DeviceGraph, factor: float) -> DeviceGraph:
    """The same links, and devices that take `factor` times as long."""
    p = graph.processor
    peaks = {dtype: peak / factor for dtype, peak in p.peak_flops.items()}
    bandwidth, floor = p.memory_bandwidth_bytes_per_s / factor, p.kernel_floor_s * factor
    return replace(
        graph, processor=replace(p, peak_flops=peaks, memory_bandwidth_bytes_per_s=bandwidth, kernel_floor_s=floor)
    )


@given(NETWORKS, st.data())
@examples(15)
def test_on_one_device_a_step_is_its_computation(network: LayerGraph, data: st.DataObject) -> None:
    model = CostModel(network, brute.machine((1,)))
    strategy = complete(model, {layer.name: Config() for layer in network.inner})
    costs = [model.node_cost(layer, (strategy[layer.name],)).compute for layer in network.layers]
    found = timeline(model, strategy)
    assert found.total_s == pytest.approx(sum(c.total[0] for c in costs))
    assert found.total_s == pytest.approx(price(model, strategy).step_time_s)
    assert found.forward_s == pytest.approx(sum(c.forward[0] for c in costs))
    assert found.backward_s == pytest.approx(sum(c.backward[0] for c in costs))
    assert found.exposed_sync_s == 0
    again = recomputed(data, network, strategy)
    once_more = timeline(model, again)
    forward_s = {layer.name: cost.forward[0] for layer, cost in zip(network.layers, costs, strict=True)}
    more = sum(forward_s[name] for name, config in again.items() if config.recompute)
    assert once_more.forward_s == pytest.approx(found.forward_s)
    assert once_more.backward_s == pytest.approx(found.backward_s + more)
    assert once_more.total_s == pytest.approx(price(model, again).step_time_s)


@given(NETWORKS, brute.machines(), st.data())
@examples(18)
def test_a_step_is_no_shorter_than_any_device_computes(
    network: LayerGraph, graph: DeviceGraph, data: st.DataObject
) -> None:
    """And no longer than everything one after the other, with a collective for each kind of box."""
    model = CostModel(network, graph)
    inner = [layer for layer in network.layers if layer.op.kind not in ("input", "sink")]
    legal = {layer.name: brute.held(layer, graph.count) for layer in inner}
    strategy = complete(model, {name: data.draw(st.sampled_from(configs)) for name, configs in legal.items()})
    strategy = recomputed(data, network, strategy)
    busy, most = np.zeros(graph.count), 0.0
    for layer in network.layers:
        cost = model.node_cost(layer, (strategy[layer.name],))
        cells = model.layout(layer, (strategy[layer.name],))
        for device, _, _ in brute.holdings(strategy[layer.name], layer.space, graph.count):
            busy[device] += float(cost.seconds["compute"][0])
        most += float(cost.seconds["compute"][0] + cost.seconds["statistics"][0] + cost.seconds["reduction"][0])
        if layer in inner:
            sizes = [(float(c.size_bytes[0]), c.group_shapes[0]) for c in gradients_of(model, layer, cells)]
            most += sum(bucket_s(size, group, graph, "all-reduce") for size, group in sizes)
    most += sum(p.seconds["transfer"] for p in price(model, strategy).layers.values())
    found = timeline(model, strategy)
    assert busy.max() <= found.total_s * (1 + 1e-9)
    assert found.total_s <= most * (1 + 1e-9)


@given(st.lists(st.integers(1, 6000), min_size=2, max_size=6), brute.machines(), st.integers(1, 1000))
@examples(25)
def test_data_parallelism_is_no_slower_than_its_additive_price(
    widths: list[int], graph: DeviceGraph, slow: int
) -> None:
    """But for the first bucket and the last, which are not full and yet pay all of their latency."""
    network = linear(graph.count * 4, *widths)
    model = CostModel(network, slower(graph, slow / 100))
    strategy = {layer.name: Config.of({"n": graph.count}) for layer in network.inner}
    group = group_shape(np.zeros(graph.count, np.int64), graph)
    sizes = [0.0]
    for width, depth in zip(reversed(widths[1:]), reversed(widths[:-1]), strict=True):
        if sizes[-1] >= (FIRST_BUCKET_BYTES if len(sizes) == 1 else BUCKET_BYTES):
            sizes.append(0.0)
        sizes[-1] += 4 * width * depth
    rate = bucket_rate(group, graph, "all-reduce")
    extra = sum(max(0.0, bucket_s(size, group, graph, "all-reduce") - size * rate) for size in sizes)
    found, additive = timeline(model, strategy), price(model, strategy).step_time_s
    assert found.total_s <= (additive + extra) * (1 + 1e-9)


@pytest.mark.parametrize("slow", [0.01, 1, 10_000])
def test_two_layers_of_data_parallelism_by_hand(slow: float) -> None:
    """Both gradients fill a bucket each. The first is on the wire while the other layer computes."""
    network = linear(64, 3000, 4000, 3500)
    model = CostModel(network, slower(brute.machine((2, 4)), slow))
    config = Config.of({"n": 4})
    first, second = (model.node_cost(network[f"linear{i}"], (config,)).compute for i in range(2))
    group = group_shape(np.zeros(4, np.int64), model.devices)
    sizes = 4 * 3000 * 4000, 4 * 4000 * 3500
    sync = [bucket_s(size, group, model.devices, "all-reduce") for size in sizes]
    forward = first.forward[0] + second.forward[0]
    sent = forward + second.backward[0] + sync[1]
    computed = forward + second.backward[0] + first.backward[0]
    end = max(sent, computed) + sync[0]
    found = timeline(model, {"linear0": config, "linear1": config})
    assert found.total_s == pytest.approx(end + first.update[0] + second.update[0])
    assert found.backward_s == pytest.approx(second.backward[0] + first.backward[0])
    assert found.exposed_sync_s == pytest.approx(end - computed)
    assert (sent < computed) == (slow == 10_000)  # long computation hides all but the last bucket


def test_layers_that_are_split_otherwise_by_hand() -> None:
    """Samples, channels, samples: four transfers; the one in the backward pass delays the gradients on the wire."""
    network = linear(64, 30, 3000, 40, 200_000)
    model = CostModel(network, slower(brute.machine((2,)), 0.1), FREE)
    data, split = Config.of({"n": 2}), Config.of({"c": 2})
    strategy = {"linear0": data, "linear1": split, "linear2": data}
    costs = [model.node_cost(network[name], (config,)).compute for name, config in strategy.items()]
    forward, backward = [c.forward[0] for c in costs], [c.backward[0] for c in costs]
    edges = [("linear0", "linear1", 0), ("linear1", "linear2", 0)]
    over = [float(model.edge_cost(e, (strategy[e[0]],), (strategy[e[1]],))[0, 0]) / 2 for e in edges]
    group = group_shape(np.zeros(2, np.int64), model.devices)
    large, small = (bucket_s(4 * size, group, model.devices, "all-reduce") for size in (40 * 200_000, 30 * 3000))
    started = sum(forward) + sum(over) + backward[2] + over[1]  # of the large gradient
    computed = started + backward[1] + over[0] + backward[0]
    sent = started + large + over[0]
    assert over[0] > 0
    assert sent > computed  # it is still on the wire when all is computed
    found = timeline(model, strategy)
    assert found.forward_s == pytest.approx(sum(forward) + sum(over))
    assert found.total_s == pytest.approx(sent + small + sum(c.update[0] for c in costs))


@pytest.mark.parametrize("slow", [1e-6, 1e6])
def test_a_skip_travels_beside_computation_by_hand(slow: float) -> None:
    """Both ways it hides behind the layer between, or that behind it; the next transfer comes after it."""
    b = GraphBuilder("skip")
    x = b.input("x", TensorSpec((64, 300), ("n", None)))
    first = networks.add(b, "first", Linear(400, bias=False), [x])
    second = networks.add(b, "second", Linear(500, bias=False), [first])
    third = networks.add(b, "third", Linear(600, bias=False), [second])
    networks.add(b, "cat", Concat(1), [first, third])
    model = CostModel(b.finish(["cat"]), slower(brute.machine((2,)), slow), FREE)
    split, data = Config.of({"c": 2}), Config.of({"n": 2})
    strategy = {"first": split, "second": split, "third": split, "cat": data}
    costs = [model.node_cost(model.graph[name], (config,)).compute for name, config in strategy.items()]
    f, g = [float(c.forward[0]) for c in costs], [float(c.backward[0]) for c in costs]
    edges = [("first", "second", 0), ("second", "third", 0), ("third", "cat", 1), ("first", "cat", 0)]
    one, two, last, skip = (float(model.edge_cost(e, (strategy[e[0]],), (strategy[e[1]],))[0, 0]) / 2 for e in edges)
    spans = dict[str, SimulatedSpan]()
    found = timeline(model, strategy, lambda span: spans.update({span.name: span}))
    assert found.forward_s == pytest.approx(f[0] + one + max(f[1], skip) + two + f[2] + last + f[3])
    assert found.backward_s == pytest.approx(g[3] + last + max(g[2], skip) + two + g[1] + one + g[0])
    assert (skip < f[1]) == (slow > 1)
    there, back = spans["first -> cat"], spans["first -> cat (backward)"]
    assert there.end_s - there.start_s == pytest.approx(np.full(2, skip))
    assert there.start_s == pytest.approx(spans["second"].start_s)
    assert back.start_s == pytest.approx(spans["third (backward)"].start_s)


@pytest.mark.parametrize("degrees", [{"n": 4}, {"n": 2, "k": 2}, {"k": 4}])
def test_collectives_inside_a_layer_hold_it_up_both_ways(degrees: dict[str, int]) -> None:
    """Statistics of the batch and sums over k: half of their time forward, half backward, none of it hidden."""
    b = GraphBuilder("normed")
    x = b.input("x", TensorSpec((4, 8, 6), ("n", "c", "l")))
    x = networks.add(b, "conv", networks.pointwise_conv(8, 1), [x])
    network = fuse(b.finish([networks.add(b, "norm", BatchNorm(), [x])]))
    model = CostModel(network, brute.machine((4,)), FREE)
    cost = model.node_cost(network["conv"], (Config.of(degrees),))
    inside = float(cost.seconds["statistics"][0] + cost.seconds["reduction"][0])
    assert inside > 0
    found = timeline(model, {"conv": Config.of(degrees)})
    assert found.forward_s == pytest.approx(cost.compute.forward[0] + inside / 2)
    assert found.backward_s == pytest.approx(cost.compute.backward[0] + inside / 2)


def test_devices_that_take_no_part_do_not_wait() -> None:
    """Two devices compute, four are there: strided or not, the others neither send nor receive."""
    network = linear(64, 300, 400, 350)
    model = CostModel(network, brute.machine((2, 4)), FREE)
    ends = {}
    for placement in ("contiguous", "strided"):
        config = Config((("n", 2),), placement)
        row = [0, 0, -1, -1] if placement == "contiguous" else [0, -1, 0, -1]
        group = group_shape(np.array(row), model.devices)
        sync = bucket_s(4 * (300 * 400 + 400 * 350), group, model.devices, "all-reduce")
        computed = sum(float(model.node_cost(network[f"linear{i}"], (config,)).compute.total[0]) for i in range(2))
        # The sink's samples are on all four devices; with --io free nobody sends them there.
        found = timeline(model, {"linear0": config, "linear1": config})
        ends[placement] = found.total_s
        assert found.total_s == pytest.approx(computed + sync)
    assert ends["contiguous"] < ends["strided"]  # the node's links are the faster ones


PAIR = np.array([0, 0])


def stream(*sums: tuple[float, float, float], clock: tuple[float, float] = (0.0, 0.0)) -> Stream:
    """Sums of two devices: seconds, and the rates of computation and of the sum."""
    made = Stream(2)
    for seconds, compute, sync in sums:
        made.add(Flow("x", PAIR, seconds, compute, sync), np.array(clock), is_sum=True)
    return made


def test_without_cost_to_each_other_the_longer_one_counts() -> None:
    made = stream((3.0, 1.0, 1.0))
    clock = made.beside(np.zeros(2), np.array([2.0, 5.0]))
    assert clock.tolist() == [2.0, 5.0]
    assert made.sums[0].left.tolist() == [1.0, 0.0]
    assert made.finish(clock).tolist() == [3.0, 5.0]


def test_taking_turns_is_no_overlap() -> None:
    made = stream((3.0, 0.5, 0.5))
    assert made.finish(made.beside(np.zeros(2), np.full(2, 3.0))).tolist() == [6.0, 6.0]


def test_by_hand() -> None:
    """Computation at 80 %, the sum at 50 %: it ends after 4 s, when 3.2 of 5 s are computed."""
    made = stream((2.0, 0.8, 0.5))
    clock = made.beside(np.zeros(2), np.full(2, 5.0))
    assert clock == pytest.approx(np.full(2, 4 + 1.8))
    assert made.sums[0].ended == pytest.approx(np.full(2, 4.0))


def test_a_sum_begins_when_its_last_member_has_come_and_ends_for_all() -> None:
    made = stream((1.0, 1.0, 1.0), clock=(0.0, 2.0))
    clock = made.beside(np.array([0.0, 2.0]), np.array([1.0, 0.5]))
    assert clock.tolist() == [1.0, 2.5]
    assert made.sums[0].left.tolist() == [1.0, 0.5]
    assert made.finish(clock).tolist() == [3.0, 3.0]


def test_waiting_lets_sums_go_on_by_themselves() -> None:
    made = stream((2.0, 0.5, 0.5), (1.0, 0.5, 0.5))
    made.until(np.zeros(2), np.array([2.5, 1.0]))
    assert [s.left.tolist() for s in made.sums] == [[0.0, 1.0], [0.5, 1.0]]
    assert made.finish(np.array([2.5, 1.0])).tolist() == [3.0, 3.0]


def test_transfers_go_before_sums_and_in_their_order() -> None:
    made = stream((4.0, 1.0, 1.0))
    first, second = (Flow("t", PAIR, seconds, 1.0, 1.0) for seconds in (2.0, 3.0))
    made.add(first, np.zeros(2))
    made.add(second, np.zeros(2))
    clock = made.beside(np.zeros(2), np.array([1.0, 4.0]))
    assert made.awaited(first, clock).tolist() == [2.0, 4.0]
    assert first.ended.tolist() == [2.0, 2.0]
    assert made.awaited(second, np.array([2.0, 4.0])).tolist() == [5.0, 5.0]
    assert made.finish(np.full(2, 5.0)).tolist() == [9.0, 9.0]


def test_a_transfer_ends_when_its_last_member_is_through() -> None:
    """And who waits for it lets gradients go on, once its own part is done."""
    made = Stream(3)
    made.add(Flow("sum", np.array([0, 0, -1]), 1.0, 1.0, 1.0), np.zeros(3), is_sum=True)
    one = Flow("t", np.array([0, 0, -1]), 2.0, 0.5, 0.5)
    made.add(one, np.zeros(3))
    clock = made.beside(np.zeros(3), np.array([0.0, 2.0, 7.0]))  # the second device computes beside it, at half speed
    assert clock.tolist() == [0.0, 4.0, 7.0]
    assert made.awaited(one, clock).tolist() == [4.0, 4.0, 7.0]
    assert made.sums[0].left.tolist() == [0.0, 1.0, 0.0]


rates = st.floats(0.05, 1.0)


@given(st.lists(st.tuples(st.floats(0.0, 5.0), rates, rates, st.booleans()), max_size=5), st.floats(0.0, 9.0))
def test_what_is_awaited_is_no_faster_than_alone(flights: list[tuple[float, float, float, bool]], work: float) -> None:
    """And no slower than all that travels, and the computation, one after the other at their slowest."""
    made, clock, before = stream(), np.zeros(2), 0.0
    sent = [(Flow("t", PAIR, seconds, compute, own), awaited) for seconds, compute, own, awaited in flights]
    for one, _ in sent:
        made.add(one, clock)
    slowest = min([1.0, *(min(one.compute, one.own) for one, _ in sent)])
    most = (work + sum(one.seconds for one, _ in sent)) / slowest
    clock = made.beside(clock, np.full(2, work))
    for one, awaited in sent:
        before += one.seconds
        if awaited:
            clock = made.awaited(one, clock)
            assert max(before, work) - 1e-9 <= clock[0] <= most + 1e-9
            assert not one.left.any()
    assert max(before, work) - 1e-9 <= made.through(clock, np.full(2, True))[0] <= most + 1e-9


@given(st.lists(st.tuples(st.floats(0.0, 5.0), rates, rates), max_size=4), st.lists(st.floats(0.0, 3.0), max_size=6))
def test_no_second_is_lost_or_gained(sums: list[tuple[float, float, float]], works: list[float]) -> None:
    """From the longer of both to both one after the other at their slowest."""
    made, clock = stream(*sums), np.zeros(2)
    for work in works:
        before = clock
        clock = made.beside(clock, np.full(2, work))
        assert (clock >= before + work - 1e-9).all()
    end = made.finish(clock)
    synced, computed = sum(s for s, _, _ in sums), sum(works)
    slowest = min([1.0, *(min(c, s) for _, c, s in sums)])
    assert end[0] >= max(synced, computed) - 1e-9
    assert end[0] <= (synced + computed) / slowest + 1e-9
    if all(c == s == 1 for _, c, s in sums):
        assert end[0] == pytest.approx(max(synced, computed))
