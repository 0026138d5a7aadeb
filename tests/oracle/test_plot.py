"""The figure: a place for every run, beside the projection of its own batch; nothing vanishes."""

from __future__ import annotations

import pytest

from layerwise.oracle.formulas.phases import Phases, Projection
from layerwise.oracle.question import Answer
from layerwise.oracle.report.plot import draw
from layerwise.oracle.runs import Compared, Run
from layerwise.oracle.strategies import Limit

pytest.importorskip("matplotlib")


def answer(name: str, devices: int, batch: int, seconds: float) -> Answer:
    projection = Projection(name, devices, (devices, 1), 1, batch, Phases(compute_s=seconds), Limit(99, ""))
    return Answer(projection, seconds, fits=True)


def compared(batch: int, projected_s: float, measured_s: float, name: str = "data") -> Compared:
    return Compared(Run(name, 2, batch, measured_s), answer(name, 2, batch, projected_s), projected_s)


def test_a_run_stands_beside_its_own_projection() -> None:
    runs = [
        compared(64, 1.0, 1.1),
        compared(64, 1.0, 1.2),
        compared(8192, 50.0, 60.0),
        compared(64, 3.0, 4.0, "filter"),
    ]
    asked = {("data", 2): answer("data", 2, 32, 0.5), ("data", 4): answer("data", 4, 64, 0.6)}
    data, filters = draw(asked, "x", runs).axes
    compute, _, measured = ([bar.get_height() for bar in bars] for bars in data.containers)
    assert compute == [0.5, 1.0, 1.0, 50.0, 0.6]
    assert measured == [1.1, 1.2, 60.0]
    places = [[bar.get_x() for bar in bars] for bars in data.containers]
    assert places[2] == pytest.approx([x + 0.4 for x in places[0][1:4]])  # pairs
    labels = [label.get_text() for label in data.get_xticklabels()]
    assert labels == ["2 (B=32)", "2 (B=64)", "2 (B=64)", "2 (B=8,192)", "4"]
    assert [bar.get_height() for bar in filters.containers[2]] == [4.0]


def test_an_answer_at_a_runs_batch_is_its_projection() -> None:
    (axis,) = draw({("data", 2): answer("data", 2, 64, 1.0)}, "x", [compared(64, 1.0, 1.1)]).axes
    assert [bar.get_height() for bar in axis.containers[0]] == [1.0]


def test_unreached_strategies_are_named() -> None:
    figure = draw({("data", 2): answer("data", 2, 64, 1.0)}, "x", (), [("data", 4), ("serial", 4), ("df", 2)])
    (axis,) = figure.axes
    assert [label.get_text() for label in axis.get_xticklabels()] == ["2", "4"]
    assert [text.get_text() for text in axis.texts] == ["–"]
    assert "no answer: serial, data+filter" in figure.get_suptitle()
