"""A step: its time by block of layers and by device, its memory, and boxes in space."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from layerwise.cost.timeline.shares import HIDDEN
from layerwise.quantities import units
from layerwise.report.html import anchor
from layerwise.search.plot.looks import CONFIGS, FONT, LEGEND, PARTS, SMALL, best_of, cut, paler, paper, plain
from layerwise.search.result import Candidate, SearchResult

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BESIDE = ("beside computation (not in the step)", "#ffffff")
ROWS = 12  # of a timeline, at most
NEGLIGIBLE = 1 / 3000  # of a step: what is shorter is not drawn
LIMIT: dict[str, Any] = {"color": "#D55E00", "linestyle": "--", "linewidth": 1}
Box = tuple[tuple[int, int], tuple[int, int]]  # down and across, from and to
Points = Sequence[tuple[str, float, float]]  # title, bytes, seconds


class Bar(NamedTuple):
    """A span of a row of a timeline, in seconds."""

    name: str
    part: str  # of PARTS
    layer: str
    start_s: float
    end_s: float


Rows = Sequence[tuple[str, Sequence[Bar]]]


class SplitVolume(NamedTuple):
    """What each device has of a tensor, and what it needs, from above; the extents and labels of the two dimensions."""

    owned: Sequence[Box]
    needed: Sequence[Box]
    extents: Sequence[int]
    labels: Sequence[str]


def _linked(bars: Any, keys: Sequence[str]) -> None:
    for bar, key in zip(bars, keys, strict=True):
        bar.set_url("#" + anchor(key))


def time_by_block(rows: Sequence[tuple[str, str, Mapping[str, float]]]) -> Figure:
    """A bar a block, the longest first. rows: its title, where a click leads, seconds by part of the step."""
    figure = paper("the time by block", 0.8 + 0.24 * len(rows))
    axes, left = figure.add_subplot(), [0.0] * len(rows)
    for part, (title, colour) in {**PARTS, HIDDEN: BESIDE}.items():
        ms = [1e3 * parts.get(part, 0.0) for *_, parts in rows]
        edge = {"edgecolor": "#666666", "hatch": "////", "linewidth": 0.5} if part == HIDDEN else {}
        if any(ms):
            bars = axes.barh(range(len(rows)), ms, 0.75, left, color=colour, label=title, **edge)  # type: ignore[arg-type]
            _linked(bars, [key for _, key, _ in rows])
            left = [a + b for a, b in zip(left, ms, strict=True)]
    axes.set_ylim(len(rows) - 0.4, -0.6)
    axes.set_yticks(range(len(rows)), [cut(title, 34) for title, *_ in rows])
    plain(axes, "ms of a step")
    figure.legend(loc="outside upper left", ncols=3, **LEGEND)
    return figure


def bars_of(candidate: Candidate, device: int) -> list[Bar]:
    """The spans of a device."""
    here = (span for span in candidate.spans if span.devices[device])
    times = ((span, round(float(span.start_s[device]), 9), round(float(span.end_s[device]), 9)) for span in here)
    return [Bar(span.name, span.category, span.layer, *ends) for span, *ends in times]


def rows_of(candidate: Candidate) -> Rows:
    """A row for all devices that do the same at the same time."""
    same: dict[tuple[Bar, ...], list[int]] = {}
    for device in range(candidate.shares.devices):
        same.setdefault(tuple(bars_of(candidate, device)), []).append(device)
    return [(_devices(devices), bars) for bars, devices in same.items()]


def _devices(devices: Sequence[int]) -> str:
    return f"devices {devices[0]}–{devices[-1]} ({len(devices)})" if len(devices) > 1 else f"device {devices[0]}"


def timeline(result: SearchResult | Candidate) -> Figure:
    """Returns a step by device, as it is simulated: computation, and below it what is sent meanwhile.

    Args:
        result: Of a search; or one of its candidates, such as `result.baselines["data"]`.

    Returns:
        A figure of matplotlib: a row for all devices that do the same at the same time, 12 at most.

    Examples:
        >>> import layerwise
        >>> from layerwise.search import search
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> figure = timeline(search(model, layerwise.SearchSpace(4)))
    """
    return draw_timeline(rows_of(best_of(result))[:ROWS])


def draw_timeline(rows: Rows) -> Figure:
    """A step by device: a row has two lanes, computation above communication."""
    figure = paper("the step by device", 0.8 + 0.45 * len(rows))
    axes, step_s = figure.add_subplot(), max(bar.end_s for _, bars in rows for bar in bars)
    for part, (title, colour) in PARTS.items():
        lane = -0.2 if part in ("compute", "statistics") else 0.2
        spans = [
            (row + lane, bar)
            for row, (_, bars) in enumerate(rows)
            for bar in bars
            if bar.part == part and bar.end_s - bar.start_s > step_s * NEGLIGIBLE
        ]
        if spans:
            lengths, starts = zip(*((1e3 * (b.end_s - b.start_s), 1e3 * b.start_s) for _, b in spans), strict=True)
            edge = "white" if part == "compute" else colour
            style = {"color": colour, "edgecolor": edge, "linewidth": 0.3, "label": title}
            bars = axes.barh([y for y, _ in spans], lengths, 0.36, starts, **style)  # type: ignore[arg-type]
            _linked(bars, [bar.layer for _, bar in spans])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_yticks(range(len(rows)), [title for title, _ in rows])
    plain(axes, "ms")
    figure.legend(loc="outside upper left", ncols=4, **LEGEND)
    return figure


def memory(instants: Sequence[str], kinds: Mapping[Any, Sequence[float]], fullest: int, limit_bytes: float) -> Figure:
    """What a device's memory is held for, instruction by instruction, below the limit."""
    figure, used = paper("the memory over a step", 3.4), {kind: s for kind, s in kinds.items() if any(s)}
    from matplotlib import colormaps

    axes, most = figure.add_subplot(), sum(sizes[fullest] for sizes in kinds.values()) / 1e9
    colours = [colormaps["viridis"](i / max(len(used) - 1, 1)) for i in range(len(used))]
    stacks = [[size / 1e9 for size in sizes] for sizes in used.values()]
    axes.stackplot(range(len(instants)), stacks, labels=list(used), colors=colours, step="post")
    near = limit_bytes / 1e9 < 3 * most
    if near:
        axes.axhline(limit_bytes / 1e9, **LIMIT, label="limit")
    arrow = {"arrowstyle": "->", "linewidth": 0.8}
    where = {"ha": "left" if fullest < len(instants) / 2 else "right", "va": "bottom", "size": SMALL}
    text = f"{cut(instants[fullest], 40)}: {units(most * 1e9, 'B')}"
    axes.annotate(text, (fullest, most), (0, 14), textcoords="offset points", arrowprops=arrow, **where)  # type: ignore[arg-type]
    axes.set_ylim(0, max(1.25 * most, 1.1 * limit_bytes / 1e9 * near))
    axes.set_xlim(0, max(len(instants) - 1, 1))
    plain(axes, "the step's instructions, in order", "GB")
    figure.legend(loc="outside upper left", ncols=4, **LEGEND)
    return figure


