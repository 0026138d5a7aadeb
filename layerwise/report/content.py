"""The content of a report: a title, tables, lines of text and pictures for people, and values for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Literal

from layerwise.quantities import duration, units

Mark = Literal["", "best", "bad", "layer"]  # layer: a layer's name, which links to its part of a page
Unit = Literal["", "s", "B", "time", "×", "%", "#"]
"""How a column's numbers are written; seconds and bytes with three digits. Without a unit: text, or plain numbers."""

WRITTEN: Mapping[Unit, Callable[[float], str]] = {
    "": str,
    "s": lambda value: units(value, "s"),
    "B": lambda value: units(value, "B"),
    "time": duration,
    "×": lambda value: f"{value:.2f}×",
    "%": lambda value: f"{value:.1%}",
    "#": lambda value: f"{value:,}",
}


@dataclass(frozen=True, slots=True)
class Marked:
    """A value that stands out: the best of its kind, a bad one, or the name of a layer."""

    value: str | float | None
    mark: Mark


Value = str | float | None | Marked
"""Text is shown unchanged, a number in its column's unit, and None as an empty cell."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    unit: Unit = ""
    cells: Sequence[Value] = ()
    wraps: bool = False  # if there is too little room; other columns are never broken
    width: int | None = None  # characters at most

    def texts(self) -> list[tuple[str, Mark]]:
        """The text of every cell, with its mark."""
        cells = (cell if isinstance(cell, Marked) else Marked(cell, "") for cell in self.cells)
        return [(self._text(cell.value), cell.mark) for cell in cells]

    def _text(self, value: str | float | None) -> str:
        return "" if value is None else value if isinstance(value, str) else WRITTEN[self.unit](value)


@dataclass(frozen=True, slots=True)
class Table:
    """Columns with equally many cells. If no column has a heading, the first one has the rows' headings."""

    columns: Sequence[Column]
    title: str = ""
    narrower: Sequence[Sequence[Column]] = ()  # alternatives for narrow terminals, widest first
    notes: Sequence[str] = ()  # lines below it


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences, each on its own line."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG, drawn when it is shown. Terminals do not show it; other formats do not if matplotlib is missing."""

    svg: Callable[[], str]
    label: str  # alternative text


@dataclass(frozen=True, slots=True)
class Fold:
    """Parts that a page shows when their summary is clicked. Terminals do not show them."""

    summary: str
    parts: Sequence[Part]
    key: str = ""  # target of links from pictures and names of layers


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and parts below it. searched: the label of a field that searches its rows and folds, if any."""

    title: str
    parts: Sequence[Part]
    searched: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """A text shown verbatim. Terminals do not show it."""

    text: str


Part = Table | Lines | Picture | Fold | Section | Code


def readable(parts: Sequence[Part]) -> list[Table | Lines | Section]:
    """The parts for text output: without pictures, folds, and sections that have nothing else."""
    found = [part for part in parts if isinstance(part, Table | Lines | Section)]
    return [part for part in found if not isinstance(part, Section) or readable(part.parts)]


@dataclass(frozen=True, slots=True)
class Report:
    """A command's full output."""

    title: str
    about: str = ""  # continues the title
    parts: Sequence[Part] = ()
    values: Callable[[], object] = dict  # for programs, in SI units: JSON values and dataclasses


def filled(columns: Sequence[Column], rows: Iterable[Sequence[Value]]) -> list[Column]:
    """These columns, filled with the cells of these rows."""
    cells = list(zip(*rows, strict=True)) or [()] * len(columns)
    return [replace(column, cells=of_column) for column, of_column in zip(columns, cells, strict=True)]


def stacked(columns: Sequence[Column]) -> list[Column]:
    """The columns with headings of two words on two lines."""
    return [replace(column, heading=column.heading.replace(" ", "\n", 1)) for column in columns]


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """A table of names and descriptions, one a row."""
    return Table(filled([Column(""), Column("", wraps=True)], rows))


@singledispatch
def described(value: object) -> Sequence[Part]:
    """The report that a notebook shows for a value; the module that reports a type registers how."""
    raise TypeError(f"nothing describes {type(value).__name__}")
