"""Recomputed layers: what they cost once more, in seconds and bytes, and what they leave of a step's memory."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel
from layerwise.cost.price import complete, price
from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer import LayerGraph
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.tensor.pointwise import Unary
from layerwise.partition.blocks import recomputable
from layerwise.tensor import TensorSpec
from tests.cost import brute
from tests.cost.networks import add
from tests.cost.test_price import NETWORKS, random_strategy
from tests.examples import examples

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


@given(NETWORKS, st.data())
@examples(30)
def test_tables_have_what_a_strategy_is_priced_at(network: LayerGraph, data: st.DataObject) -> None:
    model = CostModel(network, brute.machine((2, 6)))
    plain = complete(model, random_strategy(model, data))
    again = {
        name: replace(config, recompute=network.differentiates(network[name]) and data.draw(st.booleans()))
        for name, config in plain.items()
    }
    tables = model.tables({name: (plain[name], again[name]) for name in plain})
    for strategy in (plain, again):
        assert tables.price(strategy) == pytest.approx(price(model, strategy, memory_bytes=0.0).step_time_s)
    more, less = price(model, again, memory_bytes=0.0), price(model, plain, memory_bytes=0.0)
    assert more.step_time_s >= less.step_time_s
    assert all(more.bytes[kind] >= less.bytes[kind] for kind in less.bytes)
    assert more.bytes["sync"] == less.bytes["sync"]


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


@given(NETWORKS, st.data())
@examples(30)
def test_a_step_with_recompute_lets_go_of_all_that_it_takes(network: LayerGraph, data: st.DataObject) -> None:
    """Storages are dropped as often as they are held: the tracker asserts it. Nothing is below the parameters'."""
    model = CostModel(network, brute.machine((2, 4)))
    strategy = complete(model, random_strategy(model, data))
    again = {
        name: replace(config, recompute=network.differentiates(network[name]) and data.draw(st.booleans()))
        for name, config in strategy.items()
    }
    found = peak_bytes(model, again)
    assert np.isfinite(found).all()
    assert (found > 0).any()


def test_what_has_no_backward_pass_is_refused() -> None:
    network = deep(1).freeze(["linear0.weight", "linear0.bias"])
    model = CostModel(network, brute.machine((1,)))
    strategy = {layer.name: Config(recompute=layer.name == "linear0") for layer in network.inner}
    with pytest.raises(LayerwiseError, match="layer 'linear0': nothing of it is kept for a backward pass"):
        price(model, strategy)
