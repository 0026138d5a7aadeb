"""Charts of a plan, as plain data for Plotly: where the time goes, the step by device, boxes, memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

from layerwise.errors import shown
from layerwise.quantities import units
from layerwise.report.content import Chart
from layerwise.report.picture import PALETTE, PARTS, anchor

HIDDEN = ("beside computation (not in the step)", "#8886")
LINE = 24  # pixels of a row
NEGLIGIBLE = 1 / 3000  # of a step: what is shorter is not drawn
Box = tuple[tuple[int, int], tuple[int, int]]  # down and across, from and to
Kinds = Mapping[Any, Sequence[float]]  # bytes by what they are held for, at each instant
Points = Sequence[tuple[str, float, float]]  # title, bytes, seconds
JSON = dict[str, object]
Style = Mapping[str, object]
AXIS: JSON = {"gridcolor": "#8883", "zerolinecolor": "#8886", "automargin": True}
LIMIT: JSON = {"type": "line", "line": {"color": PALETTE[5], "dash": "dash"}}


class Bar(NamedTuple):
    """A span of a row of a timeline, in seconds."""

    name: str
    part: str  # of PARTS
    layer: str
    start_s: float
    end_s: float


class SplitVolume(NamedTuple):
    """What each device has of a tensor, and what it needs, from above; the extents and labels of the two dimensions."""

    owned: Sequence[Box]
    needed: Sequence[Box]
    extents: Sequence[int]
    labels: Sequence[str]


def _layout(height: int, x: str, y: str = "", xaxis: Style = AXIS, yaxis: Style = AXIS, **more: Any) -> JSON:
    """What all charts have in common: they take the page's colours. x, y: titles."""
    clear = dict.fromkeys(("paper_bgcolor", "plot_bgcolor"), "rgba(0,0,0,0)")
    font = {"family": "system-ui, sans-serif", "size": 12}
    legend = {"orientation": "h", "y": 1, "yanchor": "bottom", "x": 0, "traceorder": "normal"}
    axes = {"xaxis": {**AXIS, **xaxis, "title": {"text": x}}, "yaxis": {**AXIS, **yaxis, "title": {"text": y}}}
    rest = {"margin": dict.fromkeys("lrtb", 10), "hoverlabel": {"bgcolor": "#222", "align": "left"}}
    return {"height": height, "font": font, "legend": legend, **clear, **axes, **rest, **more}


def time_by_block(rows: Sequence[tuple[str, str, Mapping[str, float]]]) -> Chart:
    """A bar a block, the longest first. rows: its title, where a click leads, seconds by part of the step."""
    titles, keys = [_text(title) for title, *_ in rows], [anchor(key) for _, key, _ in rows]
    places, data = list(range(len(rows))), list[JSON]()
    for part, (title, colour) in {**PARTS, "hidden": HIDDEN}.items():
        seconds = [parts.get(part, 0.0) for *_, parts in rows]
        hover = [f"<b>{name}</b><br>{title}: {units(s, 's')}" for name, s in zip(titles, seconds, strict=True)]
        if any(seconds):
            data.append(_bars(title, colour, y=places, x=_ms(seconds), hovertext=hover, customdata=keys))
    yaxis = {"tickvals": places, "ticktext": titles, "autorange": "reversed", "fixedrange": True}
    layout = _layout(110 + LINE * len(rows), "ms of a step", yaxis=yaxis, barmode="stack", bargap=0.25)
    return Chart("the time of a step by block of layers, the longest first", data, layout)


def timeline(rows: Sequence[tuple[str, Sequence[Bar]]], step_s: float) -> Chart:
    """A step by device: a row has two lanes, computation above communication."""
    data = list[JSON]()
    for part, (title, colour) in PARTS.items():
        lane = -0.2 if part in ("compute", "statistics") else 0.2
        drawn = [
            (row + lane, bar)
            for row, (_, bars) in enumerate(rows)
            for bar in bars
            if bar.part == part and bar.end_s - bar.start_s > step_s * NEGLIGIBLE
        ]
        seconds = [bar.end_s - bar.start_s for _, bar in drawn]
        hover = [f"<b>{_text(bar.name)}</b><br>{units(s, 's')}" for (_, bar), s in zip(drawn, seconds, strict=True)]
        where: JSON = {"y": [y for y, _ in drawn], "base": _ms([bar.start_s for _, bar in drawn]), "x": _ms(seconds)}
        keys = [anchor(bar.layer) for _, bar in drawn]
        data.append(_bars(title, colour, **where, width=0.36, hovertext=hover, customdata=keys))
    ticks = {"tickvals": list(range(len(rows))), "ticktext": [_text(title) for title, _ in rows], "showgrid": False}
    yaxis = {**ticks, "range": [len(rows) - 0.5, -0.5], "fixedrange": True}
    layout = _layout(110 + 2 * LINE * len(rows), "ms", yaxis=yaxis, barmode="overlay", hovermode="closest")
    return Chart("a step by device: computation, and below it communication", data, layout)


