"""The price of a strategy: bytes of every element, terms of the equation, memory, recomputed layers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.cost.terms import EDGE_TERMS, LAYER_TERMS, TERMS, Term
from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.ops.base import Role
from layerwise.ops.ends import Constant
from layerwise.ops.nn.linear import Embedding, Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.pointwise import Binary, Cast, Unary
from layerwise.ops.tensor.view import Reshape
from layerwise.partition.blocks import recomputable
from layerwise.search.baselines import baseline
from layerwise.tensor import TensorSpec
from tests.cost import brute, networks
from tests.cost.networks import add
from tests.examples import examples

NETWORKS = networks.windows() | networks.views() | networks.branches() | networks.sequences()


def random_strategy(model: CostModel, data: st.DataObject) -> dict[str, Config]:
    """Any legal configuration of every layer; the ends as they are."""
    inner = [layer for layer in model.graph.layers if layer.op.kind not in ("input", "sink")]
    legal = {layer.name: brute.held(layer, model.devices.count) for layer in inner}
    return complete(model, {name: data.draw(st.sampled_from(configs)) for name, configs in legal.items()})


# ---- bytes, element by element ---------------------------------------------------------------------------------------


def counted_transfers(model: CostModel, layer: Layer, strategy: dict[str, Config]) -> int:
    """Bytes of all inputs, there and (where a gradient flows) back, and of the reduction over k."""
    count, total = model.devices.count, 0
    for slot, name in enumerate(layer.inputs):
        source = model.graph[name]
        if name in model.graph.unfed and strategy[name].total == 1:  # computed everywhere
            continue
        ends = source.space, strategy[name], layer.space, *brute.input_of(layer, slot), strategy[layer.name], count
        table = brute.exchanged(*ends)
        back = model.has_gradient[name] and model.has_gradient[layer.name]
        total += (1 + back) * int(table.sum() - np.trace(table)) * source.out.item_bytes
    sums = np.zeros(layer.out.shape, np.int64)
    for _, cell, _ in brute.holdings(strategy[layer.name], layer.space, count):
        sums[tuple(slice(*ends) for ends in zip(cell.lo, cell.hi, strict=True))[: sums.ndim]] += 1
    main = layer.stages[0].space.out
    return total + int(2 * (sums - 1).sum()) * main.item_bytes


def counted_sync(layer: Layer, config: Config, devices: int, *, unfed: bool) -> int:
    """Of each element of each parameter that r devices have, 2(r-1) copies."""
    total = 0
    for _, p in layer.own_parameters():
        if p.trainable:
            copies = np.zeros(p.shape, np.int64)
            for _, cell, own in brute.holders(config, layer.space, devices, unfed=unfed):
                copies[brute.need(p.maps, own if p.epilogue else cell).slices()] += 1
            assert copies.min() >= 1
            total += int(2 * (copies - 1).sum()) * layer.out.item_bytes
    return total


def counted_statistics(model: CostModel, layer: Layer, config: Config, devices: int) -> int:
    """Of each key that r devices have, 2(r-1) copies of its numbers; also back from what trains.

    4 bytes at least, forward 8, but of losses, which are no variances.
    """
    total = 0
    trains, sources = False, iter(layer.inputs)
    for number, stage in enumerate(layer.stages):
        flows = [model.has_gradient[next(sources)] for _ in stage.specs[int(number > 0) :]]
        trains = trains or any(flows)
        directions = 1 + trains
        trains |= any(p.trainable for p in stage.space.parameters)
        statistics = stage.statistics()
        if statistics:
            copies: dict[tuple[int, ...], int] = {}
            for _, _, own in brute.holdings(config, layer.space, devices):
                ranges = [range(own.lo[i], own.hi[i]) for i in statistics.keys]
                if statistics.keys and (statistics.block > 1 or statistics.keys[-1] == 1):
                    ranges[-1] = range(own.lo[1] // statistics.block, own.hi[1] // statistics.block)
                for key in np.ndindex(*map(len, ranges)):
                    at = tuple(r[i] for r, i in zip(ranges, key, strict=True))
                    copies[at] = copies.get(at, 0) + 1
            sent = sum(2 * (r - 1) * statistics.per_key for r in copies.values())
            wide = max(layer.out.item_bytes, 4)
            total += sent * ((8 if statistics.exact else wide) + (wide if directions == 2 else 0))
    return total


@given(NETWORKS, brute.machines(), st.data())
@examples(18)
def test_bytes_are_those_of_every_element(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """Law 7 for the predicted side, also where the cells are of different sizes."""
    model = CostModel(network, graph, CostOptions(io="sample"))
    strategy = random_strategy(model, data)
    found = price(model, strategy)
    for layer in network.layers:
        cost, config = found.layers[layer.name], strategy[layer.name]
        assert cost.bytes["transfer"] == counted_transfers(model, layer, strategy), layer.name
        assert cost.bytes["sync"] == counted_sync(layer, config, graph.count, unfed=layer.name in network.unfed), (
            layer.name
        )
        assert cost.bytes["statistics"] == counted_statistics(model, layer, config, graph.count), layer.name
    kinds = found.bytes["transfer"], found.bytes["sync"], found.bytes["statistics"]
    assert found.bytes_moved == sum(kinds)
    rows = [(p.bytes["transfer"], p.bytes["sync"], p.bytes["statistics"]) for p in found.layers.values()]
    assert kinds == tuple(map(sum, zip(*rows, strict=True)))


def classifier(batch: int, features: int = 7, classes: int = 5) -> LayerGraph:
    b = GraphBuilder("classifier")
    x = b.input("x", TensorSpec((batch, 4, 6), ("n", "c", "l")))
    x = networks.add(b, "conv", networks.pointwise_conv(features, 1, bias=True), [x])
    x = networks.add(b, "norm", BatchNorm(), [x])
    x = networks.add(b, "relu", Unary("relu"), [x])
    x = networks.add(b, "linear", Linear(classes), [x])
    return fuse(b.finish([x]))


def test_a_tied_parameter_is_replicated_and_flattened_outputs_stay_with_data_parallelism() -> None:
    """As DistributedDataParallel: the weight is summed once, and rows of (n*s, c) return to the devices of their n."""
    b = GraphBuilder("language")
    ids = b.input("ids", TensorSpec((8, 6), ("n", "s"), "int64"))
    table = b.tied("table", TensorSpec((20, 4), ("c", None)))
    x = b.add("embed", Embedding(20, 4), [ids], [table])
    x = b.add("head", Linear(20, False), [x], [table])
    x = b.add("flat", Reshape((48, 20)), [x])
    model = CostModel(fuse(b.finish([x])), brute.machine((4,)))
    found = price(model, baseline(model, "data"))
    assert found.bytes["transfer"] == 0
    assert found.bytes["sync"] == 2 * 3 * 80 * 4


def test_gradients_are_of_the_type_of_their_own_operator() -> None:
    """A float16 cast that follows does not halve the weights; nor does the epilogue widen partial sums."""
    b = GraphBuilder("mixed")
    x = networks.add(b, "linear", Linear(3), [b.input("x", TensorSpec((4, 6), ("n", None)))])
    network = fuse(b.finish([networks.add(b, "cast", Cast("float16"), [x])]))
    assert network["linear"].out.dtype == "float16"
    model = CostModel(network, brute.machine((2,)), CostOptions(io="free"))
    assert price(model, {"linear": Config.of({"n": 2})}).bytes_moved == 2 * 4 * (6 * 3 + 3)
    assert price(model, {"linear": Config.of({"k": 2})}).bytes["transfer"] == 2 * 4 * 4 * 3


def test_no_gradient_returns_from_a_comparison() -> None:
    b = GraphBuilder("compared")
    x = networks.add(b, "linear", Linear(4), [b.input("x", TensorSpec((4, 6), ("n", None)))])
    y = networks.add(b, "positive", Unary("gt_scalar", (0.0,)), [x])
    network = b.finish([networks.add(b, "mask", Binary("mul"), [x, y])])
    model = CostModel(network, brute.machine((2,)))
    assert [model.directions(edge) for edge in network.edges()] == [1, 1, 2, 1, 2]
    free = CostModel(network, brute.machine((2,)), CostOptions(io="free"))
    assert [free.directions(edge) for edge in network.edges()] == [0, 1, 2, 1, 0]


def test_every_device_makes_its_own_constants() -> None:
    b = GraphBuilder("masked")
    spec = TensorSpec((4, 6), ("n", None))
    x, mask = b.input("x", spec), b.add("mask", Constant(spec), [])
    network = b.finish([networks.add(b, "masked", Binary("mul"), [x, mask])])
    model = CostModel(network, brute.machine((2,)))
    assert [model.directions(edge) for edge in network.edges()] == [1, 0, 1]
    cost = price(model, {"masked": Config()}).layers["masked"]
    assert (cost.bytes["transfer"], cost.total_s > 0) == (2 * 6 * 4, True)  # the other device's half of x


# ---- seconds ---------------------------------------------------------------------------------------------------------


@given(NETWORKS, brute.machines(), st.data())
@examples(18)
def test_a_price_is_the_sum_of_the_tables(network: LayerGraph, graph: DeviceGraph, data: st.DataObject) -> None:
    """Whatever else is in the tables, and whichever way the links and the gradients are priced."""
    options = CostOptions(
        data.draw(st.sampled_from(["port", "sum"])),
        data.draw(st.sampled_from(["all-reduce", "parameter-server"])),
        data.draw(st.sampled_from(["sample", "free"])),
        data.draw(st.sampled_from(list(OPTIMIZERS))),
    )
    model = CostModel(network, graph, options)
    strategy = random_strategy(model, data)
    again = {
        name: replace(config, recompute=network.differentiates(network[name]) and data.draw(st.booleans()))
        for name, config in strategy.items()
    }
    others = [random_strategy(model, data), again]
    configs = {name: tuple(dict.fromkeys([o[name] for o in others] + [c])) for name, c in strategy.items()}
    found, more, tables = price(model, strategy), price(model, again, memory_bytes=0.0), model.tables(configs)
    assert found.step_time_s == pytest.approx(tables.price(strategy))
    assert more.step_time_s == pytest.approx(tables.price(again))
    assert more.step_time_s >= found.step_time_s
    assert all(more.bytes[kind] >= found.bytes[kind] for kind in found.bytes)
    assert more.bytes["sync"] == found.bytes["sync"]
    assert found.step_time_s == pytest.approx(price(CostModel(network, graph, options), strategy).step_time_s)
    terms = ("compute", "transfer", "sync", "statistics", "reduction")
    assert found.step_time_s == pytest.approx(sum(p.seconds[t] for p in found.layers.values() for t in terms))


def test_where_the_samples_come_from_is_part_of_the_price() -> None:
    """Channels over 4 devices: each of them needs all samples of the input, of which it has a quarter."""
    network, graph = classifier(batch=4, features=8), brute.machine((4,))
    strategy = {"conv": Config.of({"c": 4}), "linear": Config.of({"c": 4})}
    sample, free = (price(CostModel(network, graph, CostOptions(io=io)), strategy) for io in ("sample", "free"))
    assert free.layers["conv"].seconds["transfer"] == free.bytes["transfer"] == 0
    inputs, outputs = 3 * 4 * 4 * 6 * 4, 2 * 3 * 4 * 8 * 5 // 4 * 4
    assert sample.layers["conv"].bytes["transfer"] == inputs
    assert sample.layers["outputs"].bytes["transfer"] == outputs
    assert sample.bytes["transfer"] == inputs + outputs
    level = graph.levels[0]
    busiest = 3 * (level.alpha_s + 1 * 4 * 6 * 4 * level.beta_s_per_byte)
    assert sample.layers["conv"].seconds["transfer"] == pytest.approx(busiest)


# ---- memory ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", list(OPTIMIZERS))
def test_memory_of_a_layer_by_hand(optimizer: str) -> None:
    """One linear layer and its input, all float32: the busiest device's boxes."""
    b = GraphBuilder("one")
    x = b.input("x", TensorSpec((8, 6), ("n", None)))
    network = b.finish([networks.add(b, "linear", Linear(10), [x])])
    model = CostModel(network, brute.machine((4,)), CostOptions(optimizer=optimizer))
    copies = 2 + OPTIMIZERS[optimizer]
    data = price(model, {"linear": Config.of({"n": 4})})
    assert data.layers["linear"].memory_bytes == 4 * (copies * (60 + 10) + 2 * 10)
    split = price(model, {"linear": Config.of({"c": 4})})
    assert split.layers["linear"].memory_bytes == 4 * (copies * (6 * 3 + 3) + 8 * 3 + 8 * 6)  # gathers the whole input


