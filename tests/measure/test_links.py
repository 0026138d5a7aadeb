"""Measuring links, between threads: what is measured, and that all ranks come to the same."""

from __future__ import annotations

from collections.abc import Callable
from itertools import chain, pairwise
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.collectives import all_reduce_s, group_shape, groups_per_port
from layerwise.cost.model import CostModel
from layerwise.cost.terms import gradients_of
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import DeviceGraph, Level, load, save
from layerwise.machine.curves import Curve, Overlap, trimmed
from layerwise.measure import beside, timing
from layerwise.measure import links as module
from layerwise.measure.beside import rates
from layerwise.measure.links import (
    TOLERANCE,
    Measured,
    Series,
    conditions,
    contention,
    knots,
    measure_links,
    with_links,
)
from layerwise.measure.topology import RankGroups, Topology, find_topology, pairs, shapes, topology_of
from tests.comm.thread import ThreadComm, run_threads
from tests.cost.brute import PROCESSOR


@pytest.fixture(autouse=True)
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small messages and products, few of them."""
    monkeypatch.setattr(module, "SIZES", (1024, 4096, 16384))
    monkeypatch.setattr(beside, "KERNEL", {"cpu": (1, 4, 4, 4)})
    monkeypatch.setattr(beside, "ALONE", 1e-4)
    monkeypatch.setattr(module, "ROUND_S", 1e-4)
    monkeypatch.setattr("layerwise.measure.timing.ROUND_S", 1e-4)
    monkeypatch.setattr("layerwise.measure.timing.ROUNDS", 2)


def run(where: Topology, budget_s: float = 60.0) -> list[tuple[Measured, dict[str, object]]]:
    def measure(comm: ThreadComm) -> tuple[Measured, dict[str, object]]:
        return measure_links(comm, where, budget_s), conditions(comm, where)

    return run_threads(where.size, measure)


@pytest.mark.parametrize("where", [Topology(1, 2), Topology(2, 2), Topology(3, 1)])
def test_every_operation_of_every_shape_is_measured_and_all_ranks_agree(where: Topology) -> None:
    told = run(where)
    measured = told[0][0]
    assert all(one == measured for one, _ in told)
    wanted = {(name, s.fan, s.load) for s in shapes(where) for name in module.COLLECTIVES}
    wanted |= {(name, s.fan, s.load) for s in pairs(where) for name in ("message", "exchange")}
    assert {(s.curve.operation, s.curve.fan, s.curve.load) for s in measured.series} == wanted
    assert {(o.operation, o.fan, o.load) for o in measured.overlaps} == {
        one for one in wanted if one[0] in beside.BESIDE["cpu"]
    }
    for s in measured.series:
        assert all(a[0] < b[0] and a[1] <= b[1] for a, b in pairwise(s.curve.knots))
        assert s.curve.knots[0][1] > 0


def test_without_time_each_curve_has_few_points_of_one_round_and_the_largest_sum_alone_an_overlap(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A budget binds by what is left out."""
    rounds = []
    taken = timing._slowest
    monkeypatch.setattr(timing, "_slowest", lambda *args: rounds.append(args) or taken(*args))
    measured = run(Topology(1, 4), 0.0)[0][0]
    assert {tuple(size for size, _ in s.points) for s in measured.series} == {(1024.0, 16384.0)}
    assert [(o.operation, o.fan) for o in measured.overlaps] == [("all_reduce", (4,))]
    assert len(rounds) == 4 * 3 * 2 * len(measured.series)  # ranks, two to begin with and one, sizes


def test_the_profile_has_what_was_measured_and_search_uses_it(tmp_path: Path) -> None:
    where = Topology(2, 2)
    measured, facts = run(where)[0]
    profile = with_links(load("cpu"), measured, where, facts)
    save(profile, tmp_path / "mine.json")
    again = load(tmp_path / "mine.json")
    assert again == profile
    assert again.links is not None
    assert again.links.conditions == facts | {"spread": measured.links(facts).conditions["spread"]}
    assert again.gpus_per_node == 2
    graph = again.device_graph(4)
    model = CostModel(fuse(load_model("lenet5", 64)), graph)
    layer = model.graph["classifier.0"]
    collective = gradients_of(model, layer, model.layout(layer, (Config.of({"n": 4}),)))[0]
    curve = again.links.curve("all_reduce", (2, 2), 1)
    assert curve is not None
    found = all_reduce_s(5000.0, collective.group_shapes[0], graph)
    (x0, y0), (x1, y1) = next(pair for pair in pairwise(curve.knots) if pair[1][0] > 5000)
    assert found == pytest.approx(y0 + (5000 - x0) / (x1 - x0) * (y1 - y0))


