"""Unequal devices: their weights, the time of each kind, and elimination over all weights is exact."""

from dataclasses import replace
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import MAX_WEIGHT, Config, SearchSpace, parse, parse_weights
from layerwise.cost.memory.course import course
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.timeline.simulate import timeline
from layerwise.cost.unequal import balanced, weight_vectors
from layerwise.errors import LayerwiseError
from layerwise.geometry import in_proportion
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.baselines import baseline, configurations
from layerwise.search.curve import memory_curve
from layerwise.search.find import candidate, search
from layerwise.search.report.sentences import unequal_lines
from tests.examples import examples
from tests.importers.networks import chain, residual

KINDS = ("cpu,kinds=cpu:1+cpu@0.5:1", "cpu,kinds=cpu@0.25:1+cpu:2", "cpu,kinds=cpu@0.5:2+cpu:1,link=10Gb/s")


def model_of(graph: LayerGraph, profile: str) -> CostModel:
    devices = load(profile)
    return CostModel(fuse(graph), devices.device_graph(len(devices.kind_of)))


@given(st.integers(1, 60), st.lists(st.integers(1, 9), min_size=1, max_size=6))
def test_boxes_are_in_proportion_and_none_is_empty(length: int, weights: list[int]) -> None:
    if length < len(weights):
        return
    ends = in_proportion(length, tuple(weights))
    assert (ends[0], ends[-1]) == (0, length)
    assert (np.diff(ends) > 0).all()
    if len(set(weights)) > 1 and length * min(weights) >= sum(weights):
        wanted = length * np.cumsum(weights) / sum(weights)
        assert (np.abs(ends[1:] - wanted) <= 0.5).all()


@given(st.sampled_from([chain(8), residual(8)]), st.sampled_from(KINDS), st.booleans())
@examples(6)
def test_elimination_is_exact_over_all_weights(graph: LayerGraph, profile: str, io_free: bool) -> None:
    """Against every strategy there is, on all devices or fewer; of three layers, as there are so many."""
    devices = load(profile)
    options = CostOptions(io="free" if io_free else "auto")
    model = CostModel(fuse(graph), devices.device_graph(len(devices.kind_of)), options)
    space = SearchSpace(model.devices.count, dims=("n", "c"), weights=model.weights[:1])
    found = search(model, space, objective="additive")
    names = [layer.name for layer in model.graph.inner]
    configs = configurations(model, space, {})
    fixed = dict(found.additive.strategy)
    free = names[:3]
    tables = model.tables({name: configs[name] if name in free else (fixed[name],) for name in fixed})
    least = min(
        tables.price({**fixed, **dict(zip(free, choice, strict=True))})
        for choice in product(*(configs[n] for n in free))
    )
    assert found.optimum.proven
    assert found.additive.price.step_time_s == pytest.approx(least, rel=1e-6)
    assert any(config.weights for these in configs.values() for config in these)


def test_a_layer_takes_as_long_as_its_slowest_device() -> None:
    model = model_of(chain(8), KINDS[0])
    layer = next(layer for layer in model.graph.inner if layer.space.max_degree("n") == 8)
    even, fair, alone, fast = (
        Config.of({"n": 2}), Config.of({"n": 2}).weighted((2, 1)), Config().weighted((0, 1)), Config(),
    )  # fmt: skip
    cost = model.node_cost(layer, (even, fair, alone, fast))
    assert cost.compute.forward[2] == pytest.approx(2 * cost.compute.forward[3])
    assert (np.max([kind.forward for kind in cost.kinds], axis=0) == cost.compute.forward).all()
    assert [kind.forward[2] > 0 for kind in cost.kinds] == [False, True]
    assert cost.compute.forward[1] <= cost.compute.forward[0]


def test_a_layer_takes_as_long_as_its_slowest_device_also_with_shards_of_states() -> None:
    """Full updates take the L40S longer, whose memory is slower; half of them leave the A100 as the slower one."""
    devices = load("l40s,kinds=l40s:1+a100-80:1").device_graph(2)
    model = CostModel(fuse(load_model("mlp:4096x4096x10", 256)), devices, CostOptions(optimizer="adam"))
    config = Config.of({"n": 2})
    cost = model.node_cost(model.graph.inner[0], (config, replace(config, states="sharded")))
    each = np.array([kind.total for kind in cost.kinds])
    assert each.argmax(0).tolist() == [0, 1]
    assert (cost.compute.total == each.max(0)).all()