def test_after_a_reduction_a_device_gathers_only_what_it_owns() -> None:
    """k over two devices, its sums scattered over 3 channels as 1 and 2: bias, addend and sum follow these."""
    b = GraphBuilder("added")
    x, y = b.input("x", TensorSpec((4, 6), ("n", None))), b.input("y", TensorSpec((4, 3), ("n", "c")))
    x = networks.add(b, "linear", Linear(3), [x])
    network = fuse(b.finish([networks.add(b, "add", Binary("add"), [x, y])]))
    found = price(CostModel(network, brute.machine((2,))), {"linear": Config.of({"k": 2})}).layers["linear"]
    gathered, parameters, made = 4 * 3 + 4 * 2, 3 * 3 + 2, 4 * 3 + 4 * 2
    assert found.memory_bytes == 4 * (gathered + 2 * parameters + made)


def test_a_tied_parameter_is_held_once_and_updated_once() -> None:
    b = GraphBuilder("tied")
    ids = b.input("ids", TensorSpec((4, 3), ("n", "s"), "int64"))
    weight = b.tied("weight", TensorSpec((8, 6), (None, "c")))
    x = networks.add(b, "embed", Embedding(8, 6), [ids], [weight])
    network = b.finish([networks.add(b, "decode", Linear(8, bias=False), [x], [weight])])
    model = CostModel(network, brute.machine((2,)), CostOptions(optimizer="adam"))
    for degree in (1, 2):
        found = price(model, {"weight": Config.of({"c": degree}), "embed": Config(), "decode": Config()})
        assert found.layers["weight"].memory_bytes == (2 + 2) * 4 * 8 * 6 // degree
        bandwidth = model.devices.processor.memory_bandwidth_bytes_per_s
        assert found.layers["weight"].seconds["compute"] == pytest.approx(18 * 4 * 8 * 6 / degree / bandwidth)
        assert found.bytes["sync"] == (2 * 4 * 8 * 6 if degree == 1 else 0)  # uncut, both devices have it
    assert (model.node_cost(network["decode"], (Config(),)).compute.update == 0).all()


