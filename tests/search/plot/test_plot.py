"""The pictures of a result: what stands in them is what was searched, and names are text."""

from functools import cache
from itertools import pairwise
from typing import Any

import networkx as nx
import pytest

import layerwise
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.search.find import search
from layerwise.search.plot import looks as shared
from layerwise.search.plot.structure import placed
from layerwise.search.result import SearchResult
from layerwise.search.solve.eliminate import reduction_order


@cache
def of(name: str, batch: int, gpus: int) -> SearchResult:
    model = layerwise.CostModel(
        layerwise.fuse(layerwise.load_model(name, batch)), layerwise.load_profile("h100").device_graph(gpus)
    )
    return search(model, layerwise.SearchSpace(gpus, powers_of_two=True, spread=gpus > 8), effort="quick")


def labels(figure: Any) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts if text.get_text()]


def test_every_layer_has_its_configuration() -> None:
    result = of("vgg16", 512, 16)
    said = labels(layerwise.plot.strategy(result))
    for name, config in result.best.strategy.items():
        if not result.best.model.graph[name].end:
            at = said.index(name)
            assert said[at - 1] == " ".join(f"{label}{degree}" for label, degree in config.degrees)


def test_a_deep_network_goes_on_in_the_next_row() -> None:
    """No two layers on one place, and every edge goes to the right or to a later row."""
    graph = of("inception_v3", 128, 4).best.model.graph
    inner = {layer.name for layer in graph.inner}
    edges: nx.DiGraph[str] = nx.DiGraph((u, v) for u, v, _ in graph.edges() if {u, v} <= inner)
    at = placed(edges, 15)
    assert len(set(at.values())) == len(inner)
    assert max(place.x for place in at.values()) < 15
    for u, v in edges.edges:
        assert (at[u].row, at[u].x) < (at[v].row, at[v].x)
    for row in range(max(place.row for place in at.values())):  # where a module ends, so that one edge leads on
        crossing = {u for u, v in edges.edges if at[u].row == row < at[v].row}
        assert len(crossing) == 1


def test_no_two_configurations_look_alike() -> None:
    configs = [Config.of({"n": i}) for i in range(2, 22)]
    styles = shared.looks([*configs, Config()])
    assert len(set(styles.values())) == len(configs) + 1
    assert not {look.colour for look in styles.values()} & {colour for _, colour in shared.PARTS.values()}
    for look in styles.values():  # WCAG's contrast of texts, 4.5
        paint = shared.paler(look.colour, 0)
        light = [part / 12.92 if part <= 0.04 else ((part + 0.055) / 1.055) ** 2.4 for part in paint]
        bright = 0.2126 * light[0] + 0.7152 * light[1] + 0.0722 * light[2] + 0.05
        assert (1.05 / bright if shared.ink(paint) == "white" else bright / 0.05) > 4.5


def test_costs_are_those_of_the_tables() -> None:
    result = of("vgg16", 512, 16)
    axes = layerwise.plot.costs(result, "classifier").axes[0]
    names, configs = ([text.get_text() for text in side] for side in (axes.get_yticklabels(), axes.get_xticklabels()))
    assert names == ["classifier.0", "classifier.3", "classifier.6"]
    values = axes.images[0].get_array()
    for y, name in enumerate(names):
        node = dict(zip(map(str, result.tables.configs[name]), result.tables.node[name], strict=True))
        for x, config in enumerate(configs):
            if config in node:
                assert values[y, x] == pytest.approx(node[config] / min(node.values()), abs=1e-5)
    with pytest.raises(LayerwiseError, match="no layer's name begins with 'head'"):
        layerwise.plot.costs(result, "head")


def test_transfers_are_those_of_the_tables() -> None:
    result = of("vgg16", 512, 16)
    axes = layerwise.plot.transfers(result, ("classifier.0", "classifier.3")).axes[0]
    down, across = ([text.get_text() for text in side] for side in (axes.get_yticklabels(), axes.get_xticklabels()))
    sources, targets = (list(map(str, result.tables.configs[name])) for name in ("classifier.0", "classifier.3"))
    table = result.tables.transfer["classifier.0", "classifier.3", 0]
    here = 1e3 * table[sources.index(down[1]), targets.index(across[2])]
    assert axes.images[0].get_array().filled(0)[1, 2] == pytest.approx(here)
    with pytest.raises(LayerwiseError, match=r"'classifier.0' feeds classifier\.3"):
        layerwise.plot.transfers(result, ("classifier.0", "classifier.6"))


def test_an_inception_module_is_eliminated_to_one_edge() -> None:
    model = of("inception_v3", 128, 4).best.model
    panels = [axes for axes in layerwise.plot.eliminations(model, "Mixed_5b").axes if axes.get_visible()]
    drawn = [[text.get_text() for text in axes.texts if text.get_text()] for axes in panels]
    for before, after in pairwise(drawn):
        assert len(before) == len(after) + 1
    assert len(drawn) == 9  # eight convolutions and a pool in four branches
    assert reduction_order("abcd", [("a", "b"), ("b", "d"), ("a", "c"), ("c", "d")]) == ["b", "c"]
    with pytest.raises(LayerwiseError, match="name a block"):
        layerwise.plot.eliminations(model)


def test_regret_is_of_the_second_best() -> None:
    result = of("vgg16", 512, 16)
    said = labels(layerwise.plot.regret(result))
    first, second, *_ = result.alternatives["classifier.0"]
    assert f"{first.config}, else {second.config}" in said
    assert first.step_time_s == pytest.approx(result.additive.price.step_time_s, rel=0.05)
    assert second.step_time_s >= first.step_time_s


def test_a_table_that_pandas_takes() -> None:
    result = of("vgg16", 512, 16)
    table = result.table()
    assert len({len(column) for column in table.values()}) == 1
    assert sum(table["total_s"]) == pytest.approx(result.best.price.step_time_s, rel=0.01)  # type: ignore[arg-type]
    assert table["configuration"][table["layer"].index("features.0")] == str(result.best.strategy["features.0"])


def test_a_timeline_is_as_long_as_the_step() -> None:
    result = of("vgg16", 512, 16)
    (axes,) = layerwise.plot.timeline(result.baselines["data"]).axes
    ends = [bar.get_x() + bar.get_width() for bar in axes.patches]
    assert max(ends) == pytest.approx(1e3 * result.baselines["data"].timeline.total_s, rel=0.01)
