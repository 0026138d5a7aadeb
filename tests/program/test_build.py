"""The laws of a program, on random networks and strategies."""

from collections import Counter
from dataclasses import replace
from typing import Literal

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from layerwise.config import Config
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.cost.step_facts import step_facts
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.from_torch import from_torch
from layerwise.machine import load
from layerwise.ops.base import Role
from layerwise.program import Instruction, Program, StepKind, StrategyFacts, program
from layerwise.program.instructions import (
    AllGather,
    Arrive,
    Begin,
    Compute,
    End,
    Fill,
    Forget,
    Free,
    Keep,
    Move,
    Output,
    Release,
    Update,
)
from tests.cost.test_price import NETWORKS
from tests.examples import examples
from tests.program.strategies import any_strategy

IO = st.sampled_from(["sample", "free", "boxes"])
PROFILE = st.sampled_from(["cpu", "h100"])


def made(
    network: LayerGraph, profile: str, io: Literal["sample", "free", "boxes"], data: st.DataObject, kind: StepKind
) -> tuple[CostModel, StrategyFacts, Program]:
    model = CostModel(network, load(profile).device_graph(4, 4), CostOptions(io=io))
    facts, _ = step_facts(model, any_strategy(model, data))
    return model, facts, program(model.graph, io, facts, kind)


def positions(step: Program, kind: type[Instruction]) -> list[Instruction]:
    return [one for one in step.instructions if type(one) is kind]


@given(NETWORKS, PROFILE, IO, st.data())
@examples(60)
def test_transfers_gathers_and_sums_are_paired(
    network: LayerGraph, profile: str, io: Literal["sample", "free", "boxes"], data: st.DataObject
) -> None:
    """Each Begin has its End, each AllGather its Arrive; every gradient is in one bucket, and that in one Fill."""
    _, facts, step = made(network, profile, io, data, "training")
    under_way, gathering, full = Counter[object](), Counter[object](), Counter[str]()
    for one in step.instructions:
        if isinstance(one, Begin):
            under_way[one.layer, one.slot, one.way] += 1
        elif isinstance(one, End):
            under_way[one.layer, one.slot, one.way] -= 1
        elif isinstance(one, AllGather):
            gathering[one.what] += 1
        elif isinstance(one, Arrive):
            gathering[one.what] -= 1
            full[one.layer] += one.what == one.layer
        elif isinstance(one, Release):
            full[one.layer] -= 1
        for counted in (under_way, gathering, full):
            assert all(0 <= number <= 1 for number in counted.values())
    assert not any(under_way.values())
    assert not any(gathering.values())
    filled = [b for one in step.instructions if isinstance(one, Fill) for b in one.buckets]
    assert sorted(filled) == list(range(len(step.buckets)))
    members = sorted(i for bucket in step.buckets for i in bucket.gradients)
    assert members == list(range(len(facts.gradients)))
    assert type(step.instructions[-1]) is Update
    check_sums(facts, step)


def check_sums(facts: StrategyFacts, step: Program) -> None:
    """Nothing is summed before it is computed."""
    ready = {one.layer: i for i, one in enumerate(step.instructions) if isinstance(one, Compute)}
    for i, one in enumerate(step.instructions):
        for b in one.buckets if isinstance(one, Fill) else ():
            assert all(ready[facts.gradients[g].layer] < i for g in step.buckets[b].gradients)


def test_a_sum_waits_for_a_layer_behind_parameters_that_are_inputs() -> None:
    """Buckets have these last, as the weight norm's here, and the backward pass in their place."""
    last = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    graph = fuse(from_torch(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), last), torch.zeros(4, 8)))
    model = CostModel(graph, load("cpu").device_graph(2, 2))
    strategy = {layer.name: Config() for layer in graph.inner}
    strategy = complete(model, strategy | {"0": replace(Config.of({"n": 2}), states="sharded")})
    facts, _ = step_facts(model, strategy)
    check_sums(facts, program(model.graph, "sample", facts))
    assert peak_bytes(model, strategy).all()


@given(NETWORKS, PROFILE, IO, st.sampled_from(["training", "inference"]), st.data())
@examples(60)
def test_what_a_layer_reads_is_there(
    network: LayerGraph, profile: str, io: Literal["sample", "free", "boxes"], kind: StepKind, data: st.DataObject
) -> None:
    """Inputs are received before a layer computes; no value is read after it was freed, and each is freed once."""
    model, _, step = made(network, profile, io, data, kind)
    graph, values, saved = model.graph, set[str](), dict[str, set[str]]()
    received = Counter[tuple[str, str]]()
    blocks = {one.layer: one.block for one in step.instructions if isinstance(one, Keep)}
    for one in step.instructions:
        if isinstance(one, Begin | Move) and one.way != "backward":
            source = graph[one.layer].inputs[one.slot]
            assert source in values | (saved.get(blocks.get(one.layer, ""), set()) if one.way == "recompute" else set())
        if isinstance(one, End | Move) and one.way != "backward":
            received[one.layer, one.way] += 1
        elif isinstance(one, Keep):
            saved.setdefault(one.block, set()).update(graph[one.layer].inputs)
        elif isinstance(one, Compute) and one.part in ("forward", "recompute"):
            assert received.pop((one.layer, one.part), 0) == len(graph[one.layer].inputs)
            assert one.layer not in values
            values.add(one.layer)
        elif isinstance(one, Free):
            values.remove(one.value)
        elif isinstance(one, Forget):
            del saved[one.block]
    assert not saved
    assert not values - {layer.name for layer in graph.layers if not graph.consumers()[layer.name]}


@given(NETWORKS, PROFILE, st.data())
@examples(40)
def test_gradients_travel_back_in_reverse(network: LayerGraph, profile: str, data: st.DataObject) -> None:
    """Every gradient that is wanted goes back once, of later layers first, and inputs in the reverse of their order."""
    model, _, step = made(network, profile, "sample", data, "training")
    graph = model.graph
    forth = [(one.layer, one.slot) for one in step.instructions if isinstance(one, Move) and one.way == "forward"]
    back = [(one.layer, one.slot) for one in step.instructions if isinstance(one, Move) and one.way == "backward"]
    wanted = {(layer.name, i) for layer in graph.layers for i, flows in enumerate(graph.flows_back(layer)) if flows}
    begun = {(one.layer, one.slot) for one in step.instructions if isinstance(one, Begin) and one.way == "backward"}
    assert wanted == begun | set(back)
    assert len(back) == len(set(back))
    assert back == [end for end in reversed(forth) if end in set(back)]


@given(NETWORKS, PROFILE, st.data())
@examples(30)
def test_inference_is_the_forward_pass_of_what_is_returned(
    network: LayerGraph, profile: str, data: st.DataObject
) -> None:
    model, facts, step = made(network, profile, "sample", data, "inference")
    assert not positions(step, Fill)
    assert not positions(step, Update)
    assert not positions(step, Keep)
    assert len(positions(step, Output)) == 1
    computed = {one.layer for one in step.instructions if isinstance(one, Compute)}
    assert not any(one.saves for one in step.instructions if isinstance(one, Compute))
    training = program(model.graph, "sample", facts)
    forward = [one.layer for one in training.instructions if isinstance(one, Compute) and one.part == "forward"]
    assert [one.layer for one in step.instructions if isinstance(one, Compute)] == [n for n in forward if n in computed]
    needed = set(model.graph.layers[-1].inputs)
    for layer in reversed(model.graph.layers):
        if layer.name in needed:
            needed |= set(layer.inputs)
    assert computed == {name for name in needed if model.graph[name].role is not Role.SINK}
