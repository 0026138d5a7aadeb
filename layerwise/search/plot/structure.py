"""A strategy on the graph of its network."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layerwise.quantities import units
from layerwise.search.plot.looks import (
    FONT,
    LEGEND,
    LETTER,
    SMALL,
    WIDTH,
    bare,
    best_of,
    cut,
    ink,
    legend_of,
    looks,
    paler,
    paper,
    titled,
)  # fmt: skip
from layerwise.search.result import Candidate, SearchResult

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 30  # layers: of at most so many each is named
ACROSS, DOWN = 0.46, 0.30  # inches between layers without names
NAMED, LINE = 0.9, 0.46  # the same with names


class At(NamedTuple):
    """A layer's position: column, line, and row of the figure."""

    x: float
    y: float
    row: int


def strategy(result: SearchResult | Candidate) -> Figure:
    """Returns the strategy on the network's graph: layers from left to right, coloured by configuration.

    Args:
        result: A search's result, or one of its candidates, such as `result.baselines["data"]`.

    Returns:
        A matplotlib figure. A deep network continues in the next row. Lines are edges; up to 30 layers have names.

    Examples:
        >>> import layerwise
        >>> from layerwise.search import search
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> figure = strategy(search(model, layerwise.SearchSpace(4)))
    """
    import networkx as nx

    best = best_of(result)
    layers = {layer.name: best.strategy[layer.name] for layer in best.model.graph.inner}
    named = len(layers) <= MOST
    across, down = (NAMED, LINE) if named else (ACROSS, DOWN)
    graph: nx.DiGraph[str] = nx.DiGraph()
    graph.add_nodes_from(layers)
    graph.add_edges_from((u, v) for u, v, _ in best.model.graph.edges() if u in layers and v in layers)
    at = placed(graph, int((WIDTH - 0.3) / across))
    styles = looks(layers.values())
    bottom = max(place.y for place in at.values()) + 0.7
    figure = paper("the strategy over the graph", down * (bottom + 0.9) + 0.5 + 0.2 * -(-len(styles) // 4))
    axes = figure.add_subplot()
    from matplotlib.patches import Rectangle

    for u, v in graph.edges:
        _edge(axes, at[u], at[v])
    for name, (x, y, _) in at.items():
        config = layers[name]
        look = styles[config]
        axes.add_patch(Rectangle((x - 0.39, y - 0.25), 0.78, 0.5, **look.style, zorder=2))
        text = " ".join(f"{label}{degree}" for label, degree in config.degrees)
        if text and not look.hatch and len(text) * LETTER < 0.8 * across:
            axes.text(x, y, text, size=SMALL, ha="center", va="center", color=ink(paler(look.colour, 0)), zorder=3)
        if named:
            _name(axes, x, y - 0.4, cut(name, int(across / LETTER)))
    if not named:
        for block, x, y in _blocks(at):
            _name(axes, x, y, block)
    axes.set_xlim(-0.6, (WIDTH - 0.3) / across - 0.4)
    axes.set_ylim(bottom, -0.9)
    bare(axes)
    axes.set_title(f"{titled(best)}: {units(best.timeline.total_s, 's')} a step", size=FONT)
    figure.legend(handles=legend_of(styles), loc="outside lower left", ncols=4, **LEGEND)
    return figure


def _name(axes: Axes, x: float, y: float, name: str) -> None:
    paper_white = {"facecolor": "white", "edgecolor": "none", "pad": 0.6}
    axes.text(x, y, name, size=SMALL, ha="center", va="bottom", bbox=paper_white, zorder=1.5)


def _blocks(at: Mapping[str, At]) -> Iterator[tuple[str, float, float]]:
    """The blocks of several branches, by the first part of their names, with the position of each name."""
    for block, group in groupby(at.items(), key=lambda item: item[0].partition(".")[0]):
        places = [place for _, place in group]
        first = [place for place in places if place.row == places[0].row]
        if len({place.y for place in first}) > 1:
            yield cut(block, 14), (first[0].x + max(p.x for p in first)) / 2, min(place.y for place in first) - 0.45


def _edge(axes: Axes, source: At, target: At) -> None:
    """A line, bowed if it passes layers, and through the margins to the next row."""
    here = source.row == target.row
    if target.x == 0 and target.row == source.row + 1:
        for (x, y, _), side in ((source, 1), (target, -1)):
            axes.plot([x, x + 0.58 * side], [y, y], ":", color="#666666", linewidth=0.8, zorder=1)
        return
    far = here and target.x - source.x > 1 and abs(source.y - target.y) < 0.5
    bow = {"connectionstyle": f"arc3,rad={-0.25 if far else 0}", "arrowstyle": "-", "shrinkA": 0, "shrinkB": 0}
    colour, width = ("#666666", 0.8) if here else ("#aaaaaa", 0.6)
    between = {"xy": (target.x, target.y), "xytext": (source.x, source.y), "zorder": 1}
    axes.annotate("", **between, arrowprops={**bow, "color": colour, "linewidth": width})  # type: ignore[arg-type]


def placed(graph: nx.DiGraph[str], columns: int) -> dict[str, At]:
    """A position for each layer: columns by depth, branches below each other, rows of `columns` columns."""
    import networkx as nx

    y = dict[str, float]()
    generations = list(nx.topological_generations(graph))
    for names in generations:
        wanted = {name: float(np.mean([y[p] for p in graph.predecessors(name)] or [0.0])) for name in names}
        names.sort(key=lambda name: wanted[name])
        free, found = -np.inf, list[float]()
        for name in names:
            found.append(free := max(wanted[name], free + 1))
        shift = float(np.mean([wanted[name] - at for name, at in zip(names, found, strict=True)]))
        y |= {name: at + shift for name, at in zip(names, found, strict=True)}
    depth = {name: x for x, names in enumerate(generations) for name in names}
    ends = [max([depth[v] for name in names for v in graph.successors(name)], default=0) for names in generations]
    result, top, first, row = dict[str, At](), 0.0, 0, -1
    while first < len(generations):
        row, last = row + 1, min(first + columns, len(generations))
        if last < len(generations):  # a row ends, if possible, where the next one needs only one layer
            narrow = [x for x in range(first + columns // 2, last + 1) if max(ends[first : x - 1], default=0) < x]
            last = max((x for x in narrow if len(generations[x - 1]) == 1), default=last)
        here = [(x, name) for x, names in enumerate(generations[first:last]) for name in names]
        first = last
        highest = min(y[name] for _, name in here)
        result |= {name: At(x, top + y[name] - highest, row) for x, name in here}
        top += max(y[name] for _, name in here) - highest + 1.5
    return result