def memory(instants: Sequence[str], kinds: Kinds, fullest: int, limit_bytes: float) -> Chart:
    """What a device's memory is held for, instruction by instruction, below the limit."""
    data = list[JSON]()
    for (kind, sizes), colour in zip(kinds.items(), PALETTE, strict=False):
        hover = [f"{_text(at)}<br>{kind}: {units(size, 'B')}" for at, size in zip(instants, sizes, strict=True)]
        area = {"stackgroup": "all", "line": {"width": 0, "shape": "hv"}, "fillcolor": colour, "mode": "lines"}
        if any(sizes):
            data.append(
                {
                    "type": "scatter",
                    **area,
                    "name": kind,
                    "y": _gb([*sizes, sizes[-1]]),
                    "text": hover,
                    "hoverinfo": "text",
                }
            )
    most = sum(sizes[fullest] for sizes in kinds.values())
    near = limit_bytes < 3 * most
    line = {**LIMIT, "xref": "paper", "x0": 0, "x1": 1, "y0": limit_bytes / 1e9, "y1": limit_bytes / 1e9}
    words = f"{_text(instants[fullest])}: {units(most, 'B')}"
    mark = {"x": fullest, "y": most / 1e9, "text": words, "ax": 0, "ay": -25, "showarrow": True}
    yaxis: JSON = {"range": [0, max(1.2 * most, 1.1 * limit_bytes * near) / 1e9]}
    xaxis: JSON = {"showticklabels": False, "showgrid": False}
    layout = _layout(
        380, "the step's instructions, in order", "GB", xaxis, yaxis, shapes=[line] * near, annotations=[mark]
    )
    return Chart("memory of the fullest device over a step, by what it is held for", data, layout)


def time_and_memory(points: Points, curve: Points, limit_bytes: float) -> Chart:
    """Plans by what a device of them needs and what a step takes; the best plan under each limit as a curve."""
    data = list[JSON]()
    for each, mode, colour in ((curve, "lines+markers", PALETTE[2]), (points, "markers+text", PALETTE[0])):
        titles, sizes, seconds = zip(*each, strict=True) if each else ((), (), ())
        hover = [f"{_text(title)}<br>{units(size, 'B')}, {units(s, 's')} a step" for title, size, s in each]
        style = {"line": {"shape": "hv", "color": colour}, "marker": {"size": 9, "color": colour}}
        where = {"x": _gb(sizes), "y": _ms(seconds), "text": [*map(_text, titles)], "textposition": "top center"}
        data.append({"type": "scatter", "mode": mode, **style, **where, "hovertext": hover, "hoverinfo": "text"})
    near = limit_bytes < 3 * max(size for _, size, _ in (*points, *curve))  # else it would leave no room
    line = {**LIMIT, "yref": "paper", "y0": 0, "y1": 1, "x0": limit_bytes / 1e9, "x1": limit_bytes / 1e9}
    layout = _layout(
        320, "GB of a device", "ms of a step", yaxis={"rangemode": "tozero"}, shapes=[line] * near, showlegend=False
    )
    return Chart("the time of a step by the memory that it needs", data, layout)


def boxes(space: SplitVolume) -> Chart:
    """A coloured box for what each device has, and a dashed one for what it needs."""
    colours = {box: PALETTE[number % 7] for number, box in enumerate(dict.fromkeys(space.owned))}
    light = {"opacity": 0.45, "line": {"width": 0}}
    shapes = [_rectangle(box, {**light, "fillcolor": colour}) for box, colour in colours.items()]
    for own, need in zip(space.owned, space.needed, strict=True):
        shapes.append(_rectangle(need, {"line": {"color": colours[own], "dash": "dash", "width": 2}}))
    names = [", ".join(str(device) for device, own in enumerate(space.owned) if own == box) for box in colours]
    middle = {"x": [sum(across) / 2 for _, across in colours], "y": [sum(down) / 2 for down, _ in colours]}
    (down, across), (y, x) = space.extents, space.labels
    yaxis = {"range": [down, 0], "scaleanchor": "x", "constrain": "domain"}
    layout = _layout(380, x, y, {"range": [0, across], "constrain": "domain"}, yaxis, shapes=shapes)
    text = {"type": "scatter", "mode": "text", **middle, "text": names, "hoverinfo": "skip"}
    return Chart("boxes of devices in space", [text], layout)


def _rectangle(box: Box, style: JSON) -> JSON:
    (y0, y1), (x0, x1) = box
    return {"type": "rect", "x0": x0, "x1": x1, "y0": y0, "y1": y1, **style}


def _bars(title: str, colour: str, **more: object) -> JSON:
    return {"type": "bar", "orientation": "h", "name": title, "marker": {"color": colour}, "hoverinfo": "text", **more}


def _ms(seconds: Sequence[float]) -> list[float]:
    return [s * 1e3 for s in seconds]


def _gb(sizes: Sequence[float]) -> list[float]:
    return [size / 1e9 for size in sizes]


def _text(text: str) -> str:
    """A text that Plotly shows as it is: it reads some tags."""
    return escape(shown(text), quote=False)
