"""The figures: every answer and every run is in them, at its place, and what is missing is seen to be."""

from collections.abc import Sequence
from math import isnan
from types import SimpleNamespace
from typing import Any, cast

import pytest

from layerwise.oracle.ask import Asked
from layerwise.oracle.phases import Phases, Projection
from layerwise.oracle.question import Answer, Question
from layerwise.oracle.report.plot import draw, draw_phases
from layerwise.oracle.runs import Compared, MeasuredRun
from layerwise.oracle.strategies import Limit

pytest.importorskip("matplotlib")
WEAK = cast(Question, SimpleNamespace(scaling="weak", batch=32))
STRONG = cast(Question, SimpleNamespace(scaling="strong", batch=64))
SAMPLES = 640


def answer(name: str, devices: int, batch: int, seconds: float, *, fits: bool = True) -> Answer:
    phases = Phases(compute_s=seconds / 2, gradient_s=seconds / 2)
    return Answer(Projection(name, devices, (devices, 1), 1, batch, phases, Limit(99, "")), seconds, fits=fits)


def asked(gpus: Sequence[int], *answers: Answer) -> Asked:
    found = {(a.projection.strategy, a.projection.devices): a for a in answers}
    return Asked(tuple(gpus), answer("serial", 1, 32, 1.0), found, {}, {}, ())


def lines(axis: Any) -> dict[str, list[float]]:
    return {str(line.get_label()): list(line.get_ydata()) for line in axis.lines}


EVERY = asked((1, 2, 4), *(answer("data", p, 32 * p, s) for p, s in ((1, 1.0), (2, 1.25), (4, 2.0))),
              answer("filter", 2, 64, 4.0, fits=False))  # fmt: skip


def test_all_strategies_on_one_axis_with_the_ideal_line() -> None:
    figure = draw(WEAK, EVERY, SAMPLES, "net")
    epoch, speed = figure.axes
    shown = lines(epoch)
    assert shown["ideal"] == [20.0, 20.0, 10.0, 5.0]
    assert shown["data"] == [20.0, 12.5, 10.0]  # epochs of 20, 10, 5 steps
    assert [isnan(v) for v in shown["filter (to 2)"]] == [True, False, True]
    assert shown["filter (to 2)"][1] == 40.0
    assert list(speed.lines[1].get_ydata()) == [1.0, 1.6, 2.0]  # larger steps in the same time are faster
    assert {axis.get_xscale() for axis in (epoch, speed)} == {axis.get_yscale() for axis in (epoch, speed)} == {"log"}
    assert [list(line.get_ydata()) for line in epoch.lines if line.get_marker() == "x"] == [[40.0], []]
    assert "weak scaling, 32 samples a GPU" in figure.get_suptitle()
    assert "strong scaling, 64 samples a step" in draw(STRONG, EVERY, SAMPLES, "net").get_suptitle()


def test_a_run_is_joined_to_its_own_projection() -> None:
    projected = answer("data", 2, 128, 2.0)
    run = Compared(MeasuredRun("data", 2, 128, 2.5), projected, 2.0, "congestion?")
    epoch, speed = draw(WEAK, asked(()), SAMPLES, "net", [run]).axes
    assert [list(line.get_ydata()) for line in epoch.lines[1:5]] == [[12.5, 10.0], [12.5], [10.0], [12.5]]
    assert list(speed.lines[1].get_ydata()) == [1.6, 2.0]


def test_phases_are_shares_of_an_iteration() -> None:
    figure = draw_phases(WEAK, EVERY, "net")
    data, filters = (axis for axis in figure.axes if axis.get_visible())
    assert [[bar.get_height() for bar in bars] for bars in data.containers] == [[0.5] * 3, [0.5] * 3]
    assert [[bar.get_height() for bar in bars] for bars in filters.containers] == [[0.0, 0.5, 0.0]] * 2
    assert [text.get_text() for text in filters.texts] == ["–", "4.00\ns", "–"]
