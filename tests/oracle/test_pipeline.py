"""Stages of a pipeline: balanced as well as can be, and priced as GPipe runs them."""

from dataclasses import replace
from itertools import combinations, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load as load_profile
from layerwise.machine.curves import Curve, Links
from layerwise.oracle.pipeline import (
    PipelineStage,
    balanced,
    crossing_bytes,
    cuts_of,
    imbalance,
    pipeline_phases,
    pipeline_stages,
    pipelined_s,
)


@given(st.lists(st.integers(0, 20), min_size=1, max_size=8), st.data())
def test_no_other_cuts_are_better(costs: list[int], data: st.DataObject) -> None:
    parts = data.draw(st.integers(1, len(costs)))
    cuts = balanced([float(c) for c in costs], parts)

    def dearest(at: tuple[int, ...]) -> int:
        return max(sum(costs[a:b]) for a, b in pairwise((0, *at, len(costs))))

    assert cuts[0] == 0
    assert cuts[-1] == len(costs)
    assert all(a < b for a, b in pairwise(cuts))
    assert len(cuts) == parts + 1
    every = combinations(range(1, len(costs)), parts - 1)
    assert dearest(tuple(cuts[1:-1])) == min(dearest(at) for at in every)


def model(name: str = "vgg16", batch: int = 32, devices: int = 4) -> CostModel:
    return CostModel(fuse(load_model(name, batch)), load_profile("v100").device_graph(devices), CostOptions(io="free"))


def test_stages_hold_every_layer_once() -> None:
    priced = model()
    found = pipeline_stages(priced, 4, 8)
    assert [name for stage in found for name in stage.layers] == [layer.name for layer in priced.graph.inner]
    assert imbalance(found) >= 0


def test_a_cut_passes_what_is_used_later() -> None:
    graph = fuse(load_model("vgg16", 2))
    passed = crossing_bytes(graph)
    assert passed["features.0"] == 4 * graph["features.0"].out.volume
    resnet = fuse(load_model("resnet18", 2))
    blocks = crossing_bytes(resnet)
    # Inside a block its input travels, too, for the residual connection.
    inside, before = blocks["layer1.0.conv1"], resnet["maxpool"].out.volume * 4
    assert inside == before + 4 * resnet["layer1.0.conv1"].out.volume


def test_gpipe_takes_a_turn_for_each_segment_and_stage() -> None:
    """GPipe: (p + S - 1) turns of the slowest stage, 2(p + S - 2) passings of the largest activation."""
    priced = model()
    found = pipeline_stages(priced, 4, 8)
    phases = pipeline_phases(found, 8, priced.devices)
    slowest = max(s.forward_s for s in found) + max(s.backward_s for s in found)
    assert phases.compute_s == pytest.approx(11 * slowest)
    assert phases.update_s == pytest.approx(max(s.update_s for s in found) + 10 * max(s.accumulate_s for s in found))
    link = priced.devices.levels[0]
    largest = max(link.alpha_s + s.passed_bytes * link.beta_s_per_byte for s in found[:-1])
    assert phases.passing_s == pytest.approx(20 * largest)
    assert phases.gradient_s == phases.halo_s == phases.gather_s == 0


SECONDS = st.floats(0, 1)


STAGES = st.builds(PipelineStage, st.just(()), SECONDS, SECONDS, SECONDS, st.just(0.0), st.floats(0, 1e10), SECONDS)


@given(st.lists(STAGES, min_size=1, max_size=5), st.integers(1, 6))
def test_a_simulated_pipeline_takes_no_longer_than_its_phases(found: list[PipelineStage], segments: int) -> None:
    devices = load_profile("v100").device_graph(8)
    took = pipelined_s(found, segments, devices)
    assert took <= pipeline_phases(found, segments, devices).total_s + 1e-9
    busiest = max(segments * (s.forward_s + s.backward_s) + (segments - 1) * s.accumulate_s + s.update_s for s in found)
    assert took >= busiest - 1e-9


def test_a_simulated_pipeline_of_equal_stages() -> None:
    """4 stages, 8 segments: 11 turns each way, and without a bubble behind a link that is slower than they are."""
    devices = load_profile("v100").device_graph(4)
    link = devices.levels[0]
    found = [PipelineStage((), 2.0, 3.0, 0.5, 0.0, 0.0)] * 4
    assert pipelined_s(found, 8, devices) == pytest.approx(11 * 5.0 + 0.5, rel=1e-4)
    slow = [PipelineStage((), 2.0, 3.0, 0.5, 0.0, 10.0 / link.beta_s_per_byte)] * 2
    assert pipelined_s(slow, 8, devices) == pytest.approx((2 + 8 * 10 + 2) + (3 + 8 * 10 + 3) + 0.5, rel=1e-4)


def test_segments_add_up_their_gradients() -> None:
    """Momentum moves 8 tensors, an addition 3, a division 2: on one stage 7 additions in 8 segments, and a division."""
    options = CostOptions(optimizer="momentum")
    priced = CostModel(fuse(load_model("vgg16", 32)), load_profile("v100").device_graph(1), options)
    (one,), (stage,) = pipeline_stages(priced, 1, 1), pipeline_stages(priced, 1, 8)
    assert one.accumulate_s == 0.0
    assert stage.accumulate_s == pytest.approx(one.update_s * 3 / 8)
    assert stage.update_s == pytest.approx(one.update_s * 10 / 8)
    bare = pipelined_s([replace(stage, accumulate_s=0.0)], 8, priced.devices)
    assert pipelined_s([stage], 8, priced.devices) - bare == pytest.approx(7 * stage.accumulate_s)
    largest = 4 * 25088 * 4096  # this gradient is there twice
    assert stage.memory_bytes - one.memory_bytes == pytest.approx(largest)


def test_given_cuts_are_kept() -> None:
    priced = model()
    cuts = [0, 1, 2, 3, len(priced.graph.inner)]
    found = pipeline_stages(priced, 4, 8, cuts)
    assert [len(stage.layers) for stage in found[:3]] == [1, 1, 1]
    assert cuts_of(found) == cuts
    assert pipeline_stages(priced, 4, 8, cuts_of(pipeline_stages(priced, 4, 8))) == pipeline_stages(priced, 4, 8)


def test_what_is_passed_takes_what_a_message_took() -> None:
    """The measured curve of one message between the two nodes, where there is one."""
    knots = ((0.0, 1e-3), (1e6, 5e-3))
    links = Links((Curve("message", (1, 2), 1, knots), Curve("exchange", (1, 2), 1, ((0.0, 1.0), (1e6, 2.0)))))
    devices = replace(load_profile("cpu").device_graph(2, 1), links=links)
    found = [PipelineStage((), 0.0, 0.0, 0.0, 0.0, 5e5)] * 2
    assert pipelined_s(found, 1, devices) == pytest.approx(2 * 3e-3)


def test_one_stage_is_one_device() -> None:
    priced = model(devices=1)
    phases = pipeline_phases(pipeline_stages(priced, 1, 1), 1, priced.devices)
    assert phases.passing_s == 0
    whole = [priced.node_cost(layer, (Config(),)).compute.total[0] for layer in priced.graph.inner]
    assert phases.total_s == pytest.approx(float(sum(whole)))
    serial = price(priced, {layer.name: Config() for layer in priced.graph.inner})
    held = sum(layer.memory_bytes for layer in serial.layers.values())  # the network's input, too
    assert phases.memory_bytes == pytest.approx(held)