@given(NETWORKS, st.data())
@examples(18)
def test_memory_covers_every_device(network: LayerGraph, data: st.DataObject) -> None:
    """Parameters with their gradients, what the layer makes, and what it gathers from others: of each device."""
    model = CostModel(network, brute.machine((2, 6)), CostOptions(io="sample"))
    strategy = random_strategy(model, data)
    found = price(model, strategy)
    for layer in network.inner:
        part = {device for device, *_ in brute.holdings(strategy[layer.name], layer.space, 6)}
        for device, cell, own in brute.holders(strategy[layer.name], layer.space, 6, unfed=layer.name in network.unfed):
            held = 0
            for _, p in layer.own_parameters():
                box = brute.need(p.maps, own if p.epilogue else cell)
                held += (2 if p.trainable else 1) * box.volume * layer.out.item_bytes
            if device not in part:
                assert held <= found.layers[layer.name].memory_bytes
                continue
            held += own.volume * layer.out.item_bytes * (layer.role is not Role.TIED)  # it is a parameter itself
            for slot, name in enumerate(layer.inputs):
                source = model.graph[name]
                if name in network.unfed and strategy[name].total == 1:  # computed everywhere: counted there
                    continue
                maps, epilogue = brute.input_of(layer, slot)
                config = strategy[layer.name]
                ends = source.space, strategy[name], layer.space, maps, epilogue, config, 6
                row = brute.exchanged(*ends)[device]
                if row.sum() > row[device]:
                    held += int(row.sum()) * source.out.item_bytes
            assert held <= found.layers[layer.name].memory_bytes, f"{layer.name}: device {device}"


