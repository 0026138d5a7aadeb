"""The graph of a network: its strategy on it, and how eliminations reduce it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
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
    of_block,
    paler,
    paper,
    titled,
)  # fmt: skip
from layerwise.search.result import Candidate, SearchResult
from layerwise.search.solve.eliminate import reduction_order

if TYPE_CHECKING:
    import networkx as nx
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST = 30  # layers, up to which each is named, or each elimination has a panel
ACROSS, DOWN = 0.46, 0.30  # inches between layers without names
NAMED, LINE = 0.9, 0.46  # the same with names
PANELS = 4  # side by side


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


def _edge(axes: Axes, source: At, target: At, colour: str = "#666666", width: float = 0.8) -> None:
    """A line, bowed if it passes layers, and through the margins to the next row."""
    if source.row != target.row and target.x == 0 and target.row == source.row + 1:
        for (x, y, _), side in ((source, 1), (target, -1)):
            axes.plot([x, x + 0.58 * side], [y, y], ":", color=colour, linewidth=width, zorder=1)
        return
    if source.row != target.row:
        width, colour = 0.6, "#aaaaaa"
    far = source.row == target.row and target.x - source.x > 1 and abs(source.y - target.y) < 0.5
    bow = {"connectionstyle": f"arc3,rad={-0.25 if far else 0}", "arrowstyle": "-", "color": colour}
    between = {"xy": (target.x, target.y), "xytext": (source.x, source.y), "zorder": 1}
    axes.annotate("", **between, arrowprops={**bow, "linewidth": width, "shrinkA": 0, "shrinkB": 0})  # type: ignore[arg-type]


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


def eliminations(result: SearchResult | Candidate | CostModel, block: str = "") -> Figure:
    """Returns the eliminations of a block of layers: a panel with the graph before each of them.

    Args:
        result: A search's result or candidate, or the cost model to search.
        block: Prefix of the layers' names, such as `"Mixed_5b"`; their neighbours are shown too.

    Returns:
        A matplotlib figure. Blue is the layer to be eliminated next (node elimination: its best configuration is known
        for each pair of its neighbours' configurations); red is the edge that replaces it, thick if there was one
        already (edge elimination: the two are added). The last panel shows what is left.

    Raises:
        LayerwiseError: There is no such block, or it has more than 30 layers.

    Examples:
        >>> import layerwise
        >>> graph = layerwise.fuse(layerwise.load_model("inception_v3", 32))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> figure = eliminations(model, "Mixed_5b")
    """
    import networkx as nx

    model = result if isinstance(result, CostModel) else best_of(result).model
    inside = {layer.name for layer in of_block(model.graph.inner, block)}
    if len(inside) > MOST:
        raise LayerwiseError(
            f"there is no room for the eliminations of {len(inside)} layers: name a block of at most {MOST}"
        )
    graph: nx.DiGraph[str] = nx.DiGraph((u, v) for u, v, _ in model.graph.edges() if {u, v} & inside)
    order = reduction_order(list(graph), list(graph.edges))
    letters = dict(zip(graph, (chr(ord("a") + i) if i < 26 else str(i) for i in range(len(graph))), strict=True))
    at, news = placed(graph, len(graph)), dict[tuple[str, str], float]()
    rows, bottom = -(-(len(order) + 1) // PANELS), max(place.y for place in at.values())
    high = max(1.0, 0.22 * (bottom + 2))
    figure = paper("eliminations", high * rows + 0.45 + 0.17 * -(-len(graph) // 2))
    panels = figure.subplots(rows, PANELS, squeeze=False).ravel()
    for number, (axes, name) in enumerate(zip(panels, [*order, ""], strict=False)):
        for u, v in graph.edges:
            _edge(axes, at[u], at[v], *(("#D55E00", news[u, v]) if (u, v) in news else ()))
        for node in graph:
            fill = "#0072B2" if node == name else "white" if node in inside else "#d4d4d4"
            style = {"boxstyle": "circle,pad=0.15", "facecolor": fill, "edgecolor": "black", "linewidth": 0.5}
            text = {"size": SMALL, "ha": "center", "va": "center", "color": "white" if node == name else "black"}
            axes.text(at[node].x, at[node].y, letters[node], bbox=style, **text)
        axes.set_title(
            f"{number + 1}: {letters[name]} goes" if name else f"left: {', '.join(letters[node] for node in graph)}",
            size=SMALL,
        )
        if name:
            (before,), (behind,) = graph.predecessors(name), graph.successors(name)
            news = {(before, behind): 2.6 if graph.has_edge(before, behind) else 1.2}
            graph.remove_node(name)
            graph.add_edge(before, behind)
    for axes in panels:
        bare(axes)
        axes.set_xlim(-0.6, max(place.x for place in at.values()) + 0.6)
        axes.set_ylim(bottom + 0.7, -0.7)
    for axes in panels[len(order) + 1 :]:
        axes.set_visible(False)
    figure.suptitle(f"{model.graph.name}: {len(order)} eliminations", size=FONT)
    names = [f"{letter} {name}" for name, letter in letters.items()]
    figure.supxlabel(_in_columns(names, 2), x=0.02, ha="left", size=SMALL, family="monospace")
    return figure


def _in_columns(names: Sequence[str], columns: int) -> str:
    """Names in columns, one below the other."""
    high = -(-len(names) // columns)
    parts = [names[first : first + high] for first in range(0, len(names), high)]
    wide = max(map(len, names)) + 3
    return "\n".join("".join(part[line].ljust(wide) for part in parts if line < len(part)) for line in range(high))