def time_and_memory(points: Points, curve: Points, limit_bytes: float) -> Figure:
    """Plans by what a device of them needs and what a step takes; the best plan under each limit as a curve."""
    figure = paper("time by memory", 3.0)
    axes, every = figure.add_subplot(), [*points, *curve]
    if curve:
        axes.plot([size / 1e9 for _, size, _ in curve], [1e3 * s for *_, s in curve], "s-", color=CONFIGS[2],
                  drawstyle="steps-post", markersize=4, label="the best plan under a limit")  # fmt: skip
    axes.plot([size / 1e9 for _, size, _ in points], [1e3 * s for *_, s in points], "o", color=CONFIGS[0])
    groups = dict[tuple[float, float], list[str]]()
    for name, size, seconds in points:
        groups.setdefault((round(size / 1e9, 3), round(1e3 * seconds, 3)), []).append(name)
    for at, names in groups.items():
        axes.annotate(", ".join(names), at, (0, 5), textcoords="offset points", ha="center", size=SMALL)
    if limit_bytes < 3 * max(size for _, size, _ in every):  # else it would leave no room
        axes.axvline(limit_bytes / 1e9, **LIMIT, label="limit")
    axes.set_ylim(0, 1.2e3 * max(s for *_, s in every))
    axes.margins(x=0.15)
    plain(axes, "GB of a device", "ms of a step")
    if axes.get_legend_handles_labels()[0]:
        figure.legend(loc="outside upper left", ncols=2, **LEGEND)
    return figure


def boxes(space: SplitVolume) -> Figure:
    """A coloured box for what each device has, and a dashed one for what it needs."""
    (down, across), (y_label, x_label) = space.extents, space.labels
    figure = paper("boxes of devices", 4.2, 4.8)
    from matplotlib.patches import Rectangle

    axes = figure.add_subplot()
    own = dict.fromkeys(space.owned)
    for number, box in enumerate(own):
        (y0, y1), (x0, x1) = box
        colour = CONFIGS[number % len(CONFIGS)]
        axes.add_patch(Rectangle((x0, y0), x1 - x0, y1 - y0, facecolor=paler(colour, 0.55), edgecolor="none"))
        names = ", ".join(str(device) for device, each in enumerate(space.owned) if each == box)
        axes.text((x0 + x1) / 2, (y0 + y1) / 2, names, size=FONT, ha="center", va="center")
        needs = dict.fromkeys(need for each, need in zip(space.owned, space.needed, strict=True) if each == box)
        for (a0, a1), (b0, b1) in needs:
            style = {"fill": False, "edgecolor": colour, "linestyle": "--", "linewidth": 1.8}
            axes.add_patch(Rectangle((b0, a0), b1 - b0, a1 - a0, **style))  # type: ignore[arg-type]
    axes.set_xlim(-0.02 * across, 1.02 * across)
    axes.set_ylim(1.02 * down, -0.02 * down)
    axes.set_aspect("equal")
    plain(axes, x_label, y_label)
    return figure