def test_a_step_of_unequal_devices_waits_for_the_slowest_only() -> None:
    """What each does by itself adds up on its own clock."""
    model = model_of(load_model("alexnet", 96), KINDS[0])
    shares = model.shares or ()
    strategy = {layer.name: Config.of({"n": 2}).weighted(shares) for layer in model.graph.inner}
    by_kind = [
        sum(float(model.node_cost(layer, (strategy[layer.name],)).kinds[k].total[0]) for layer in model.graph.inner)
        for k in (0, 1)
    ]
    assert timeline(model, strategy).total_s >= max(by_kind)
    assert abs(by_kind[0] / by_kind[1] - 1) < 0.1, "the shares are balanced"
    assert model.weights[0][0] > model.weights[0][1] > 0


def test_parts_end_together() -> None:
    parts = balanced(np.array([1.0, 2.0]), np.array([0.4, 0.8]), 3, np.array([1, 2]))
    assert parts @ [1, 2] == pytest.approx(1)
    slope, fixed = np.array([0.9, 1.8]), np.array([0.1, 0.2])
    assert np.ptp(fixed + slope * parts) == pytest.approx(0)
    assert balanced(np.array([1.0, 3.0]), np.array([1.0, 3.0]), 1, np.array([1, 1])).tolist() == [0.75, 0.25]


@given(
    whole_s=st.lists(st.floats(1e-6, 1e3), min_size=2, max_size=2),
    fixed=st.lists(st.floats(0, 1), min_size=2, max_size=2),
    parts=st.integers(1, 64),
)
def test_weights_are_such_that_a_plan_can_have(whole_s: list[float], fixed: list[float], parts: int) -> None:
    whole, devices = np.array(whole_s), load("cpu,kinds=cpu:1+cpu@0.5:2").device_graph(3, 1)
    part = whole * (np.array(fixed) + (1 - np.array(fixed)) / parts)
    for vector in weight_vectors(whole, part, parts, devices):
        assert parse_weights(list(vector), 3, "weights") == vector
        assert 0 < min(vector) <= max(vector) <= MAX_WEIGHT


def test_a_device_that_would_make_a_step_slower_is_left_out() -> None:
    """Two fast devices and one of a hundredth of their speed, behind links that make it worse."""
    model = model_of(load_model("alexnet", 24), "cpu,kinds=cpu:2+cpu@0.01:1,link=100Gb/s")
    result = search(model, SearchSpace(3))
    (_, used) = unequal_lines(result)
    assert used.startswith("2 of 3 devices are used: device 2 would make a step slower, ")


def test_equal_devices_have_no_weights() -> None:
    model = CostModel(fuse(chain(8)), load("cpu,kinds=cpu:2").device_graph(2))
    assert model.devices.kinds == () == model.weights == model.shares
    with pytest.raises(LayerwiseError, match=r"profile .* has 3 devices \(2 × one CPU core, .*\), and 4 are asked for"):
        load("cpu,kinds=cpu:2+cpu@0.5:1").device_graph(4)


def test_memory_is_of_each_device_and_a_curve_over_limits_ends() -> None:
    """The first device is the smaller one: the same bytes fill four times as much of it."""
    model = model_of(load_model("alexnet", 64), "rtx2080ti,kinds=rtx2080ti:1+a6000:1")
    data = candidate(model, "data", baseline(model, "data"))
    scale = np.asarray(model.devices.memory_scale)
    assert (scale[0], scale[1] < 0.3) == (1, True)
    assert data.memory_bytes == (peak_bytes(model, data.strategy) * scale).max()
    assert course(model, data.strategy).device == (peak_bytes(model, data.strategy) * scale).argmax()
    points = memory_curve(model, SearchSpace(2, dims=("n",)), 3e8, 6e8, offer=(), points=3, effort="quick")
    assert 1 <= len(points) <= 4


def test_what_takes_equal_devices_says_so() -> None:
    profile = load("a6000,kinds=a6000:1+rtx2080ti:2")
    with pytest.raises(LayerwiseError, match=r"the oracle takes equal devices, but profile .* has several kinds"):
        profile.check_equal("the oracle")
    with pytest.raises(LayerwiseError, match="vectors of 3 numbers"):
        SearchSpace(3, weights=((1, 2),))
    some = SearchSpace(3, dims=("n",), weights=((0, 0, 1),)).configurations(chain(6).layers[1].space.dims)
    assert all(sum(w > 0 for w in config.weights) == config.total for config in some if config.weights)
    with pytest.raises(LayerwiseError, match="leave out the placement"):
        parse({"n": 2, "placement": "strided", "weights": [1, 1, 0, 0]}, chain(6).layers[1].space.dims, 4, "conv")