# ---- what a user may get wrong ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"convolution": Config()}, "unknown layers \\['convolution'\\]"),
        ({"conv": None}, "no configuration for \\['conv'\\]"),
        ({"conv": Config.of({"h": 2})}, "'conv'.*'h'"),
        ({"conv": Config.of({"c": 8})}, "'conv'.*c=8 is more than the 7"),
        ({"conv": Config.of({"n": 3, "c": 2})}, "'conv'.*needs 6 devices, there are 4"),
    ],
)
def test_a_strategy_that_does_not_fit_the_model(change: dict[str, Config | None], said: str) -> None:
    model = CostModel(classifier(batch=4), brute.machine((4,)))
    strategy = {"conv": Config(), "linear": Config()} | change
    with pytest.raises(LayerwiseError, match=said):
        price(model, {name: config for name, config in strategy.items() if config is not None})


DOCS = Path(__file__).parents[2] / "docs" / "explanation" / "cost_model.md"


@pytest.mark.parametrize("term", TERMS, ids=lambda term: term.name)
def test_the_equation_is_in_the_docs(term: Term) -> None:
    assert f"\n({term.equation})" in DOCS.read_text(encoding="utf-8")


def test_names_are_distinct_and_phases_whole() -> None:
    assert len({term.name for term in TERMS}) == len(TERMS) == len(LAYER_TERMS) + len(EDGE_TERMS) + 1  # and t_C
    assert all(sum(term.phases.values()) == 1 for term in LAYER_TERMS)


