"""Strategies as HTML: a block for every part of every layer, and names that cannot break the page."""

import re
from pathlib import Path

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.report.picture import runs, svg
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan

STRATEGY = {
    "a<b>": Config.of({"n": 4}),
    "c": Config.of({"n": 4}),
    "d": Config.of({"c": 2}, "strided"),
    "e": Config(),
}


def test_a_block_a_part() -> None:
    made = svg(STRATEGY, 4)
    devices = [tuple(map(int, found)) for found in re.findall(r'<rect x="(\d+)" y="(\d+)"', made)]
    assert len(devices) == 4 + 4 + 2 + 1
    wide, high = min(x for x, _ in devices if x), min(y for _, y in devices if y)
    assert [(x // wide, y // high) for x, y in devices] == [
        *((0, i) for i in range(4)),
        *((1, i) for i in range(4)),
        (2, 0),
        (2, 2),
        (3, 0),
    ]
    assert "<b>" not in made
    assert "a&lt;b&gt; {n=4}, device 0" in made
    assert len(set(re.findall(r'fill="(#\w+)"', made))) == 3


def test_neighbours_of_one_configuration_are_one_row() -> None:
    assert [(title, names) for title, _, names in runs(STRATEGY)] == [
        ("a<b> … c", ["a<b>", "c"]),
        ("d", ["d"]),
        ("e", ["e"]),
    ]


def test_what_shows_itself(tmp_path: Path) -> None:
    model = CostModel(fuse(load_model("alexnet", 128)), load("p100").device_graph(4))
    space = SearchSpace(4)
    result = search(model, space)
    plan = make_plan("alexnet", "p100", model, space, result, fused=True)
    for shown in (result._repr_html_(), result.best._repr_html_(), plan._repr_html_()):
        assert shown.count("<svg") == shown.count("</svg>") == 1
        for layer in ("features.0", "classifier.6"):
            assert layer in shown
    gain = result.baselines["data"].timeline.total_s / result.best.timeline.total_s
    assert f"{gain:.2f}×" in result._repr_html_()
    assert result._repr_html_().count("<b>") == 0
