"""The closed forms: against sums by hand on a small network, and laws that hold for all of them."""

from dataclasses import fields
from functools import cache
from math import inf

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.paradl.facts import Facts, facts_of
from benchmarks.paradl.project import Formulas, case_of, project
from layerwise.cost.model import CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import LinkLevel, Profile, load
from layerwise.oracle.names import STRATEGIES
from layerwise.oracle.phases import Phases, Projection
from layerwise.oracle.strategies import Shape, Wishes, gather_layer
from tests.examples import examples

TIMES = [f.name for f in fields(Phases) if f.name.endswith("_s")]
FORMS: tuple[Formulas, ...] = ("published", "as-run")
BATCH, ALPHA, BETA = 16, 1e-5, 1e-10
MLP = "mlp:64x96x128x32"  # weights 64·96 + 96·128 + 128·32


def machine(alpha_s: float = ALPHA, beta_s_per_byte: float = BETA) -> Profile:
    """One node of 16 devices, a link each."""
    level = LinkLevel("node", 16, alpha_s, 1 / beta_s_per_byte, 1)
    return Profile("uniform", "", load("v100").processor, (level,), {})


@cache
def facts(
    name: str = MLP, alpha_s: float = ALPHA, beta: float = BETA, seconds: float | None = None, optimizer: str = "sgd"
) -> Facts:
    graph, options = fuse(load_model(name, BATCH)), CostOptions(io="free", optimizer=optimizer)
    return facts_of(graph, machine(alpha_s, beta), seconds_per_sample=seconds, options=options)


def times(projection: Projection) -> dict[str, float]:
    return {name: getattr(projection.phases, name) for name in TIMES}


@pytest.mark.parametrize("name", ["lenet5", MLP])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_on_one_device_every_strategy_is_serial(strategy: str, form: Formulas, name: str) -> None:
    serial = project(case_of("serial", facts(name), 1, BATCH), form)
    assert serial.phases.communication_s == 0
    assert serial.phases.compute_s == pytest.approx(BATCH * facts(name).compute_s)
    assert times(project(case_of(strategy, facts(name), 1, BATCH), form)) == pytest.approx(times(serial))


def test_data_by_hand() -> None:
    at = project(case_of("data", facts(optimizer="adam"), 4, 4 * BATCH)).phases
    weights, biases = 64 * 96 + 96 * 128 + 128 * 32, 96 + 128 + 32
    assert at.gradient_s == pytest.approx(2 * 3 * (ALPHA + weights / 4 * 4 * BETA))
    assert at.compute_s == pytest.approx(BATCH * facts().compute_s)
    assert at.update_s == pytest.approx(weights * 4 * 7 / 900e9)  # Adam moves 7 tensors, whatever p
    activations = 64 + 96 + 96 + 128 + 128 + 32
    assert at.memory_bytes == 4 * (2 * BATCH * activations + 2 * weights + biases)


def test_filter_by_hand() -> None:
    at = project(case_of("filter", facts(), 4, BATCH)).phases
    once = 2 * 3 * ALPHA + 3 * BATCH * (96 + 128) / 4 * 4 * BETA  # y of all layers but the last
    assert at.gather_s == pytest.approx(once)
    assert at.reduce_s == pytest.approx(2 * once)
    assert at.gradient_s == 0
    assert at.update_s == pytest.approx(project(case_of("serial", facts(), 1, BATCH)).phases.update_s / 4)


def test_pipeline_by_hand() -> None:
    f = facts()
    at = project(case_of("pipeline", f, 3, BATCH, segments=4)).phases
    slowest = max(y.forward_s for y in f.layers) + max(y.backward_s for y in f.layers)
    assert at.compute_s == pytest.approx(BATCH * (3 + 4 - 1) / 4 * slowest)
    assert at.passing_s == pytest.approx(2 * (3 + 4 - 2) * (ALPHA + BATCH / 4 * 128 * 4 * BETA))


def test_spatial_by_hand() -> None:
    """LeNet-5: 5 × 5 convolutions on 32 and 14 rows, 2 × 2 poolings, cut into two, gathered after the last pooling."""
    f = facts("lenet5")
    at = project(case_of("spatial", f, 2, BATCH, wishes=Wishes(dims=("h",)))).phases
    names = [y.name for y in f.layers]
    end = names.index(str(gather_layer(f.graph, 16))) + 1
    halos = 0.0
    for layer in (y for y in f.layers[:end] if y.windows):
        side = layer.windows[0].kernel // 2
        there, back = side * layer.windows[1].extent, side * layer.windows[1].out
        halos += 2 * (2 * ALPHA + BATCH * 4 * BETA * (layer.in_channels * there + layer.out_channels * back))
    assert at.halo_s == pytest.approx(halos)
    assert at.gather_s == at.reduce_s == pytest.approx(ALPHA + BATCH * f.layers[end - 1].outputs / 2 * 4 * BETA)
    after_s = sum(y.compute_s for y in f.layers[end:])
    assert at.compute_s == pytest.approx(BATCH * ((f.compute_s - after_s) / 2 + after_s))


