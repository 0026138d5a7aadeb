"""A strategy as a picture and a table of HTML, for notebooks: layers left to right, a row a device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import singledispatch
from html import escape
from itertools import groupby

from layerwise.config import Config

# Okabe and Ito's palette (2008), which colour-blind people can tell apart; repeated where it does not suffice.
PALETTE = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#F0E442", "#999999")
WIDTH, LEAST, MOST = 960, 4, 26  # pixels: of a picture, of a layer at least and at most
HEIGHT, ROW = 160, 22  # of a picture, and of one device at most


@singledispatch
def html(value: object) -> str:
    """A value as HTML; the module that draws a type registers how."""
    raise TypeError(f"nothing draws {type(value).__name__}")


def colours(strategy: Mapping[str, Config]) -> dict[Config, str]:
    """A colour for every configuration, in the order of first use; one device is grey."""
    many = dict.fromkeys(config for config in strategy.values() if config.total > 1)
    return {config: PALETTE[i % (len(PALETTE) - 1)] for i, config in enumerate(many)} | {Config(): PALETTE[-1]}


def svg(strategy: Mapping[str, Config], devices: int) -> str:
    """Layers left to right, devices top to bottom: a block where a device has a part of a layer, coloured by
    configuration."""
    paint = colours(strategy)
    wide = max(LEAST, min(MOST, WIDTH // max(len(strategy), 1)))
    high = max(2, min(ROW, HEIGHT // devices))
    blocks = []
    for x, (name, config) in enumerate(strategy.items()):
        for cell in range(config.total):
            device = cell * devices // config.total if config.placement == "strided" else cell
            title = f"<title>{escape(name)} {config}, device {device}</title>"
            blocks.append(
                f'<rect x="{x * wide}" y="{device * high}" width="{wide - 1}" height="{high - 1}" '
                f'fill="{paint.get(config, PALETTE[-1])}">{title}</rect>'
            )
    size = f'width="{len(strategy) * wide}" height="{devices * high}"'
    legend = "".join(
        f'<span style="display:inline-block;margin-right:1em"><span style="color:{colour}">■</span> '
        f"{config if config.total > 1 else 'one device'}</span>"
        for config, colour in paint.items()
        if config in strategy.values()
    )
    return f'<svg {size} xmlns="http://www.w3.org/2000/svg">{"".join(blocks)}</svg><div>{legend}</div>'


def table(rows: Sequence[Sequence[str]], headings: Sequence[str], *, left: int = 1) -> str:
    """An HTML table; the first `left` columns are text, the others numbers."""

    def cells(row: Sequence[str], tag: str) -> str:
        sides = ["left" if i < left else "right" for i in range(len(row))]
        pairs = zip(row, sides, strict=True)
        return "<tr>" + "".join(f'<{tag} style="text-align:{s}">{escape(c)}</{tag}>' for c, s in pairs) + "</tr>"

    return f"<table>{cells(headings, 'th')}{''.join(cells(row, 'td') for row in rows)}</table>"


def runs(strategy: Mapping[str, Config]) -> list[tuple[str, Config, list[str]]]:
    """Neighbouring layers of one configuration: `first … last`, the configuration, all names."""
    result = []
    for config, group in groupby(strategy.items(), key=lambda item: item[1]):
        names = [name for name, _ in group]
        result.append((names[0] if len(names) == 1 else f"{names[0]} … {names[-1]}", config, names))
    return result
