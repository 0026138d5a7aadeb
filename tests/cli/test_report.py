"""layerwise report, also with a trace beside it."""

import json
from pathlib import Path
from typing import cast

import pytest

from layerwise.search.report.traces import differences, read_trace
from tests.cli.conftest import Run

LONG = """
from collections import OrderedDict
from torch import nn, ones
def network():
    names = [f"features_dense_block_{i}_of_a_layer_with_a_long_name" for i in range(6)]
    return nn.Sequential(OrderedDict((name, nn.Linear(8, 8)) for name in names)), (ones(2, 8),)
"""
LENET = ("search", "lenet5", "--gpus", "2", "--profile", "p100", "--global-batch", "64", "--effort", "quick")


def slower(path: Path, steps: int) -> None:
    """A trace of so many steps, in which the second convolution takes three times as long."""
    trace = json.loads(path.read_text())
    events, spans = [e for e in trace["traceEvents"] if e["ph"] == "M"], []
    for event in trace["traceEvents"]:
        if event["ph"] == "X":
            event["dur"] *= 3 if event["name"] == "features.3" else 1
            spans.append(event)
    for step in range(steps):
        events += [event | {"ts": event["ts"] + step * 1e6} for event in spans]
    Path("measured.json").write_text(json.dumps({"traceEvents": events}))


def test_a_trace_beside_another(run: Run, here: Path) -> None:
    assert "timeline written to predicted.json" in run(*LENET, "--out", "plan.json", "--timeline", "predicted.json")
    slower(here / "predicted.json", steps=5)
    assert read_trace("measured.json").steps == 5
    rows = differences(read_trace("predicted.json"), read_trace("measured.json"))
    assert rows[0][:2] == ("compute", "features.3")
    assert rows[0][3] == pytest.approx(3 * cast(float, rows[0][2]))
    assert all(after == pytest.approx(before, abs=1e-9) for *_, before, after in rows[1:])
    told = run("report", "plan.json", "--measured", "measured.json", "--format", "md")
    assert "### The step" in told
    (line,) = (line for line in told.splitlines() if line.startswith("| features.3 | compute |"))
    assert "+200%" in line


def test_what_is_no_trace_is_refused(run: Run, refuse: Run, here: Path) -> None:
    run(*LENET, "--out", "plan.json")
    for content, words in (
        ("{}", "has no list 'traceEvents'"),
        ('{"traceEvents": []}', "has no span of compute"),
        ('{"traceEvents": [{"ph": "X", "cat": "sync", "name": "a", "pid": 0}]}', "without a name, a rank or its times"),
    ):
        (here / "t.json").write_text(content)
        assert words in refuse("report", "plan.json", "--measured", "t.json")


def test_no_column_is_lost(run: Run, here: Path) -> None:
    """Of the tables of a network with long names, written to a pipe."""
    (here / "networks.py").write_text(LONG)
    run("search", "networks:network", *LENET[2:], "--out", "plan.json")
    lines = [line.split() for line in run("report", "plan.json", "--model", "networks:network").splitlines()]
    assert ["layer", "configuration", "devices", "t_C", "t_X", "in", "t_S", "memory"] in lines
    assert ["from", "to", "tensor", "transfer", "sent"] in lines


def test_a_report_with_its_curve(run: Run, here: Path) -> None:
    run(*LENET, "--out", "plan.json")
    run("report", "plan.json", "--memory-curve", "1MB..4GB", "--out", "report.html")
    page = (here / "report.html").read_text(encoding="utf-8")
    assert "against no limit" in page
    assert "the best plan under a limit" in page
