"""A strategy as layers by devices: which device has which cell, and what the time of each layer is."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from layerwise.config import Config
from layerwise.plan import Plan
from layerwise.quantities import units
from layerwise.search.plot.blocks import blocks
from layerwise.search.plot.looks import (
    FONT,
    LEGEND,
    LETTER,
    PARTS,
    SMALL,
    WIDTH,
    Look,
    best_of,
    cut,
    ink,
    legend_of,
    looks,
    paler,
    paper,
)
from layerwise.search.result import Candidate, SearchResult, drawn

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Seconds = Mapping[str, Mapping[str, float]]  # of each layer, by part of the step
Widths = Literal["time", "equal"]
ROWS = 16  # at most: of more devices, equally many share a row
LEAST = 0.004  # of the picture's width that a layer has
LEFT, ROW, STRIP = 1.0, 0.2, 0.6  # inches: of the devices' names, a row, the times below
LONGEST = 24  # letters of a name; longer ones are cut


class Layers(NamedTuple):
    """A layer of the picture, or those that correspond to each other in equal blocks: where it is, and how wide."""

    names: tuple[str, ...]
    block: str
    config: Config
    seconds: Mapping[str, float]  # by part of the step, the sum over its names
    left: float
    width: float


def laid_out(strategy: Mapping[str, Config], seconds: Seconds, widths: Widths = "time") -> list[Layers]:
    """The layers of a picture, left to right; repeated blocks stand there once. By time, as wide as all of them."""
    sums = {name: sum(seconds.get(name, {}).get(part, 0.0) for part in PARTS) for name in strategy}
    least = LEAST * sum(sums.values()) or 1.0
    result, left = list[Layers](), 0.0
    for block in blocks(strategy, sums):
        for names in block.layers:
            here = {part: sum(seconds.get(name, {}).get(part, 0.0) for name in names) for part in PARTS}
            width = 1.0 if widths == "equal" else max(sum(here.values()), least)
            result.append(Layers(names, block.title, strategy[names[0]], here, left, width))
            left += width
    return result


def device_rows(devices: int) -> list[range]:
    """The devices of each row."""
    count = min(devices, ROWS)
    return [range(row * devices // count, (row + 1) * devices // count) for row in range(count)]


def cells_of(config: Config, devices: int) -> Iterator[tuple[int, int, int]]:
    """The rows that have cells of a layer, with the first and the last of its cells there."""
    strided = config.placement == "strided"
    at = [cell * devices // config.total if strided else cell for cell in range(config.total)]
    at = [device for device, weight in enumerate(config.weights) if weight] or at
    for row, these in enumerate(device_rows(devices)):
        if cells := [cell for cell, device in enumerate(at) if device in these]:
            yield row, cells[0], cells[-1]


def cell_name(config: Config, cell: int) -> str:
    """`n1 h0`: which part of each dimension, samples outermost; nothing where their order depends on the tensor."""
    if sum(label not in ("n", "k") for label, _ in config.degrees) > 1:
        return ""
    places = []
    for label, degree in reversed(config.degrees):
        cell, place = divmod(cell, degree)
        places.append(f"{label}{place}")
    return " ".join(reversed(places))


def layers(result: SearchResult | Candidate | Plan, widths: Widths = "time") -> Figure:
    """Returns a strategy as layers by devices, coloured by configuration, paler for later cells; below it the time.

    Args:
        result: Of a search, one of its candidates, or a plan.
        widths: `"time"`: a layer is as wide as it takes time, and below it is what that time is made of. `"equal"`:
            all are of one width, and below it is how long each takes, on the slowest device.

    Returns:
        A figure of matplotlib. Where there is room, a block names its cell: `n1 h0` is the second of the samples' parts
        and the first of the height's.

    Examples:
        >>> import layerwise
        >>> from layerwise.search import search
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> figure = layers(search(model, layerwise.SearchSpace(4)), "equal")
    """
    if isinstance(result, Plan):
        parts = result.predicted_layers.items()
        seconds = {name: {part.removesuffix("_s"): s for part, s in of.items()} for name, of in parts}
        return draw(result.strategy, seconds, result.gpus, widths=widths)
    return draw(*drawn(best_of(result)), widths=widths)


def draw(
    strategy: Mapping[str, Config], seconds: Seconds, devices: int, *, widths: Widths = "time", linked: bool = False
) -> Figure:
    """The picture. linked: whether blocks are links to their layers in a page."""
    found, rows = laid_out(strategy, seconds, widths), device_rows(devices)
    styles = looks(layer.config for layer in found)
    head = 0.35 + 0.7 * LETTER * min(LONGEST, max(len(layer.block) for layer in found))  # the names, which are askew
    tall = ROW * len(rows)
    foot = 0.75 + 0.2 * -(-len(styles) // 3)
    high = head + tall + STRIP + foot
    figure = paper("the picture of a plan", high)
    figure.set_layout_engine("none")
    inches = WIDTH - LEFT - 0.45
    sizes = ((high - head - tall, tall), (high - head - tall - STRIP - 0.07, STRIP))
    top, strip = (
        figure.add_axes((LEFT / WIDTH, at / high, inches / WIDTH, size / high), frame_on=False) for at, size in sizes
    )
    _devices(top, found, rows, styles, inches, linked=linked)
    handles = _times(strip, found, widths)
    for axes in (top, strip):
        axes.set_xlim(0, found[-1].left + found[-1].width)
        axes.set_xticks([])
        axes.tick_params(length=0, labelsize=SMALL)
    below = (foot - 0.32) / high
    figure.legend(handles=handles, loc="upper left", bbox_to_anchor=(LEFT / WIDTH, below), ncols=4, **LEGEND)
    below = (foot - 0.54) / high
    figure.legend(handles=legend_of(styles), loc="upper left", bbox_to_anchor=(LEFT / WIDTH, below), ncols=3, **LEGEND)
    return figure


def _devices(
    axes: Axes,
    found: Sequence[Layers],
    rows: Sequence[range],
    styles: Mapping[Config, Look],
    inches: float,
    *,
    linked: bool,
) -> None:
    """The blocks; above them the names, at the left the devices."""
    from matplotlib.collections import PolyCollection

    from layerwise.report.html import anchor

    inch = (found[-1].left + found[-1].width) / inches  # in units of the axis
    for look in dict.fromkeys(styles.values()):
        corners, fills, links = [], [], []
        for layer in found:
            if styles[layer.config] != look:
                continue
            left, right = layer.left, layer.left + layer.width - min(0.015 * inch, layer.width / 5)
            cells = list(cells_of(layer.config, rows[-1].stop))
            texts = ["…".join(dict.fromkeys(cell_name(layer.config, cell) for cell in ends)) for _, *ends in cells]
            roomy = not look.hatch and (max(map(len, texts)) + 1) * LETTER * inch < layer.width
            for (row, first, _), text in zip(cells, texts, strict=True):
                corners.append([(left, row), (right, row), (right, row + 0.94), (left, row + 0.94)])
                fills.append(paler(look.colour, 0.45 * first / layer.config.total))
                links.append("#" + anchor(layer.names[0]))
                if roomy:
                    style = {"size": SMALL, "ha": "center", "va": "center", "color": ink(fills[-1])}
                    axes.text(left + layer.width / 2, row + 0.48, text, **style)  # type: ignore[arg-type]
        urls = links if linked else None
        edge = {"hatch": look.hatch, "edgecolor": look.style["edgecolor"], "linewidth": 0.0} if look.hatch else {}
        axes.add_collection(PolyCollection(corners, facecolors=fills, urls=urls, clip_on=False, **edge))
    askew: dict[str, Any] = {"rotation": 40, "rotation_mode": "anchor", "ha": "left", "va": "bottom"}
    free = 0.0
    for title, group in groupby(found, key=lambda layer: layer.block):
        block = list(group)
        middle = (block[0].left + block[-1].left + block[-1].width) / 2
        if middle >= free:  # else its name would lie on the one before
            axes.text(middle, -0.3, cut(title, LONGEST), size=SMALL, **askew)
            free = middle + 0.24 * inch
        axes.plot([block[0].left] * 2, [-0.25, len(rows)], color="#888888", linewidth=0.4)
    axes.set_ylim(len(rows), 0)
    named = (f"device {r[0]}" if len(r) == 1 else f"device {r[0]}–{r[-1]}" for r in rows)
    axes.set_yticks([row + 0.47 for row in range(len(rows))], list(named))


def _times(axes: Axes, found: Sequence[Layers], widths: Widths) -> list[Any]:
    """What the time of each layer is: its parts, one above the other, as shares or in milliseconds. Their handles."""
    bottom, total_s = [0.0] * len(found), sum(sum(layer.seconds.values()) for layer in found)
    gap = 0.0015 * (found[-1].left + found[-1].width)
    lefts, across = [layer.left for layer in found], [layer.width - min(gap, layer.width / 5) for layer in found]
    handles = []
    for part, (title, colour) in PARTS.items():
        unit = [1e-3 if widths == "equal" else sum(layer.seconds.values()) or 1.0 for layer in found]
        heights = [layer.seconds[part] / each for layer, each in zip(found, unit, strict=True)]
        bars = axes.bar(lefts, heights, across, bottom, align="edge", color=colour, label=title)
        handles += [bars] * any(heights)
        bottom = [low + height for low, height in zip(bottom, heights, strict=True)]
    words = f"{units(total_s, 's')} a step"
    if widths == "time":
        axes.set_ylim(0, 1)
        axes.set_yticks([0.5], ["its time"])
        words += ": width is time"
    else:
        axes.set_ylabel("ms", size=SMALL)
        axes.locator_params(axis="y", nbins=3)
    axes.set_xlabel(words, size=FONT, loc="right", labelpad=3)
    return handles
