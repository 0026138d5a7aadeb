"""A report as text: tables as wide as the terminal allows."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.measure import Measurement
from rich.table import Table as RichTable
from rich.text import Text

from layerwise.errors import shown
from layerwise.report.content import Column, Lines, Mark, Part, Report, Section, Table, readable

STYLES: dict[Mark, str] = {"": "", "layer": "", "best": "bold green", "bad": "red"}


class FittingTable:
    """The widest form of a table that fits the console, else the last."""

    def __init__(self, table: Table) -> None:
        self.forms = [_drawn(columns) for columns in (table.columns, *table.narrower)]

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        unbounded = options.update(max_width=10_000)
        widths = (Measurement.get(console, unbounded, form).maximum for form in self.forms)
        fitting = (form for form, width in zip(self.forms, widths, strict=True) if width <= options.max_width)
        yield next(fitting, self.forms[-1])


def text(report: Report) -> Group:
    """Title and parts, for a terminal."""
    title = Text.assemble((shown(report.title), "bold"), shown(report.about))
    return Group(title, "", parts(report.parts))


def plain(report: Report, width: int = 80) -> str:
    """The text without colours, at the width of a page, a mail or an issue."""
    out = Console(file=io.StringIO(), width=width, markup=False, emoji=False, highlight=False)
    with out.capture() as capture:
        out.print(text(report))
    return "\n".join(line.rstrip() for line in capture.get().splitlines())


def parts(content: Sequence[Part]) -> Group:
    """The parts, with an empty line between them."""
    return Group(*(line for number, part in enumerate(readable(content)) for line in _part(part, first=number == 0)))


def _part(part: Table | Lines | Section, *, first: bool) -> Iterator[RenderableType]:
    if not first:
        yield ""
    if isinstance(part, Section):
        yield Text(shown(part.title), "bold")
        yield parts(part.parts)
        return
    if isinstance(part, Lines):
        yield from part.lines
        return
    if part.title:
        yield part.title
    yield FittingTable(part)
    yield from part.notes


def _drawn(columns: Sequence[Column]) -> RichTable:
    headed = any(column.heading for column in columns)
    table = RichTable(header_style="bold", box=None, pad_edge=False, show_header=headed)
    for number, column in enumerate(columns):
        table.add_column(
            column.heading,
            justify="right" if column.unit else "left",
            no_wrap=not column.wraps,
            overflow="fold",
            max_width=column.width,
            style="" if headed or number else "bold",
        )
    cells = [[Text(shown(text), STYLES[mark]) for text, mark in column.texts()] for column in columns]
    for row in zip(*cells, strict=True):
        table.add_row(*row)
    return table