@examples(30)
@given(p=st.integers(2, 16), batch=st.integers(1, 64), widths=st.lists(st.integers(16, 64), min_size=3, max_size=5))
def test_published_filter_sends_half_as_much_again_as_ours(p: int, batch: int, widths: list[int]) -> None:
    """An all-gather and an all-reduce, against an all-gather and its adjoint."""
    f = facts("mlp:" + "x".join(map(str, widths)))
    published = project(case_of("filter", f, p, batch)).phases.communication_s
    assert published == pytest.approx(1.5 * project(case_of("filter", f, p, batch), "as-run").phases.communication_s)


@examples(40)
@given(
    strategy=st.sampled_from(STRATEGIES[1:]),
    form=st.sampled_from(FORMS),
    name=st.sampled_from([MLP, "lenet5"]),
    slower=st.sampled_from([(2.0, 1.0), (1.0, 2.0), (10.0, 10.0)]),
)
def test_slower_links_never_help(strategy: str, form: Formulas, name: str, slower: tuple[float, float]) -> None:
    p = 4 if strategy in ("df", "ds") else 2
    if name == MLP and strategy in ("spatial", "ds"):
        name = "lenet5"
    slow = facts(name, ALPHA * slower[0], BETA * slower[1])
    before, after = (project(case_of(strategy, f, p, BATCH), form).phases for f in (facts(name), slow))
    assert after.communication_s > before.communication_s
    assert after.communication_s <= max(slower) * before.communication_s * (1 + 1e-9)
    assert after.computation_s == pytest.approx(before.computation_s)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("hybrid", "inner"), [("df", "filter"), ("ds", "spatial")])
def test_hybrids_of_one_group_or_of_single_devices(hybrid: str, inner: str, form: Formulas) -> None:
    f = facts("lenet5")
    alone = project(case_of(hybrid, f, 4, BATCH, wishes=Wishes(inside=4)), form)
    assert times(alone) == pytest.approx(times(project(case_of(inner, f, 4, BATCH), form)))
    data = project(case_of(hybrid, f, 4, BATCH, wishes=Wishes(inside=1)), form)
    assert times(data) == pytest.approx(times(project(case_of("data", f, 4, BATCH), form)))


def test_measured_times_replace_the_analytic_ones() -> None:
    f = facts(MLP, ALPHA, BETA, 0.5)
    assert f.compute_s == pytest.approx(0.5)
    assert project(case_of("serial", f, 1, BATCH), "as-run").phases.compute_s == pytest.approx(0.5 * BATCH)


def test_small_local_shapes_take_more_than_their_share() -> None:
    """A launch is a launch however little it computes: only the closed forms as published divide without end."""
    f = facts()
    ideal, ours = (project(case_of("filter", f, 16, BATCH), form).phases.compute_s for form in FORMS)
    assert ideal == pytest.approx(project(case_of("serial", f, 1, BATCH)).phases.compute_s / 16)
    assert ours > 2 * ideal


def test_the_optimizers_state_is_in_memory() -> None:
    sgd, adam = (
        project(case_of("filter", facts(optimizer=o), 2, BATCH), "as-run").phases.memory_bytes for o in ("sgd", "adam")
    )
    assert adam - sgd == facts().item_bytes * 2 * facts().weights / 2


@pytest.mark.parametrize(
    ("strategy", "devices", "batch", "options", "message"),
    [
        ("filters", 2, 8, {}, "unknown strategy 'filters'"),
        ("data", 16, 8, {}, "at most 8, by the batch of 8 samples"),
        ("filter", 64, 8, {}, "at most 32, by layer '.*' with 32 output channels"),
        ("serial", 2, 8, {}, "at most 1"),
        ("df", 8, 8, {"shape": Shape(2, 2)}, "2 groups of 2 are not 8 devices"),
        ("data", 2, 0, {}, "at least 1 sample"),
        ("pipeline", 2, 8, {"segments": 9}, "9 segments of 8 samples"),
    ],
)
def test_what_cannot_be(strategy: str, devices: int, batch: int, options: dict[str, object], message: str) -> None:
    level = LinkLevel("node", 64, ALPHA, 1 / BETA, 1)
    f = facts_of(facts().graph, Profile("u", "", load("v100").processor, (level,), {}))
    with pytest.raises(LayerwiseError, match=message):
        case_of(strategy, f, devices, batch, **options)  # type: ignore[arg-type]


def test_optimizers_that_cannot_be() -> None:
    with pytest.raises(LayerwiseError, match="unknown optimizer 'lion'"):
        facts(optimizer="lion")


def test_no_time_is_free() -> None:
    with pytest.raises(LayerwiseError, match="above 0 s"):
        facts_of(facts().graph, machine(), seconds_per_sample=0.0)
    assert max(times(project(case_of("data", facts(), 4, BATCH))).values()) < inf
