"""A report as HTML: a self-contained page, and what a notebook shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib.resources import files
from urllib.parse import quote

from layerwise.errors import LayerwiseError, shown
from layerwise.report.content import Code, Column, Fold, Lines, Mark, Part, Picture, Report, Section, Table

# a narrow page scrolls instead of shrinking
WIDE = 'style="margin: .5rem 0; overflow-x: auto"><div style="min-width: 34rem">'
COLOURS: dict[Mark, str] = {"": "", "layer": "", "best": ";color:#009e73;font-weight:bold", "bad": ";color:#d55e00"}


def page(report: Report) -> str:
    """A complete file."""
    title = _text(report.title)
    style, script = (files(__package__).joinpath(f"page.{kind}").read_text(encoding="utf-8") for kind in ("css", "js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        f'<meta name="viewport" content="width=device-width"><title>{title}</title><style>{style}</style>'
        f"</head><body><h1>{title}<span>{_text(report.about)}</span></h1>\n{fragment(report.parts)}"
        f"<script>{script}</script></body></html>\n"
    )


def fragment(parts: Sequence[Part]) -> str:
    """Parts as in a page, for a notebook's cell."""
    return "".join(_part(part) for part in parts)


def _part(part: Part) -> str:
    if isinstance(part, Picture):
        try:
            return f'<figure role="img" aria-label="{_text(part.label)}" {WIDE}{part.svg()}</div></figure>\n'
        except LayerwiseError as error:  # no matplotlib
            return _paragraphs([str(error)])
    if isinstance(part, Lines):
        return f"<div>{_paragraphs(part.lines)}</div>\n"
    if isinstance(part, Code):
        return f"<pre>{_text(part.text)}</pre>\n"
    if isinstance(part, Fold):
        where = f' id="{_text(anchor(part.key))}"' if part.key else ""
        return f"<details{where}><summary>{_text(part.summary)}</summary>{fragment(part.parts)}</details>\n"
    if isinstance(part, Section):
        field = (
            f'<p class="field"><label>{_text(part.searched)} <input type="search"></label></p>' if part.searched else ""
        )
        folds = fragment([p for p in part.parts if isinstance(p, Fold)])
        rest = fragment([p for p in part.parts if not isinstance(p, Fold)])
        return f'<section><h2>{_text(part.title)}</h2>{field}{rest}<div class="folds">{folds}</div></section>\n'
    return f'<div class="table">{_table(part)}</div>{_paragraphs(part.notes)}\n'


def _table(table: Table) -> str:
    headed = any(column.heading for column in table.columns)
    caption = f"<caption>{_text(table.title)}</caption>" if table.title else ""
    head = "".join(_cell(column, "th", column.heading) for column in table.columns) if headed else ""
    tags = ["td" if headed or number else "th" for number in range(len(table.columns))]
    cells = [
        [_cell(column, tag, text, mark) for text, mark in column.texts()]
        for column, tag in zip(table.columns, tags, strict=True)
    ]
    rows = "".join(f"<tr>{''.join(row)}</tr>" for row in zip(*cells, strict=True))
    return f"<table>{caption}<thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _cell(column: Column, tag: str, text: str, mark: Mark = "") -> str:
    side = "right" if column.unit else "left"
    words = f'<a href="#{_text(anchor(text))}">{_text(text)}</a>' if mark == "layer" else _text(text)
    return f'<{tag} style="text-align:{side}{COLOURS[mark]}">{words}</{tag}>'


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{_text(line)}</p>" for line in lines)


def _text(text: str) -> str:
    return escape(shown(text))


def anchor(key: str) -> str:
    """The anchor in a page of a layer, by its name, or of another fold."""
    return f"at-{quote(shown(key), safe='')}"
