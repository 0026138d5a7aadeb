"""A report as Markdown, for issues and pull requests."""

from __future__ import annotations

import re
from collections.abc import Sequence
from html import escape

from layerwise.errors import shown
from layerwise.report.content import Lines, Part, Report, Section, Table, readable


def text(report: Report) -> str:
    """Title and parts; names are escaped."""
    return "\n\n".join([f"**{_text(report.title)}**{_text(report.about)}", *_parts(report.parts, 3)])


def _parts(parts: Sequence[Part], level: int) -> list[str]:
    result = []
    for part in readable(parts):
        if isinstance(part, Section):
            result += [f"{'#' * level} {_text(part.title)}", *_parts(part.parts, level + 1)]
        elif isinstance(part, Lines):
            result.append("\n".join(f"- {_text(line)}" for line in part.lines))
        else:
            result += [f"*{_text(part.title)}*"] * bool(part.title) + [_table(part), *map(_text, part.notes)]
    return result


def _table(table: Table) -> str:
    heads = [_text(column.heading) for column in table.columns]
    sides = ["---:" if column.unit else "---" for column in table.columns]
    rows = zip(*([_text(words) for words, _ in column.texts()] for column in table.columns), strict=True)
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (heads, sides, *rows))


def _text(words: str) -> str:
    """Text with all markup escaped, on one line."""
    return re.sub(r"([\\`*_{}\[\]|~#])", r"\\\1", escape(shown(words), quote=False).replace("\n", " "))