def test_noise_makes_no_bandwidth_endless() -> None:
    """The largest message took less than the one before: its own rate is what can be said."""
    points = ((1024.0, 1e-3), (4096.0, 2e-3), (16384.0, 1.5e-3))
    series = Series(Curve("exchange", (2,), 1, knots(points)), points, 0.0)
    facts: dict[str, object] = {"date": "today", "backend": "gloo", "torch": "2"}
    profile = with_links(load("cpu"), Measured((series,), ()), Topology(1, 2), facts)
    assert profile.levels[0].bandwidth_bytes_per_s == pytest.approx(16384 / 2e-3)


@pytest.mark.parametrize("name", ["cpu", "h100", "v100"])
def test_any_profile_may_be_the_base(name: str, tmp_path: Path) -> None:
    """One of racks loses them: nobody has measured these."""
    where = Topology(2, 1)
    measured, facts = run(where)[0]
    profile = with_links(load(name), measured, where, facts)
    save(profile, tmp_path / "mine.json")
    assert load(tmp_path / "mine.json") == profile
    assert [level.devices for level in profile.levels] == [1, None]
    assert profile.processor == load(name).processor
    assert profile.device_graph(2).levels[1].alpha_s == profile.levels[1].latency_s


@given(st.floats(0.01, 1.0), st.floats(0.01, 1.0))
def test_rates_are_found_from_what_each_costs_the_other(a: float, b: float) -> None:
    """Computation of two units under a sum of one, and the other way round, at rates a and b while both go on."""
    under, over = 2 / a, 1 / b  # if the other one went on for ever
    if over > under or 2 / b < 1 / a:
        return  # the shorter of each pair must be hidden by the longer one
    first = 1 / b + (2 - a / b)
    second = 1 / a + (2 - b / a)
    found = rates(first - 2, second - 2)
    if (first - 2) * (second - 2) <= 0.95:
        assert found == pytest.approx((a, b), rel=1e-6)


def test_turns_are_rates_of_a_half() -> None:
    assert rates(1.0, 1.0) == (0.5, 0.5)
    assert rates(0.0, 0.0) == (1.0, 1.0)


def test_further_messages_are_what_an_exchange_with_all_takes_more_than_a_pair_at_each_size() -> None:
    pair = Series(Curve("exchange", (1, 2), 1, ((0.0, 1.0), (300.0, 4.0))), ((0.0, 1.0), (300.0, 4.0)), 0.0)
    wide = ((100.0, 3.75), (400.0, 12.0))  # of 75 and of 300 bytes to three others
    every = [pair, Series(Curve("all_to_all", (1, 4), 1, wide), wide, 0.0)]
    curve = next(module._with_further_messages(every)).curve
    assert curve.further == ((75.0, 1.0), (300.0, 4.0))
    assert curve.ports_seconds(np.array(300.0), np.array(3.0)) == 12.0


class Clock:
    """A processor: a convolution takes a second, two beside a message; a message takes ten, beside it twelve."""

    def __init__(self) -> None:
        self.now, self.done, self.call = 0.0, 0.0, lambda: None

    def perf_counter(self) -> float:
        return self.now

    def compute(self) -> None:
        self.now += 2.0 if self.now < self.done else 1.0
        if self.done and self.now >= self.done:
            self.call()

    def start(self) -> Clock:
        self.done = self.now + 12.0
        return self

    def wait(self) -> None:
        if self.now < self.done:
            self.now = self.done - 2.0
        self.done = 0.0

    def when_done(self, call: Callable[[], None]) -> None:
        self.call = call


def test_what_goes_on_beside_computation_has_its_share_of_the_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    monkeypatch.setattr(beside, "time", clock)
    monkeypatch.setattr(beside, "ALONE", 20.0)
    monkeypatch.setattr(beside, "convolution", lambda _: clock.compute)
    (found,) = run_threads(
        1, lambda comm: beside.overlap(comm, RankGroups((1, 2), 1, ((0,),)), "all_gather", clock.start)
    )
    assert found == Overlap((1, 2), 1, 0.5, 10 / 12, "all_gather")


def test_contention_compares_equal_messages() -> None:
    alone = Series(Curve("exchange", (1, 2), 1, ((1.0, 1.0), (2.0, 2.0))), ((100.0, 1.0), (400.0, 2.0)), 0.0)
    both = Series(Curve("exchange", (1, 2), 2, ((1.0, 1.0), (2.0, 2.0))), ((200.0, 1.5), (800.0, 4.0)), 0.0)
    assert contention(both, alone) == 2.0


