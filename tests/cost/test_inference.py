"""Inference: the forward pass of a step alone, priced, simulated and held in memory by the same laws."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import SearchSpace
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete, price
from layerwise.cost.timeline.simulate import timeline
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load as load_profile
from layerwise.search.find import search
from tests.cost.test_price import NETWORKS, random_strategy
from tests.examples import examples


def models(
    network: LayerGraph, profile: str, devices: int, io: Literal["sample", "free"]
) -> tuple[CostModel, CostModel]:
    """Of inference, and of training."""
    machine = load_profile(profile).device_graph(devices, min(devices, 2))
    options = CostOptions(io=io)
    return CostModel(network, machine, replace(options, kind="inference")), CostModel(network, machine, options)


@given(
    NETWORKS,
    st.sampled_from(["p100", "cpu"]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from(["sample", "free"]),
    st.data(),
)
@examples(30)
def test_it_is_a_part_of_training(
    network: LayerGraph, profile: str, devices: int, io: Literal["sample", "free"], data: st.DataObject
) -> None:
    """t_C is the forward part, nothing is summed or gathered, tensors go one way, and less memory is needed."""
    inference, training = models(network, profile, devices, io)
    strategy = complete(inference, random_strategy(inference, data))
    mine, whole = price(inference, strategy), price(training, strategy)
    for layer in network.layers:
        configs = (strategy[layer.name],)
        forward = training.node_cost(training.graph[layer.name], configs).compute.forward
        here = inference.node_cost(inference.graph[layer.name], configs)
        assert here.compute.total == pytest.approx(forward)
        for term in ("sync", "gather"):
            assert here.seconds[term] == 0
        assert mine.layers[layer.name].seconds["transfer"] <= whole.layers[layer.name].seconds["transfer"]
    assert mine.bytes["sync"] == mine.bytes["gather"] == 0
    assert mine.memory_bytes <= whole.memory_bytes
    step = timeline(inference, strategy)
    assert step.backward_s == step.exposed_sync_s == 0
    assert step.total_s <= timeline(training, strategy).total_s
    assert (peak_bytes(inference, strategy) <= peak_bytes(training, strategy)).all()


@pytest.mark.parametrize("name", ["lenet5", "resnet18"])
def test_batch_norms_have_running_statistics(name: str) -> None:
    inference, _ = models(fuse(load_model(name, 32)), "p100", 4, "sample")
    strategy = {layer.name: inference.end_config(layer) for layer in inference.graph.inner}
    assert price(inference, strategy).bytes["statistics"] == 0


def test_it_is_chosen_by_its_own_time() -> None:
    """VGG's last layers are split in training, whose gradients are dear; what inference chooses is best for it."""
    inference, training = models(fuse(load_model("vgg16", 64)), "p100", 4, "sample")
    space = SearchSpace(4)
    found, other = search(inference, space), search(training, space)
    assert found.optimum.proven
    assert found.optimum.cost_s <= price(inference, other.additive.strategy).step_time_s * (1 + 1e-9)
    assert found.best.timeline.total_s <= timeline(inference, complete(inference, other.best.strategy)).total_s * 1.03
    assert other.optimum.cost_s > 2 * found.optimum.cost_s
