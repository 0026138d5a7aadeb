"""The writers: every cell is in the text and in the page, in its unit; no name breaks either."""

import io
import json
import re
from dataclasses import dataclass

import pytest
from rich.console import Console

from layerwise.errors import LayerwiseError
from layerwise.report import as_json
from layerwise.report.content import Column, Lines, Marked, Picture, Report, Table, described, facts, filled, stacked
from layerwise.report.html import fragment, page
from layerwise.report.text import text
from tests.report.page import Page

COLUMNS = (Column("strategy"), Column("step time", "s"), Column("memory a device", "B"), Column("against data", "×"))
ROWS = [("data", 0.25, 12e9, 1.0), ("a<b>&\x1b[31m", 0.125, Marked("90.0 GB (too much)", "bad"), None)]
TABLE = Table(filled(COLUMNS, ROWS), "two plans", narrower=[stacked(filled(COLUMNS, ROWS))], notes=["below"])
SVG = '<svg xmlns="http://www.w3.org/2000/svg"><rect width="1"/></svg>'
REPORT = Report("net<x>", " on 2 GPUs", [Picture(lambda: SVG, "a plan"), TABLE, Lines(["first & last."])])


def as_text(report: Report, width: int) -> list[str]:
    out = Console(file=io.StringIO(), width=width, markup=False, highlight=False)
    out.print(text(report))
    return [line.rstrip() for line in out.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_text() -> None:
    assert as_text(REPORT, 80) == [
        "net<x> on 2 GPUs",
        "",
        "two plans",
        "strategy       step time     memory a device  against data",
        "data              250 ms             12.0 GB         1.00×",
        r"a<b>&\x1b[31m     125 ms  90.0 GB (too much)",
        "below",
        "",
        "first & last.",
    ]


def test_the_widest_table_that_fits() -> None:
    assert as_text(REPORT, 50)[3:5] == [
        "                 step              memory  against",
        "strategy         time            a device     data",
    ]


def test_a_page_has_all_and_loads_nothing() -> None:
    found = Page(page(REPORT))
    cells = [data for tag, data in found.texts if tag in ("td", "th")]
    assert cells == [
        *("strategy", "step time", "memory a device", "against data"),
        *("data", "250 ms", "12.0 GB", "1.00×"),
        *(r"a<b>&\x1b[31m", "125 ms", "90.0 GB (too much)"),
    ]
    assert [data for tag, data in found.texts if tag in ("p", "caption", "h1", "span")] == [
        *("net<x>", " on 2 GPUs", "two plans", "below", "first & last.")
    ]
    assert SVG in page(REPORT)
    assert found.loaded == []
    assert re.findall(r'<td style="text-align:(\w+)', page(REPORT)) == ["left", "right", "right", "right"] * 2
    assert page(REPORT).count("#d55e00") == 1


def test_facts_have_no_headings() -> None:
    table = facts([("plan", "mlp"), ("data", "digits")])
    assert as_text(Report("it", parts=[table]), 40)[2:] == ["plan  mlp", "data  digits"]
    assert [tag for tag, _ in Page(fragment([table])).texts] == ["th", "td"] * 2


def test_a_table_without_rows() -> None:
    table = Table(filled(COLUMNS, []))
    assert len(as_text(Report("it", parts=[table]), 80)) == 3
    assert [tag for tag, _ in Page(fragment([table])).texts] == ["th"] * 4


def test_json() -> None:
    @dataclass
    class Seconds:
        step_s: float

    assert json.loads(as_json.text({"x": [Seconds(1.5)]})) == {"x": [{"step_s": 1.5}]}
    for odd in (float("inf"), float("nan")):
        with pytest.raises(LayerwiseError, match="infinite or not a number"):
            as_json.text({"x": [odd]})


def test_what_nobody_describes() -> None:
    with pytest.raises(TypeError, match="nothing describes float"):
        described(1.5)
