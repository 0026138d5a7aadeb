"""Peak memory: what is held when and of which kind, and bounds that no strategy stays below."""

from dataclasses import replace
from math import prod
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory import allocations
from layerwise.cost.memory.allocations import AllocationTracker, MemoryKind, Ref, devices_of
from layerwise.cost.memory.course import course
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.geometry.arrays import Floats
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.machine import load as load_profile
from layerwise.ops.base import Role
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.pointwise import Unary
from layerwise.partition.moved import moved
from layerwise.partition.place import place
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.find import search
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.cost.test_price import NETWORKS, random_strategy
from tests.examples import examples

# ---- storages --------------------------------------------------------------------------------------------------------


def test_a_storage_lives_while_anybody_holds_it() -> None:
    tracker = AllocationTracker(2)
    first = tracker.new(np.array([8.0, 4.0]))
    view = tracker.hold(first, devices_of(np.array([True, False])))
    tracker.drop(first)
    assert tracker.now.tolist() == [8, 0]  # the second device has no view
    second = tracker.new(np.array([1.0, 6.0]))
    tracker.drop(view)
    tracker.drop(second)
    assert (tracker.now.tolist(), tracker.peak.tolist()) == ([0, 0], [9, 6])
    tracker.spike(20.0)
    assert (tracker.now.tolist(), tracker.peak.tolist()) == ([0, 0], [20, 20])


@pytest.mark.parametrize("compared", [1, allocations.COMPARED])
@pytest.mark.parametrize("logged", [1, 50, allocations.LOGGED])
def test_the_most_is_that_of_counting_at_every_instant(
    monkeypatch: pytest.MonkeyPatch, logged: int, compared: int
) -> None:
    """Storages that several hold on some of the devices, however many instants are added up at once.

    compared: of so many devices at most, sizes are compared by their contents.
    """
    monkeypatch.setattr(allocations, "LOGGED", logged)
    monkeypatch.setattr(allocations, "COMPARED", compared)
    rng, devices = np.random.default_rng(0), 11
    tracker = AllocationTracker(devices)
    held: list[tuple[Ref, int]] = []  # and the number of its storage
    sizes, holders, most = list[Floats](), list[Floats](), np.zeros(devices)

    def count(spike: Floats) -> None:
        alive = (size * (holding > 0) for size, holding in zip(sizes, holders, strict=True))
        most[:] = np.maximum(most, sum(alive, spike))

    for _ in range(300):
        what = rng.integers(4)
        if what == 0 or not held:
            size = (rng.integers(0, 4, devices) * 8).astype(np.float64)
            held.append((tracker.new(size), len(sizes)))
            sizes, holders = [*sizes, size], [*holders, np.ones(devices)]
            count(np.zeros(devices))
        elif what == 1:
            ref, number = held[rng.integers(len(held))]
            mask = rng.random(devices) < 0.7
            more = tracker.hold(ref, devices_of(mask))
            holders[number] += sum((tracker.mask(where) for _, where in more), np.zeros(devices, bool))
            held.append((more, number))
        elif what == 2:
            ref, number = held.pop(rng.integers(len(held)))
            tracker.drop(ref)
            holders[number] -= sum((tracker.mask(where) for _, where in ref), np.zeros(devices, bool))
        else:
            size = rng.integers(0, 20, devices).astype(np.float64)
            tracker.spike(size)
            count(size)
        for ref, number in held[:3]:
            there = sum((tracker.mask(where) for _, where in ref), np.zeros(devices, bool))
            assert (tracker.mask(tracker.unshared(ref)) == (~there | (holders[number] == 1))).all()
    assert tracker.peak.tolist() == most.tolist()
    ref = tracker.new(np.ones(devices))
    tracker.drop(ref)
    with pytest.raises(AssertionError, match="more often"):
        tracker.drop(ref)


# ---- boxes -----------------------------------------------------------------------------------------------------------


