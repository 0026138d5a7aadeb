"""Ranges of predicted steps: where they lie, what they grow with, and what two plans err by alike."""

from __future__ import annotations

from dataclasses import replace
from math import exp

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.cost.timeline import ranges
from layerwise.cost.timeline.ranges import MEASURED, STATED, deviations
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.machine.curves import Links
from layerwise.machine.layer_times import CellTime, Conditions, Extents, LayerTimes
from layerwise.measure.cells import wanted_cells
from layerwise.partition.buckets import BUCKET_BYTES
from tests.examples import examples

GRAPH = fuse(load_model("lenet5", 64))
MODEL = CostModel(GRAPH, load("p100").device_graph(4))


def strategy(degrees: list[int]) -> dict[str, Config]:
    return {layer.name: Config.of({"n": n}) for layer, n in zip(GRAPH.inner, degrees, strict=True)}


plans = st.lists(st.sampled_from([1, 2, 4]), min_size=len(GRAPH.inner), max_size=len(GRAPH.inner)).map(strategy)


@examples(25)
@given(plans, plans)
def test_a_step_lies_in_its_range_and_two_plans_err_alike(a: dict[str, Config], b: dict[str, Config]) -> None:
    first, second = (deviations(MODEL, plan, BUCKET_BYTES) for plan in (a, b))
    for step in (first, second):
        assert step.predicted_s * exp(-STATED) * 0.999 <= step.low_s <= step.predicted_s
        # Both at once are at most the two factors, each of them at most its own.
        assert step.predicted_s <= step.high_s <= step.predicted_s * exp(STATED * 2**0.5) * 1.001
    assert first.apart(first) == 0
    assert first.apart(second) == second.apart(first) <= STATED * 2**0.5


def test_on_one_device_computation_alone_errs() -> None:
    model = CostModel(GRAPH, load("p100").device_graph(1))
    step = deviations(model, strategy([1] * len(GRAPH.inner)), BUCKET_BYTES)
    assert step.links == (0.0, 0.0)
    assert step.high_s == pytest.approx(step.predicted_s * exp(STATED))
    assert step.low_s == pytest.approx(step.predicted_s * exp(-STATED))


def test_a_fit_to_few_cells_is_worth_no_more_than_a_roofline() -> None:
    devices, plan = load("p100").device_graph(1), strategy([1] * len(GRAPH.inner))
    cells = wanted_cells(CostModel(GRAPH, devices), {name: [config] for name, config in plan.items()})
    layers = [cell for cell in cells.values() if cell.name.startswith("{")]
    known: dict[str, dict[Extents, CellTime]] = {}
    for cell in layers[:4]:
        known.setdefault(cell.name, {})[cell.extents] = CellTime(1.0, 2.0, 0.0, 5, cell.forward, cell.backward)
    highest = []
    for held_out_error in (None, 0.01):
        times = LayerTimes(Conditions("P100", "2.13", "float32"), cells=known, held_out_error=held_out_error)
        model = CostModel(GRAPH, replace(devices, layers=(times,)))
        highest.append(deviations(model, plan, BUCKET_BYTES).compute[1])
    unknown, small = highest
    assert MEASURED <= small < unknown < STATED


def test_links_that_were_measured_err_less() -> None:
    stated = deviations(MODEL, strategy([4] * len(GRAPH.inner)), BUCKET_BYTES)
    known = CostModel(GRAPH, replace(MODEL.devices, links=Links(())))
    measured = deviations(known, strategy([4] * len(GRAPH.inner)), BUCKET_BYTES)
    assert measured.links[1] < stated.links[1]
    assert MEASURED < STATED


def test_slower_links_are_seen_where_transfers_travel(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan on one device of four sends nothing; of a split one the range grows with what links err by."""
    spread = deviations(MODEL, strategy([4] * len(GRAPH.inner)), BUCKET_BYTES)
    monkeypatch.setattr(ranges, "STATED", 2 * STATED)
    fresh = CostModel(GRAPH, load("p100").device_graph(4))
    wider = deviations(fresh, strategy([4] * len(GRAPH.inner)), BUCKET_BYTES)
    assert wider.links[1] > spread.links[1] > 0
    assert wider.links[0] < spread.links[0] < 0
