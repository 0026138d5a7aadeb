"""What devices hold: the bisections are what trying every number finds, and the memory model agrees."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.config import SearchSpace
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.search.capacity import STEP, Limits, Tried, largest_side, least_devices
from layerwise.search.curve import memory_curve
from layerwise.search.find import search
from layerwise.search.limit.variants import OFFERS
from layerwise.search.remedies import remedies
from layerwise.search.report.tables import curve_table, curve_values, draw_curve

SEARCH = "search unet3d:32 --profile cpu --global-batch 1 --inference --io boxes --dims d,c"


@given(st.integers(1, 40), st.floats(1, 100), st.floats(1, 3000))
def test_the_least_number_of_devices(most: int, fixed: float, shared: float) -> None:
    def need(count: int) -> float:
        return fixed + shared / count

    fitting = [count for count in range(1, most + 1) if need(count) <= 100]
    least = fitting[0] if fitting else None
    beyond = most if least is None else least - 1
    assert least_devices(need, 100, most) == Limits(
        None if least is None else Tried(least, need(least)), Tried(beyond, need(beyond)) if beyond else None
    )


@given(st.integers(8, 400), st.integers(8, 500), st.integers(8, 60))
def test_the_largest_cube(largest: int, start: int, least: int) -> None:
    """From whatever side the bisection starts."""
    tried = list(range(-(-least // STEP) * STEP, 257, STEP))
    fitting = [side for side in tried if side <= largest]
    limits = largest_side(float, largest, start, least, 256)
    assert limits.fits == (Tried(fitting[-1], fitting[-1]) if fitting else None)
    beyond = None if fitting and fitting[-1] == tried[-1] else fitting[-1] + STEP if fitting else tried[0]
    assert limits.beyond == (None if beyond is None else Tried(beyond, beyond))


def answer(capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    assert run_main(dispatch, [*SEARCH.split(), *arguments, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_as_a_user_asks(capsys: pytest.CaptureFixture[str]) -> None:
    """A search finds a plan for what fits."""
    capacity = answer(capsys, "--gpus", "3", "--memory-limit", "60MB", "--capacity")
    devices, side = capacity["devices"]["fits"]["number"], capacity["side"]["fits"]["number"]
    assert capacity["devices"]["beyond"]["number"] == devices - 1 > 0
    assert capacity["side"]["beyond"]["number"] == side + STEP
    plan = answer(capsys, "--gpus", str(devices), "--memory-limit", "60MB", "--effort", "quick", "--no-cache")
    assert plan["memory_bytes"] <= 60e6
    assert capacity["devices"]["beyond"]["bytes"] > 60e6
    assert run_main(dispatch, [*SEARCH.split(), "--gpus", "3", "--capacity", "--layers"]) == 2
    assert "leave out --layers" in " ".join(capsys.readouterr().err.split())


def test_fewer_devices_may_hold_what_more_do_not() -> None:
    """A plan takes a divisor of what there is: 7 devices are one, or all."""
    assert least_devices({1: 9, 2: 7, 3: 6, 4: 6, 5: 6, 6: 4, 7: 9}.__getitem__, 5, 7).fits == Tried(6, 4)


def test_no_code_is_imported_that_nobody_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "lenet5.py").write_text("open('it was run', 'w')")
    monkeypatch.chdir(tmp_path)
    asked = ["search", "lenet5", "--gpus", "2", "--profile", "cpu", "--gpus-per-node", "2", "--capacity", "--json"]
    assert run_main(dispatch, asked) == 0
    assert "side" not in json.loads(capsys.readouterr().out)
    assert not (tmp_path / "it was run").exists()


SPACE = SearchSpace(2)


def model_of(batch: int = 8) -> CostModel:
    return CostModel(
        fuse(load_model("mlp:64x256x256x8", batch)), load("p100").device_graph(2), CostOptions(optimizer="adam")
    )


def test_a_curve_falls_and_ends_where_nothing_fits() -> None:
    model = model_of()
    free, least = search(model, SPACE).best.price.memory_bytes, search(model, SPACE, memory_limit_bytes=1.0).least
    assert least is not None
    curve = memory_curve(model, SPACE, 0.9 * least.bytes, 2 * free, offer=OFFERS, points=8)
    assert curve[0].limit_bytes == 2 * free
    assert curve[0].result.within is None
    assert curve[-1].best is None
    limits = [point.limit_bytes for point in curve]
    assert limits == sorted(limits, reverse=True)
    fitting = [(point.limit_bytes, point.best) for point in curve if point.best is not None]
    assert len(fitting) > 1
    assert all(peak_bytes(model, best.strategy).max() <= limit for limit, best in fitting)
    times = [best.timeline.total_s for _, best in fitting]
    assert times == sorted(times)
    told = curve_values(curve)
    assert [row["fits"] for row in told] == [*[True] * len(fitting), False]
    assert told[-1]["least_memory_bytes"] > limits[-1]
    assert len(curve_table(curve).columns[0].cells) == len(curve)
    (axis,) = draw_curve(curve, "an MLP").axes
    assert axis.get_title() == "an MLP"
    assert len(axis.get_lines()) == 4  # three curves, and where nothing fits


def test_a_curve_ends_at_its_least_limit() -> None:
    model = model_of()
    free = search(model, SPACE).best.price.memory_bytes
    (point,) = memory_curve(model, SPACE, 2 * free, 3 * free, offer=OFFERS)
    assert point.best is not None


def test_remedies_are_tried_each_alone() -> None:
    model = model_of()
    least = search(model, SPACE, memory_limit_bytes=1.0).least
    assert least is not None
    tried = remedies(model, SPACE, least.bytes - 1, offer=(), more_devices=load("p100").device_graph(4))
    assert [remedy.what for remedy in tried] == [
        "--offer recompute,shard",
        "k in --dims",
        "4 GPUs",
        "a global batch of 4",
    ]
    offered, _, more, fewer = tried
    assert offered.bytes == least.bytes
    assert not offered.fits
    assert all(remedy.fits == (remedy.bytes <= least.bytes - 1) for remedy in (more, fewer))