@given(NETWORKS, st.data())
@examples(12)
def test_what_travels_is_what_every_element_says(network: LayerGraph, data: st.DataObject) -> None:
    """Boxes that are needed, received and sent, of every device."""
    model = CostModel(network, brute.machine((2, 6)), CostOptions(io="sample"))
    strategy = random_strategy(model, data)
    for layer in network.inner:
        for slot, name in enumerate(layer.inputs):
            source, config = model.graph[name], strategy[name]
            if name in network.unfed and config.total == 1:
                continue
            maps, epilogue = brute.input_of(layer, slot)
            at = place(layer, strategy[layer.name], 6, "sample")
            found = moved(place(source, config, 6, "sample"), maps, at.at(epilogue))
            ends = source.space, config, layer.space, maps, epilogue, strategy[layer.name], 6
            table = brute.exchanged(*ends)
            kept = np.diag(table)
            assert found.need.tolist() == table.sum(1).tolist()
            assert found.owned.tolist() == kept.tolist()
            assert found.received.tolist() == (table.sum(1) - kept).tolist()
            assert found.sent.tolist() == (table.sum(0) - kept).tolist()
            assert found.local == (not found.received.any())
            assert (found.forth <= found.sent).all()
            assert (found.back <= found.received).all()


# ---- steps by hand ---------------------------------------------------------------------------------------------------


def linear() -> LayerGraph:
    b = GraphBuilder("one")
    x = b.input("x", TensorSpec((8, 6), ("n", None)))
    return b.finish([networks.add(b, "linear", Linear(10), [x])])


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_one_linear_layer(optimizer: str) -> None:
    """The fullest instant of the loss, of the backward pass and of the update."""
    model = CostModel(linear(), brute.machine((1,)), CostOptions(optimizer=optimizer))
    found = peak_bytes(model, complete(model, {"linear": Config()}))
    weights, fed, targets, made = 4 * (60 + 10), 4 * 8 * 6, 8 * 8, 4 * 8 * 10
    before = (1 + OPTIMIZERS[optimizer]) * weights + fed + targets
    backward = weights + 2 * made  # the output, and its gradient
    update = weights + (weights if optimizer == "adam" else 0)
    scored = 4 * made  # the output and its logarithms, and the gradients of both
    assert found.tolist() == [before + max(backward, update, scored)]


def test_data_parallel_gradients_have_buckets() -> None:
    """At the fullest instant the first of the new gradients is copied."""
    model = CostModel(linear(), brute.machine((4,)))
    found = peak_bytes(model, complete(model, {"linear": Config.of({"n": 4})}))
    weights, fed, targets = 4 * (60 + 10), 4 * 2 * 6, 8 * 2
    assert found.tolist() == [2 * weights + fed + targets + 4 * 60] * 4


def deep(*more: Unary | BatchNorm, convs: int = 6) -> LayerGraph:
    b = GraphBuilder("deep")
    x = b.input("x", TensorSpec((2, 3, 16, 16), ("n", "c", "h", "w")))
    for i in range(convs):
        x = networks.add(b, f"conv{i}", Conv(3, (3, 3), (1, 1), ((1, 1), (1, 1)), (1, 1)), [x])
        for j, op in enumerate(more):
            x = networks.add(b, f"conv{i}.{j}", op, [x])
    return fuse(b.finish([x]))


def kept_by_a_layer(*more: Unary | BatchNorm) -> float:
    """By how many outputs the peak grows with one more layer."""
    sizes = []
    for convs in (6, 7):
        model = CostModel(deep(*more, convs=convs), brute.machine((1,)))
        sizes.append(price(model, {layer.name: Config() for layer in model.graph.inner}).memory_bytes)
    return (sizes[1] - sizes[0]) / (4 * 2 * 3 * 256)


def test_a_relu_keeps_its_result_only() -> None:
    """What a convolution made for it is gone; a batch norm reads its input again, a gelu too."""
    assert kept_by_a_layer() == pytest.approx(1, abs=0.1)
    assert kept_by_a_layer(Unary("relu")) == pytest.approx(1, abs=0.1)
    assert kept_by_a_layer(Unary("gelu")) == pytest.approx(2, abs=0.1)
    assert kept_by_a_layer(BatchNorm(), Unary("relu")) == pytest.approx(2, abs=0.1)


def test_adam_on_a_cpu_goes_parameter_by_parameter() -> None:
    b = GraphBuilder("two")
    x = b.input("x", TensorSpec((1, 50), ("n", None)))
    for name in ("first", "second"):
        x = networks.add(b, name, Linear(50, bias=False), [x])
    graph, options = b.finish([x]), CostOptions(optimizer="adam")
    serial = {"first": Config(), "second": Config()}
    gpu, cpu = (price(CostModel(graph, load_profile(n).device_graph(1), options), serial) for n in ("p100", "cpu"))
    assert cpu.memory_bytes - gpu.memory_bytes == 4 * 2500  # one's denominator, another's root and quotient; or both's


