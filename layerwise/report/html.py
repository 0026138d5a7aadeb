"""A report as HTML: a page that needs no other file and no network, and what a notebook shows."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from layerwise.errors import shown
from layerwise.report.content import Column, Lines, Mark, Part, Picture, Report, Table

STYLE = """
:root { color-scheme: light dark; }
body { font: 15px/1.5 system-ui, sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.4rem; } h1 span { font-weight: normal; }
section { overflow-x: auto; margin: 1.5rem 0; } p { margin: .3rem 0; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
caption { text-align: left; padding: .3rem 0; }
th, td { padding: .15rem .8rem .15rem 0; vertical-align: top; border-bottom: 1px solid #8884; }
"""
COLOURS: dict[Mark, str] = {"": "", "best": ";color:#009e73;font-weight:bold", "bad": ";color:#d55e00"}


def page(report: Report) -> str:
    """A whole file."""
    title = _text(report.title)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"</head><body><h1>{title}<span>{_text(report.about)}</span></h1>\n{fragment(report.parts)}</body></html>\n"
    )


def fragment(parts: Sequence[Part]) -> str:
    """Parts, as they stand in a page or in a notebook's cell."""
    return "".join(f"<section>{_part(part)}</section>\n" for part in parts)


def _part(part: Part) -> str:
    if isinstance(part, Picture):
        return part.svg
    if isinstance(part, Lines):
        return _paragraphs(part.lines)
    return _table(part) + _paragraphs(part.notes)


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
    return f'<{tag} style="text-align:{side}{COLOURS[mark]}">{_text(text)}</{tag}>'


def _paragraphs(lines: Sequence[str]) -> str:
    return "".join(f"<p>{_text(line)}</p>" for line in lines)


def _text(text: str) -> str:
    return escape(shown(text))