DEVICES = (2, 4)  # nodes of 2, 4 in all


def deep(layers: int, track: bool = True) -> LayerGraph:
    """Tanh after a norm of all samples, over and over."""
    b = GraphBuilder("deep")
    x = b.input("x", TensorSpec((64, 16), ("n", "c")))
    for i in range(layers):
        x = add(b, f"linear{i}", Linear(16), [x])
        x = add(b, f"tanh{i}", Unary("tanh"), [add(b, f"norm{i}", BatchNorm(track=track), [x])])
    return b.finish([add(b, "head", Linear(4), [x])])


def test_a_layer_costs_its_forward_pass_once_more() -> None:
    model = CostModel(deep(1, track=False), brute.machine(DEVICES))
    for layer in model.graph.inner:
        cut = {"c": 2, "k": 2} if isinstance(layer.op, Linear) else {"c": 4}
        for config in (Config(), Config.of({"n": 4}), Config.of(cut)):
            cost = model.node_cost(layer, (config, replace(config, recompute=True)))
            plain, again = ({term: float(s[i]) for term, s in cost.seconds.items()} for i in range(2))
            assert again["compute"] == pytest.approx(plain["compute"] + cost.compute.forward[0])
            assert again["reduction"] == pytest.approx(1.5 * plain["reduction"])
            # Forward as many messages as back, of twice the bytes: between a half and two thirds.
            assert 1.5 * plain["statistics"] <= again["statistics"] <= 5 / 3 * plain["statistics"]
            assert again["sync"] == plain["sync"]
            assert (plain["statistics"] > 0) == ("norm" in layer.name and config["n"] > 1)
            assert (plain["reduction"] > 0) == (config["k"] > 1)


def test_what_it_is_made_of_travels_once_more() -> None:
    model = CostModel(deep(1), brute.machine(DEVICES))
    source, target = Config.of({"n": 4}), Config.of({"c": 4})
    for name, directions in ((("x", "linear0", 0), 1), (("linear0", "norm0", 0), 2)):
        assert model.directions(name) == directions
        again = replace(target, recompute=True)
        costs = model.edge_cost(name, (source, replace(source, recompute=True)), (target, again))
        assert costs[0].tolist() == costs[1].tolist()  # of the target alone
        assert costs[0, 0] > 0
        assert costs[0, 1] == pytest.approx(costs[0, 0] * (1 + 1 / directions))


def test_a_deep_network_keeps_what_crosses_blocks_and_one_block() -> None:
    """Of 3 x 16 tensors a column each: kept is about the root, as of Chen et al., 2016."""
    network = deep(16)
    model = CostModel(network, brute.machine((1,)))
    plain = {layer.name: Config() for layer in network.inner}
    again = {name: Config(recompute=name in recomputable(network)) for name in plain}
    with_all, with_few = (float(peak_bytes(model, complete(model, s))[0]) for s in (plain, again))
    tensor = 64 * 16 * 4
    assert with_all - with_few > 20 * tensor
    one = plain | {"norm3": Config(recompute=True)}  # a single one: its input is kept, but for its neighbour, too
    assert peak_bytes(model, complete(model, one))[0] <= with_all + 8 * 16 * 4


def test_what_has_no_backward_pass_is_refused() -> None:
    network = deep(1).freeze(["linear0.weight", "linear0.bias"])
    model = CostModel(network, brute.machine((1,)))
    strategy = {layer.name: Config(recompute=layer.name == "linear0") for layer in network.inner}
    with pytest.raises(LayerwiseError, match="layer 'linear0': nothing of it is kept for a backward pass"):
        price(model, strategy)