# ---- laws ------------------------------------------------------------------------------------------------------------


@given(NETWORKS, st.sampled_from(["sample", "free"]), st.sampled_from(list(OPTIMIZERS)), st.data())
@examples(12)
def test_every_device_has_room_for_what_it_keeps(
    network: LayerGraph, io: str, optimizer: str, data: st.DataObject
) -> None:
    """Parameters with gradients and state; and at the end of the forward pass what every layer with a gradient made."""
    options = CostOptions(io="free" if io == "free" else "sample", optimizer=optimizer)
    model = CostModel(network, brute.machine((2, 6)), options)
    strategy = random_strategy(model, data)
    peak = peak_bytes(model, strategy)
    parameters, gradients, made = np.zeros(6), np.zeros(6), np.zeros(6)
    for layer in network.inner:
        part = {device for device, *_ in brute.holdings(strategy[layer.name], layer.space, 6)}
        unfed = layer.name in network.unfed
        for device, cell, own in brute.holders(strategy[layer.name], layer.space, 6, unfed=unfed):
            for _, p, item_bytes in layer.held():
                size = brute.need(p.maps, own if p.epilogue else cell).volume * item_bytes
                parameters[device] += size * (1 + OPTIMIZERS[optimizer] * p.trainable)
                gradients[device] += size * p.trainable
            computes = device in part and layer.role is not Role.TIED and not layer.main.view
            if computes and model.has_gradient[layer.name]:
                made[device] += own.volume * layer.out.item_bytes
    assert (peak >= parameters + gradients).all()
    assert (peak >= parameters + made).all()
    assert peak.max() == price(model, strategy).memory_bytes


@given(NETWORKS, st.data())
@examples(12)
def test_an_optimizers_state_comes_on_top(network: LayerGraph, data: st.DataObject) -> None:
    """Momentum is there through all of the step, and takes nothing else."""
    machine = brute.machine((2, 6))
    sgd, momentum = (CostModel(network, machine, CostOptions(optimizer=name)) for name in ("sgd", "momentum"))
    strategy = random_strategy(sgd, data)
    state = np.zeros(6)
    for layer in network.layers:
        at = place(layer, strategy[layer.name], 6, "sample", unfed=layer.name in network.unfed)
        for _, p, item_bytes in layer.held():
            state += at.holds(p).volume * item_bytes * p.trainable
    assert peak_bytes(momentum, strategy) - peak_bytes(sgd, strategy) == pytest.approx(state)


def model_of(name: str, batch: int, optimizer: str = "adam") -> CostModel:
    return CostModel(fuse(load_model(name, batch)), load("h100").device_graph(4), CostOptions(optimizer=optimizer))


@pytest.mark.parametrize("name", ["lenet5", "alexnet", "unet2d"])
def test_the_kinds_sum_up_to_the_peak(name: str) -> None:
    model = model_of(name, 8)
    searched = search(model, SearchSpace(4)).best.strategy
    for strategy in (searched, *(complete(model, baseline(model, other)) for other in NAMES)):
        kinds = course(model, strategy).peak
        assert set(kinds) == set(get_args(MemoryKind))
        assert min(kinds.values()) >= 0
        assert sum(kinds.values()) == pytest.approx(peak_bytes(model, strategy).max(), rel=1e-12)


def test_each_kind_is_what_it_says() -> None:
    """Of layers so wide that the samples are nothing: parameters, twice that for Adam, gradients, and their buckets."""
    model = model_of("mlp:1024x1024x1024x10", 4)
    size = sum(prod(p.shape) * item for layer in model.graph.inner for _, p, item in layer.held())
    whole = complete(model, baseline(model, "data"))
    kinds = course(model, whole).peak
    assert kinds["parameters"] == size
    assert kinds["states"] == 2 * size
    assert size <= kinds["gradients"] <= 1.6 * size
    assert kinds["activations"] < 0.1 * size
    shared = course(
        model,
        {name: replace(c, states="sharded") for name, c in whole.items() if c.total > 1}
        | {name: c for name, c in whole.items() if c.total == 1 or model.graph[name].end},
    ).peak
    assert shared["parameters"] == pytest.approx(size / 4, rel=0.02)
    assert shared["states"] == 2 * shared["parameters"]
    assert shared["gathered"] >= 0.9 * size