SIZES = [float(1024 * 4**i) for i in range(9)]
times = st.lists(st.floats(1e-6, 10.0), min_size=2, max_size=9)


@given(times)
def test_no_point_is_missed_by_more_than_the_tolerance(seconds: list[float]) -> None:
    """But for noise: a time that falls as the size grows counts as the one before."""
    points = list(zip(SIZES, seconds, strict=False))
    found = knots(points)
    risen = np.maximum.accumulate(seconds)
    line = np.interp(SIZES[: len(seconds)], *np.array(found).T)
    assert np.abs(line - risen).max() <= TOLERANCE * risen.max()
    assert (np.abs(line / risen - 1) <= TOLERANCE + 1e-9).all()
    assert set(found) <= set(zip(SIZES, risen.tolist(), strict=False))
    assert (found[0][0], found[-1][0]) == (SIZES[0], SIZES[len(seconds) - 1])


@pytest.mark.parametrize("switch", [3, 4, 6, None])
def test_the_switch_point_is_found(switch: int | None) -> None:
    """Latency until some size, then a slower line; a line alone needs two knots."""
    points = [(size, 1e-4 + max(0.0, size - SIZES[switch or 0]) * 1e-8) for size in SIZES]
    assert [size for size, _ in knots(points)] == [SIZES[0], *(SIZES[i] for i in (switch,) if i), SIZES[-1]]


topologies = st.builds(Topology, st.integers(1, 6), st.integers(1, 6)).filter(lambda where: where.size > 1)


def graph(where: Topology) -> DeviceGraph:
    """A NIC a node."""
    node = Level("node", where.local, 1e-6, 1e-9, 1)
    levels = (node, Level("cluster", where.size, 1e-5, 1e-8, where.local)) if where.nodes > 1 else (node,)
    return DeviceGraph("x", where.size, PROCESSOR, levels)


@given(topologies)
def test_shapes_are_those_that_the_cost_model_asks_for(where: Topology) -> None:
    for shape in shapes(where):
        row = np.full(where.size, -1, np.int64)
        for number, group in enumerate(shape.groups):
            assert list(group) == sorted(group)
            row[list(group)] = number
        found = group_shape(row, graph(where))
        assert trimmed(found.fan) == shape.fan
        assert groups_per_port(found) == shape.load


@given(topologies)
def test_groups_are_apart_and_where_all_are_at_once_everybody_is_in_one(where: Topology) -> None:
    alike: dict[tuple[int, ...], list[int]] = {}
    for shape in shapes(where):
        members = list(chain(*shape.groups))
        assert len(set(members)) == len(members)
        alike.setdefault(shape.fan, []).append(len(members))
    assert all(max(sizes) == where.size for sizes in alike.values())


@given(topologies)
def test_pairs_are_of_their_level(where: Topology) -> None:
    found = pairs(where)
    levels = {(2,)} if where.local > 1 else set()
    assert {shape.fan for shape in found} == levels | ({(1, 2)} if where.nodes > 1 else set())
    for shape in found:
        members = list(chain(*shape.groups))
        assert len(set(members)) == len(members)
        for a, b in shape.groups:
            assert (a // where.local == b // where.local) == (shape.fan == (2,))
        if shape.fan == (1, 2):  # so many behind each NIC that has any
            behind = np.bincount(np.array(members) // where.local)
            assert set(behind.tolist()) <= {0, shape.load}


def test_host_names_are_nodes() -> None:
    assert topology_of(["a", "a", "b", "b"]) == Topology(2, 2)
    assert topology_of(["a"]) == Topology(1, 1)


@pytest.mark.parametrize("hosts", [["a", "b", "a", "b"], ["a", "a", "b"], ["a", "b", "b"]])
def test_unequal_nodes_are_refused(hosts: list[str]) -> None:
    with pytest.raises(LayerwiseError, match="do not fill equal nodes one after another"):
        topology_of(hosts)


def test_nodes_in_one_machine_are_told_apart_by_torchruns_word(monkeypatch: pytest.MonkeyPatch) -> None:
    def find(comm: ThreadComm) -> Topology:
        return find_topology(comm)

    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert run_threads(4, find) == [Topology(2, 2)] * 4
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert run_threads(4, find) == [Topology(1, 4)] * 4
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert run_threads(4, find) == [Topology(1, 4)] * 4
