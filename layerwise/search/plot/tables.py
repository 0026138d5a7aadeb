"""Tables of costs as heat maps: layers by configurations, an edge by those of its ends; and the
cost of second bests.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np

from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.quantities import units
from layerwise.search.plot.looks import FONT, SMALL, cut, of_block, paper, plain, titled, words
from layerwise.search.result import SearchResult

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from layerwise.geometry.arrays import Floats

MOST = 18  # configurations side by side
NAME = 26  # letters
CELL = 0.2  # inches
WORST = 32  # times the best, beyond which all has one colour


def costs(result: SearchResult, block: str = "") -> Figure:
    """Returns a heat map of layers by configurations: t_C + t_S relative to the layer's minimum, without transfers.

    Args:
        result: A search's result.
        block: Prefix of the layers' names.

    Returns:
        A matplotlib figure: neighbours with equal rows share a row; at most 18 configurations are shown, among them
        each layer's best and those of the strategy. Rings mark the strategy; white is what a layer cannot have.

    Raises:
        LayerwiseError: There is no such block.

    Examples:
        >>> import layerwise
        >>> from layerwise.search import search
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> figure = costs(search(model, layerwise.SearchSpace(4)))
    """
    best, tables = result.best, result.tables
    rows = list[tuple[str, dict[Config, float], Config]]()
    for layer in of_block(best.model.graph.inner, block):
        least = float(tables.node[layer.name].min())
        if least > 0:  # otherwise it takes no time, however it is split
            ratios = (tables.node[layer.name] / least).round(6).tolist()
            cells = dict(zip(tables.configs[layer.name], ratios, strict=True))
            rows.append((layer.name, cells, best.strategy[layer.name].cells))
    if not rows:
        raise LayerwiseError(f"no layer in block {block!r} takes time")
    merged = [list(run) for _, run in groupby(rows, key=lambda row: row[1:])]
    every = dict.fromkeys(config for _, cells, _ in rows for config in cells)
    chosen = {config for *_, config in rows} | {min(cells, key=lambda c: cells[c]) for _, cells, _ in rows}

    def rank(config: Config) -> tuple[bool, float]:
        return config not in chosen, sum(np.log(min(cells.get(config, WORST), WORST)) for _, cells, _ in rows)

    columns = sorted(sorted(every, key=rank)[:MOST], key=lambda config: (config.total, str(config)))
    values = np.array([[run[0][1].get(config, np.nan) for config in columns] for run in merged])
    figure = paper("the heat map of costs", CELL * len(merged) + 1.9, max(0.24 * len(columns) + 2.8, 5.0))
    axes = figure.add_subplot()
    top = max(2.0, min(float(np.nanmax(values)), WORST))
    inside = [t for t in ((1, 2, 4, 8, 16, 32) if top > 4 else (1, 1.2, 1.5, 2, 3, 4)) if t < top / 1.2]
    _heat(figure, axes, values, {t: f"{t:.2g}" for t in (*inside, top)}, "t_C + t_S over the layer's least, ×")
    for y, run in enumerate(merged):
        if run[0][2] in columns:
            _ring(axes, columns.index(run[0][2]), y)
    axes.set_xticks(range(len(columns)), [_written(config) for config in columns], rotation=90, size=SMALL)
    axes.set_yticks(range(len(merged)), [_run_name([row[0] for row in run]) for run in merged], size=SMALL)
    several = f", {len(columns)} of {len(every)} configurations" if len(columns) < len(every) else ""
    axes.set_title(f"{titled(best)}{several}", size=FONT)
    return figure


def _run_name(names: list[str]) -> str:
    return cut(names[0], NAME) if len(names) == 1 else f"{cut(names[0], NAME - 5)} (+{len(names) - 1})"


def _written(config: Config) -> str:
    return str(config) if config.total > 1 else "one device"


def _ring(axes: Axes, x: float, y: float) -> None:
    axes.plot([x], [y], "o", markersize=8, markerfacecolor="none", markeredgecolor="black", markeredgewidth=2.6)
    axes.plot([x], [y], "o", markersize=8, markerfacecolor="none", markeredgecolor="white", markeredgewidth=1.2)


def _heat(figure: Figure, axes: Axes, values: Floats, ticks: Mapping[float, str], label: str = "") -> None:
    """Numbers above 0 on a logarithmic scale that is readable without colours, between the ends of `ticks`."""
    from matplotlib.colors import LogNorm

    norm, shown_at = LogNorm(min(ticks), max(ticks), clip=True), np.where(values > 0, values, np.nan)
    bar = figure.colorbar(
        axes.imshow(shown_at, cmap="cividis_r", norm=norm, aspect="auto"), ax=axes, pad=0.02, aspect=25, shrink=0.9
    )
    bar.set_ticks(list(ticks), labels=list(ticks.values()))
    bar.ax.minorticks_off()
    bar.ax.tick_params(labelsize=SMALL)
    bar.set_label(label, size=SMALL)
    axes.set_xticks(np.arange(values.shape[1] + 1) - 0.5, minor=True)
    axes.set_yticks(np.arange(values.shape[0] + 1) - 0.5, minor=True)
    axes.grid(which="minor", color="white", linewidth=0.8)
    axes.tick_params(which="both", length=0)


def transfers(result: SearchResult, edge: tuple[str, str]) -> Figure:
    """Returns a heat map of the transfer along one edge: t_X by the configurations of its two layers.

    Args:
        result: A search's result.
        edge: The names of the layer that computes the tensor, and of the one that reads it.

    Returns:
        A matplotlib figure with the cheapest 18 configurations of each end. White is no transfer at all; the ring is
        the strategy.

    Raises:
        LayerwiseError: There is no such edge.

    Examples:
        >>> import layerwise
        >>> from layerwise.search import search
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> result = search(model, layerwise.SearchSpace(4))
        >>> figure = transfers(result, ("features.0", "features.2"))
    """
    best, tables = result.best, result.tables
    names = [name for name in tables.transfer if name[:2] == tuple(edge)]
    if not names:
        raise LayerwiseError(f"there is no edge {edge[0]!r} -> {edge[1]!r}: {_edges_of(result, edge)}")
    table = sum((tables.transfer[name] for name in names), np.zeros((1, 1)))
    kept = list[list[int]]()
    for axis, name in enumerate(edge):
        configs, least = tables.configs[name], table.min(axis=1 - axis)
        chosen = configs.index(best.strategy[name].cells)
        cheap = sorted(range(len(configs)), key=lambda i: (i != chosen, tables.node[name][i] + least[i]))[:MOST]
        kept.append(sorted(cheap, key=lambda i: (configs[i].total, str(configs[i]))))
    values = 1e3 * table[np.ix_(*kept)]
    figure = paper("the heat map of transfers", CELL * len(kept[0]) + 2.0, max(0.24 * len(kept[1]) + 2.4, 5.0))
    axes = figure.add_subplot()
    some = values[values > 0]
    low, high = (float(some.min()), float(some.max())) if some.size else (1.0, 2.0)
    powers = [t for power in range(-6, 6) for t in (10.0**power, 3 * 10.0**power) if 1.3 * low < t < high / 1.3]
    _heat(figure, axes, values, {t: units(t / 1e3, "s") for t in (low, *powers, max(high, 1.01 * low))})
    for axis, (ticks, label) in enumerate(zip((axes.set_yticks, axes.set_xticks), edge, strict=True)):
        texts = [_written(tables.configs[label][i]) for i in kept[axis]]
        ticks(range(len(texts)), texts, size=SMALL, rotation=90 * axis)
    axes.set_ylabel(words(edge[0]), size=SMALL)
    axes.set_xlabel(words(edge[1]), size=SMALL)
    at = [tables.configs[name].index(best.strategy[name].cells) for name in edge]
    _ring(axes, kept[1].index(at[1]), kept[0].index(at[0]))
    tensor = best.model.graph[edge[0]].out.describe()
    axes.set_title(f"{titled(best)}: {tensor}, forwards and back", size=FONT)
    return figure


def _edges_of(result: SearchResult, edge: tuple[str, str]) -> str:
    targets = [v for u, v, _ in result.tables.transfer if u == edge[0]]
    return f"{edge[0]!r} feeds {', '.join(targets)}" if targets else f"nothing is fed by {edge[0]!r}"


def regret(result: SearchResult, block: str = "") -> Figure:
    """Returns the cost of each layer's second best configuration, with all other layers chosen again around it.

    Args:
        result: A search's result.
        block: Prefix of the layers' names.

    Returns:
        A matplotlib figure: a dot for each layer, in percent of the optimum of equation 1, with the configuration's
        name. A layer without a dot has another configuration that is as good. Times are min-marginals, by elimination.

    Raises:
        LayerwiseError: There is no such block, or the tables do not fit into memory.

    Examples:
        >>> import layerwise
        >>> from layerwise.search import search
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> figure = regret(search(model, layerwise.SearchSpace(4)))
    """
    names = [layer.name for layer in of_block(result.best.model.graph.inner, block)]
    found = {name: these for name in names if len(these := result.alternatives[name]) > 1}
    more = [100 * (these[1].step_time_s / these[0].step_time_s - 1) for these in found.values()]
    dots = [(y, percent) for y, percent in enumerate(more) if percent > 1e-6]
    figure = paper("the regret", CELL * len(found) + 0.9)
    axes = figure.add_subplot()
    axes.set_xscale("log")
    low, high = (min(p for _, p in dots) / 2, max(p for _, p in dots) * 30) if dots else (0.1, 1.0)
    axes.hlines([y for y, _ in dots], low, [p for _, p in dots], color="#999999", linewidth=0.8)
    axes.plot([p for _, p in dots], [y for y, _ in dots], "o", color="#0072B2", markersize=5)
    for y, ((first, second, *_), percent) in enumerate(zip(found.values(), more, strict=True)):
        at = percent if percent > 1e-6 else low
        text = f"{_written(first.config)}, else {_written(second.config)}"
        axes.annotate(text, (at, y), xytext=(6, 0), textcoords="offset points", size=SMALL, va="center")
    axes.set_xlim(low, high)
    axes.set_ylim(len(found) - 0.4, -0.6)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}%")
    axes.set_yticks(range(len(found)), [cut(name, NAME) for name in found])
    plain(axes, "more time by equation 1 with the second best")
    axes.set_title(titled(result.best), size=FONT)
    return figure
