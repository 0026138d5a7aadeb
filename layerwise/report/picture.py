"""A strategy as a picture: layers left to right, as wide as they take time; devices top to bottom."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING, Any, NamedTuple
from urllib.parse import quote

from layerwise.config import Config
from layerwise.errors import shown
from layerwise.quantities import units
from layerwise.report.blocks import blocks
from layerwise.report.figures import check_drawable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Seconds = Mapping[str, Mapping[str, float]]  # of each layer, by part of the step
# Okabe and Ito's palette (2008), which colour-blind people can tell apart; repeated where it does not suffice.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
GREY = "gray"  # can be read on white and on black
PARTS = {
    "compute": ("computation", "#8a9099"),
    "transfers": ("transfers", "#E69F00"),
    "sync": ("sums of gradients", "#D55E00"),
    "statistics": ("statistics", "#CC79A7"),
}
ROWS = 16  # at most: of more devices, equally many share a row
LEAST = 0.004  # of the picture's width that a layer has
WIDTH, ROW, STRIP = 10.0, 0.19, 0.5  # inches: of the axes, a row, the times below
LONGEST = 30  # letters of a name; longer ones are cut
LETTER, SMALL = 0.075, 7  # inches: of a letter; points: of the font
LEGEND: dict[str, Any] = {
    "loc": "upper left", "fontsize": SMALL, "frameon": False, "labelcolor": GREY, "borderaxespad": 0,
    "handlelength": 1, "handleheight": 1,
}  # fmt: skip


class Layers(NamedTuple):
    """A layer of the picture, or those that correspond to each other in equal blocks: where it is, and how wide."""

    names: tuple[str, ...]
    block: str
    config: Config
    seconds: Mapping[str, float]  # by part of the step, the sum over its names
    left: float
    width: float  # seconds, and at least what can be seen


def laid_out(strategy: Mapping[str, Config], seconds: Seconds) -> list[Layers]:
    """The layers of a picture, left to right; repeated blocks stand there once, as wide as all of them."""
    sums = {name: sum(seconds.get(name, {}).get(part, 0.0) for part in PARTS) for name in strategy}
    least = LEAST * sum(sums.values()) or 1.0
    result, left = list[Layers](), 0.0
    for block in blocks(strategy, sums):
        for names in block.layers:
            here = {part: sum(seconds.get(name, {}).get(part, 0.0) for name in names) for part in PARTS}
            width = max(sum(here.values()), least)
            result.append(Layers(names, block.title, strategy[names[0]], here, left, width))
            left += width
    return result


def device_rows(devices: int) -> list[range]:
    """The devices of each row."""
    count = min(devices, ROWS)
    return [range(row * devices // count, (row + 1) * devices // count) for row in range(count)]


def cells_of(config: Config, devices: int) -> Iterator[tuple[int, int, int]]:
    """The rows that have cells of a layer, with the first and the last of its cells there."""
    at = [cell * devices // config.total if config.placement == "strided" else cell for cell in range(config.total)]
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


def draw(strategy: Mapping[str, Config], seconds: Seconds, devices: int, *, linked: bool = False) -> Figure:
    """A block where a device has a part of a layer, coloured by configuration, paler for later cells; below it the
    parts of the layer's time. Where there is room, a block names its cell: `n1 h0` is the second of the samples' parts
    and the first of the height's. linked: whether blocks are links to their layers (`anchor`).
    """
    check_drawable("the picture of a plan")
    from matplotlib.figure import Figure

    layers, rows = laid_out(strategy, seconds), device_rows(devices)
    configs = {layer.config for layer in layers}
    head = 0.3 + 0.7 * LETTER * min(LONGEST, max(len(layer.block) for layer in layers))  # the names, which are askew
    wide, tall = WIDTH + 1.6, ROW * len(rows)
    high = head + tall + STRIP + 1 + 0.25 * (len(configs) // 5)
    figure = Figure(figsize=(wide, high))
    figure.patch.set_alpha(0)
    for paint, bottom, size in (
        (_devices, high - head - tall, tall),
        (_times, high - head - tall - STRIP - 0.06, STRIP),
    ):
        axes = figure.add_axes((1 / wide, bottom / high, WIDTH / wide, size / high), facecolor="none", frame_on=False)
        paint(axes, layers, rows)
        axes.set_xlim(0, layers[-1].left + layers[-1].width)
        axes.set_xticks([])
        axes.tick_params(length=0, labelsize=SMALL, colors=GREY)
    if not linked:
        figure.axes[0].collections[0].set_urls([])
    return figure


def _devices(axes: Axes, layers: Sequence[Layers], rows: Sequence[range]) -> None:
    """The blocks; above them the names, at the left the devices."""
    from matplotlib.collections import PolyCollection
    from matplotlib.colors import to_rgba
    from matplotlib.patches import Patch

    several = dict.fromkeys(layer.config for layer in layers if layer.config.total > 1)
    colours = {config: PALETTE[i % 7] for i, config in enumerate(several)}
    inch = (layers[-1].left + layers[-1].width) / WIDTH  # in seconds
    corners, fills, links = [], [], []
    for layer in layers:
        left, right = layer.left, layer.left + layer.width - min(0.015 * inch, layer.width / 5)
        for row, first, last in cells_of(layer.config, rows[-1].stop):
            corners.append([(left, row), (right, row), (right, row + 0.94), (left, row + 0.94)])
            fills.append(to_rgba(colours.get(layer.config, PALETTE[-1]), 1 - 0.5 * first / layer.config.total))
            links.append("#" + anchor(layer.names[0]))
            words = "…".join(dict.fromkeys(cell_name(layer.config, cell) for cell in (first, last)))
            if words and len(words) * LETTER * inch < layer.width:
                axes.text(left + layer.width / 2, row + 0.48, words, size=SMALL, ha="center", va="center")
    axes.add_collection(PolyCollection(corners, facecolors=fills, urls=links, clip_on=False))
    free = 0.0
    askew: dict[str, Any] = {
        "rotation": 40,
        "rotation_mode": "anchor",
        "ha": "left",
        "va": "bottom",
        "parse_math": False,
    }
    for title, group in groupby(layers, key=lambda layer: layer.block):
        block = list(group)
        middle = (block[0].left + block[-1].left + block[-1].width) / 2
        if middle >= free:  # else its name would lie on the one before
            name = title if len(title) <= LONGEST else f"{title[: LONGEST // 2 - 1]}…{title[-LONGEST // 2 :]}"
            axes.text(middle, -0.3, shown(name), size=SMALL, color=GREY, **askew)
            free = middle + 0.15 * inch
        axes.plot([block[0].left] * 2, [-0.25, len(rows)], color=GREY, linewidth=0.4)
    axes.set_ylim(len(rows), 0)
    named = (f"device {r[0]}" if len(r) == 1 else f"device {r[0]}–{r[-1]}" for r in rows)
    axes.set_yticks([row + 0.47 for row in range(len(rows))], list(named))
    handles = [Patch(color=colour, label=str(config)) for config, colour in colours.items()]
    handles += [Patch(color=PALETTE[-1], label="one device")] * any(layer.config.total == 1 for layer in layers)
    axes.legend(handles=handles, bbox_to_anchor=(0, -(STRIP + 0.42) / (ROW * len(rows))), ncols=5, **LEGEND)


def _times(axes: Axes, layers: Sequence[Layers], _: Sequence[range]) -> None:
    """What the time of each layer is: its parts, one above the other."""
    bottom, total_s = [0.0] * len(layers), sum(sum(layer.seconds.values()) for layer in layers)
    gap = 0.0015 * (layers[-1].left + layers[-1].width)
    lefts, widths = [layer.left for layer in layers], [layer.width - min(gap, layer.width / 5) for layer in layers]
    for part, (title, colour) in PARTS.items():
        shares = [layer.seconds[part] / (sum(layer.seconds.values()) or 1.0) for layer in layers]
        axes.bar(lefts, shares, widths, bottom, align="edge", color=colour, label=title if any(shares) else None)
        bottom = [low + share for low, share in zip(bottom, shares, strict=True)]
    axes.set_ylim(0, 1)
    axes.set_yticks([0.5], ["its time"])
    axes.set_xlabel(f"{units(total_s, 's')}: width is time", size=SMALL, color=GREY, loc="right", labelpad=2)
    if total_s:
        axes.legend(bbox_to_anchor=(0, -0.05), ncols=4, **LEGEND)


def anchor(key: str) -> str:
    """The place in a page of a layer, by its name, or of another fold."""
    return f"at-{quote(shown(key), safe='')}"


def runs(strategy: Mapping[str, Config]) -> list[tuple[str, Config, list[str]]]:
    """Neighbouring layers of one configuration: `first … last`, the configuration, all names."""
    result = []
    for config, group in groupby(strategy.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        result.append((names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", config, names))
    return result
