"""A strategy as a picture (SVG): layers left to right, a row a device."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from itertools import groupby

from layerwise.config import Config

# Okabe and Ito's palette (2008), which colour-blind people can tell apart; repeated where it does not suffice.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
WIDTH, LEAST, MOST = 960, 4, 26  # pixels: of a picture, of a layer at least and at most
HEIGHT, ROW = 160, 22  # of a picture, and of one device at most
LINE, LETTER, SMALL = 18, 6.6, 11  # of a line of text, of a letter, of the font
GREY = "gray"  # can be read on white and on black


def colours(strategy: Mapping[str, Config]) -> dict[Config, str]:
    """A colour for every configuration, in the order of first use; one device is grey."""
    many = dict.fromkeys(config for config in strategy.values() if config.total > 1)
    return {config: PALETTE[i % (len(PALETTE) - 1)] for i, config in enumerate(many)} | {Config(): PALETTE[-1]}


def svg(strategy: Mapping[str, Config], devices: int) -> str:
    """Layers left to right, devices top to bottom: a block where a device has a part of a layer.

    Coloured by configuration; paler blocks are later cells. Above is the first layer of those alike. Where there is
    room, a block names its cell: `n1 h0` is the second of the samples' parts, the first of the height's.
    """
    paint = colours(strategy)
    wide = max(LEAST, min(MOST, WIDTH // max(len(strategy), 1)))
    high = max(2, min(ROW, HEIGHT // devices))
    blocks, names, left = [], [], 0
    for _, config, layers in runs(strategy):
        middle = (left + len(layers) / 2) * wide
        room = len(layers) * wide / LETTER  # for letters
        if len(layers[0]) < room:
            names.append(_text(layers[0], left * wide, -5, GREY))
        cells = [c * devices // config.total if config.placement == "strided" else c for c in range(config.total)]
        for x, name in enumerate(layers, left):
            for cell, device in enumerate(cells):
                place = f'x="{x * wide}" y="{device * high}" width="{wide - 1}" height="{high - 1}"'
                style = f'fill="{paint.get(config, PALETTE[-1])}" fill-opacity="{1 - 0.5 * cell / config.total:.2f}"'
                title = f"<title>{escape(name)} {config}, device {device}</title>"
                blocks.append(f"<rect {place} {style}>{title}</rect>")
        for cell, device in enumerate(cells):
            words = _cell_name(config, cell)
            if words and high > SMALL and len(words) < room:
                y = device * high + (high + SMALL) // 2 - 2
                names.append(_text(words, middle, y, "black", "middle"))
        left += len(layers)
    legend, most, below = _legend(
        {config: paint[config] for config in paint if config in strategy.values()}, left * wide
    )
    size = f'width="{max(left * wide, most):.0f}" height="{LINE + devices * high + below}"'
    font = f'font-family="sans-serif" font-size="{SMALL}"'
    return (
        f'<svg {size} xmlns="http://www.w3.org/2000/svg" {font}><g transform="translate(0 {LINE})">{"".join(blocks)}'
        f'{"".join(names)}<g transform="translate(0 {devices * high})">{"".join(legend)}</g></g></svg>'
    )


def _cell_name(config: Config, cell: int) -> str:
    """`n1 h0`: which part of each dimension, samples outermost; nothing where their order depends on the tensor."""
    if sum(label not in ("n", "k") for label, _ in config.degrees) > 1:
        return ""
    places = []
    for label, degree in reversed(config.degrees):
        cell, place = divmod(cell, degree)
        places.append(f"{label}{place}")
    return " ".join(reversed(places))


def _legend(shown: Mapping[Config, str], width: float) -> tuple[list[str], float, int]:
    """A coloured square and a configuration each, in lines of about this width; how wide and how high they are."""
    texts, x, y, most = [], 0.0, LINE, 0.0
    for config, colour in shown.items():
        words = str(config) if config.total > 1 else "one device"
        if x and x + len(words) * LETTER > width:
            x, y = 0.0, y + LINE
        texts += [_text("■", x, y, colour), _text(words, x + 14, y, GREY)]
        x += 14 + (len(words) + 2) * LETTER
        most = max(most, x)
    return texts, most, y + LINE // 2


def _text(words: str, x: float, y: float, colour: str, anchor: str = "start") -> str:
    return f'<text x="{x:.0f}" y="{y:.0f}" fill="{colour}" text-anchor="{anchor}">{escape(words)}</text>'


def runs(strategy: Mapping[str, Config]) -> list[tuple[str, Config, list[str]]]:
    """Neighbouring layers of one configuration: `first … last`, the configuration, all names."""
    result = []
    for config, group in groupby(strategy.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        result.append((names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", config, names))
    return result
