"""The law: where the closed forms' assumptions hold, `as-run` and the cost tables agree, phase by phase."""

from dataclasses import fields, replace
from functools import cache
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from benchmarks.paradl.facts import facts_of
from benchmarks.paradl.project import case_of, project
from layerwise.cost.model import CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.importers.torch.from_torch import from_torch
from layerwise.machine import LinkLevel, Profile, load
from layerwise.oracle.phases import Phases, phases_of
from layerwise.oracle.question import Oracle, Question
from layerwise.oracle.strategies import Wishes, strategy
from tests.examples import examples

ALONE = [f.name for f in fields(Phases) if f.name.endswith("_s") and f.name not in ("gather_s", "reduce_s")]


def uniform(latency_s: float, bandwidth: float) -> Profile:
    """One node of 64 devices, a link each: no busy port, no hierarchy."""
    level = LinkLevel("node", 64, latency_s, bandwidth, 1)
    return Profile("uniform", "", load("v100").processor, (level,), {})


@cache
def network(channels: tuple[int, ...], kernel: int) -> LayerGraph:
    """A chain of convolutions that keep the size, a pooling between them, and two linear layers."""
    layers: list[nn.Module] = []
    for before, after in pairwise((4, *channels)):
        layers += [nn.Conv2d(before, after, kernel, padding=kernel // 2), nn.ReLU()]
    layers.insert(2, nn.MaxPool2d(2))
    layers += [nn.Flatten(), nn.Linear(channels[-1] * 256, 16), nn.ReLU(), nn.Linear(16, 8)]
    return fuse(from_torch(nn.Sequential(*layers), (torch.zeros(2, 4, 32, 32),)))


def answer(
    graph: LayerGraph, machine: Profile, name: str, devices: int, batch: int, inside: int
) -> tuple[Phases, Phases]:
    """By the tables and by the closed form, of one grid."""
    wishes = Wishes(inside, dims=("h",))
    question = Question(graph, machine, batch, "strong", wishes=wishes, options=CostOptions(io="free"))
    found = Oracle(question).answer(name, devices)
    facts = facts_of(graph.rebatch(batch), machine, options=question.options)
    segments = question.segments_at(devices) if name == "pipeline" else None
    case = case_of(name, facts, devices, batch, segments=segments, wishes=wishes, shape=found.shape)
    return found.projection.phases, project(case, "as-run").phases


@examples(20)
@given(
    name=st.sampled_from(["serial", "data", "spatial", "filter", "channel", "pipeline", "df", "ds"]),
    channels=st.sampled_from([(8, 16), (24, 8, 16)]),
    kernel=st.sampled_from([1, 3, 5]),
    inside=st.sampled_from([2, 4]),
    groups=st.sampled_from([2, 4]),
    latency=st.floats(1e-7, 1e-4),
    bandwidth=st.floats(1e9, 1e11),
)
def test_closed_forms_are_the_tables(
    name: str, channels: tuple[int, ...], kernel: int, inside: int, groups: int, latency: float, bandwidth: float
) -> None:
    """Even splits, uniform links, and (spatial) cells with one neighbour or two alike."""
    devices = 1 if name == "serial" else inside * groups if name in ("df", "ds") else inside
    graph = network(channels, kernel)
    by_tables, by_form = answer(graph, uniform(latency, bandwidth), name, devices, 16, inside)
    for phase in ALONE:
        assert getattr(by_form, phase) == pytest.approx(getattr(by_tables, phase), rel=1e-6, abs=1e-12), phase
    collectives = by_tables.gather_s + by_tables.reduce_s  # a scatter counts as either
    assert by_form.gather_s + by_form.reduce_s == pytest.approx(collectives, rel=1e-6, abs=1e-12)


def test_across_nodes_the_tables_know_more() -> None:
    """Rings in nodes, then between them, or messages of V100 that share a NIC: not the one ring of the closed form."""
    graph = network((8, 16), 3)
    tables, closed = answer(graph, load("v100"), "filter", 8, 16, 8)
    assert tables.gather_s < 0.9 * closed.gather_s
    tables, closed = answer(graph, replace(load("v100"), backend="gloo"), "filter", 8, 16, 8)
    assert tables.gather_s > 1.1 * closed.gather_s


@pytest.mark.parametrize("devices", [8, 32])
def test_filters_before_channels(devices: int) -> None:
    """As measured of ResNet-50 on V100 across nodes, 64 samples a step (abci_v100.json)."""
    graph = fuse(load_model("resnet50", 1))
    oracle = Oracle(Question(graph, load("v100"), 64, "strong"))
    by_filter, by_channel = (oracle.answer(name, devices).overlapped_s for name in ("filter", "channel"))
    assert by_filter < by_channel


def test_phases_of_a_searched_plan_are_its_step() -> None:
    """What is computed and sent once more, for memory, too."""
    oracle = Oracle(Question(network((8, 16), 3), uniform(1e-6, 1e9), 16, "strong"))
    model = oracle.model(4)
    shape = oracle.shapes("filter", 4)[0]
    plain = strategy(model.graph, "filter", shape)
    again = {name: replace(c, recompute=name != model.graph.inner[-1].name) for name, c in plain.items()}
    once, twice = (phases_of(model, plan) for plan in (plain, again))
    assert [p.total_s for p in (once, twice)] == pytest.approx([price(model, s).step_time_s for s in (plain, again)])
    assert twice.compute_s > once.compute_s
