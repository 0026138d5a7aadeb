"""The content of a report: a title, tables, lines of text and pictures for people, and values for programs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import singledispatch
from typing import Literal

from layerwise.quantities import duration, units

Mark = Literal["", "best", "bad", "layer"]  # layer: the name of one, which leads to its part of a page
Unit = Literal["", "s", "B", "time", "×", "%", "#"]
"""How a column's numbers are written; seconds and bytes with three digits. Without a unit it has text, else numbers."""

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
    """A value that stands out: the best of its kind, one that is bad, or the name of a layer."""

    value: str | float | None
    mark: Mark


Value = str | float | None | Marked
"""A text stands as it is, a number in its column's unit, None is left empty."""


@dataclass(frozen=True, slots=True)
class Column:
    """A column of a table."""

    heading: str
    unit: Unit = ""
    cells: Sequence[Value] = ()
    wraps: bool = False  # where there is too little room; others are never broken
    width: int | None = None  # characters at most

    def texts(self) -> list[tuple[str, Mark]]:
        """The text of every cell, with its mark."""
        cells = (cell if isinstance(cell, Marked) else Marked(cell, "") for cell in self.cells)
        return [(self._text(cell.value), cell.mark) for cell in cells]

    def _text(self, value: str | float | None) -> str:
        return "" if value is None else value if isinstance(value, str) else WRITTEN[self.unit](value)


@dataclass(frozen=True, slots=True)
class Table:
    """Columns of equally many cells. Where no column has a heading, the first one has those of the rows."""

    columns: Sequence[Column]
    title: str = ""
    narrower: Sequence[Sequence[Column]] = ()  # what a terminal shows that has no room for `columns`, widest first
    notes: Sequence[str] = ()  # lines below it


@dataclass(frozen=True, slots=True)
class Lines:
    """Sentences, each on a line of its own."""

    lines: Sequence[str]


@dataclass(frozen=True, slots=True)
class Picture:
    """An SVG, made where it is shown. A terminal does not show it; nor do others where what draws is missing."""

    svg: Callable[[], str]
    label: str  # what it shows, for who does not see it


@dataclass(frozen=True, slots=True)
class Fold:
    """Parts that a page shows when their summary is clicked. A terminal shows neither."""

    summary: str
    parts: Sequence[Part]
    key: str = ""  # by which pictures and names of layers lead here


@dataclass(frozen=True, slots=True)
class Section:
    """A heading, and parts below it. searched: the label of a page's field that searches its rows and folds, if any."""

    title: str
    parts: Sequence[Part]
    searched: str = ""


@dataclass(frozen=True, slots=True)
class Code:
    """A text as it stands in a file. A terminal does not show it."""

    text: str


Part = Table | Lines | Picture | Fold | Section | Code


def readable(parts: Sequence[Part]) -> list[Table | Lines | Section]:
    """The parts that a text has: neither what is drawn nor what is folded away, nor sections of nothing else."""
    found = [part for part in parts if isinstance(part, Table | Lines | Section)]
    return [part for part in found if not isinstance(part, Section) or readable(part.parts)]


@dataclass(frozen=True, slots=True)
class Report:
    """The whole answer of a command."""

    title: str
    about: str = ""  # goes on where the title ends
    parts: Sequence[Part] = ()
    values: Callable[[], object] = dict  # for programs, in SI units: what JSON can say, and dataclasses


def filled(columns: Sequence[Column], rows: Iterable[Sequence[Value]]) -> list[Column]:
    """These columns with the cells of these rows."""
    cells = list(zip(*rows, strict=True)) or [()] * len(columns)
    return [replace(column, cells=of_column) for column, of_column in zip(columns, cells, strict=True)]


def stacked(columns: Sequence[Column]) -> list[Column]:
    """The columns with headings of two words on two lines."""
    return [replace(column, heading=column.heading.replace(" ", "\n", 1)) for column in columns]


def facts(rows: Iterable[tuple[str, str]]) -> Table:
    """A name and what there is to say of it, a row each."""
    return Table(filled([Column(""), Column("", wraps=True)], rows))


@singledispatch
def described(value: object) -> Sequence[Part]:
    """The report that a notebook shows of a value; the module that makes reports of a type registers how."""
    raise TypeError(f"nothing describes {type(value).__name__}")
