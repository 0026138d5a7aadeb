"""Strategies as pictures: a block for every part of every layer, and names that cannot break the page."""

from pathlib import Path

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.report.figures import svg
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan
from layerwise.search.plot.blocks import blocks
from layerwise.search.plot.devices import cells_of, draw, laid_out, layers

STRATEGY = {"a<b>": Config.of({"n": 4}), "c": Config.of({"n": 4}), "d": Config.of({"c": 2}, "strided"), "e": Config()}


SECONDS = {"a<b>": {"compute": 2.0}, "c": {"compute": 1.0, "sync": 1.0}, "d": {"compute": 4.0}}


def test_a_block_a_part() -> None:
    """As wide as the layer takes time, where its devices are; and every name is text."""
    found = laid_out(STRATEGY, SECONDS)
    assert [layer.width for layer in laid_out(STRATEGY, SECONDS, "equal")] == [1, 1, 1, 1]
    assert [(layer.names, layer.left, round(layer.width, 3)) for layer in found] == [
        (("a<b>",), 0, 2),
        (("c",), 2, 2),
        (("d",), 4, 4),
        (("e",), 8, 0.032),
    ]
    assert [cells for layer in found for cells in cells_of(layer.config, 4)] == [
        *((i, i, i) for i in range(4)),
        *((i, i, i) for i in range(4)),
        (0, 0, 0),
        (2, 1, 1),
        (0, 0, 0),
    ]
    made = svg(draw(STRATEGY, SECONDS, 4))
    assert made.count("<svg") == made.count("</svg>") == 1
    assert "<b>" not in made
    for words in (
        "a&lt;b&gt;",
        "n3",
        "device 2",
        "{n=4}",
        "{c=2}/strided",
        "one device",
        "8.00 s a step: width is time",
    ):
        assert words in made


def test_dollars_are_no_formula() -> None:
    assert "a$b$" in svg(draw({"a$b$": Config.of({"n": 4})}, {}, 4))


def test_many_devices_share_rows() -> None:
    assert list(cells_of(Config.of({"n": 1024}), 1024))[1] == (1, 64, 127)
    assert len(list(cells_of(Config.of({"n": 32}, "strided"), 1024))) == 16
    assert "n0…n63" in svg(draw({"fc": Config.of({"n": 1024})}, {}, 1024))


def test_repeated_blocks_are_folded() -> None:
    """Where they have equal configurations and take about as long; a block's layers keep their order."""
    names = [f"h.{i}.{part}" for i in range(12) for part in ("attn.qkv", "attn.out", "mlp.0", "mlp.2")]
    strategy = dict.fromkeys(["embed", *names, "head"], Config.of({"n": 4}))
    found = blocks(strategy, dict.fromkeys(strategy, 1.0))
    assert [block.title for block in found] == [
        *("embed", "h.0…11.attn.qkv (12 ×)", "h.0…11.attn.out (12 ×)"),
        *("h.0…11.mlp.0 (12 ×)", "h.0…11.mlp.2 (12 ×)", "head"),
    ]
    assert sorted(name for block in found for name in block.names) == sorted(strategy)
    strategy["h.5.mlp.2"] = Config.of({"c": 4})
    titles = [block.title for block in blocks(strategy, dict.fromkeys(strategy, 1.0))]
    assert {"h.0…4.attn (5 ×)", "h.5.mlp", "h.6…11.attn.qkv (6 ×)"} <= set(titles)


def test_what_shows_itself(tmp_path: Path) -> None:
    model = CostModel(fuse(load_model("alexnet", 128)), load("p100").device_graph(4))
    space = SearchSpace(4)
    result = search(model, space)
    plan = make_plan("alexnet", "p100", model, space, result, fused=True)
    assert "device 3" in svg(layers(plan))
    for shown in (result._repr_html_(), result.best._repr_html_(), plan._repr_html_()):
        assert shown.count("<svg") == shown.count("</svg>") == (shown != plan._repr_html_())
        for layer in ("features.0", "classifier.6"):
            assert layer in shown
    gain = result.baselines["data"].timeline.total_s / result.best.timeline.total_s
    assert f"{gain:.2f}×" in result._repr_html_()
    assert result._repr_html_().count("<b>") == 0
