"""--html: the answer as a page."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.cli.commands import MLP, Run
from tests.report.page import Page


@pytest.mark.parametrize(
    "command",
    [
        (*MLP, "--memory"),
        (*MLP, "--price", "data"),
        (*MLP, "--profile", "pcie", "--memory-curve", "100kB..1GB"),
        ("explain", "p.json", "0"),
        ("diff", "p.json", "p.json"),
        ("oracle", "lenet5", "--gpus", "1..4", "--profile", "v100"),
    ],
    ids=lambda command: command[0],
)
def test_pages_say_what_terminals_do(
    run: Run, here: Path, monkeypatch: pytest.MonkeyPatch, command: tuple[str, ...]
) -> None:
    """Every quantity; and the picture of the plan, where there is one."""
    monkeypatch.setenv("COLUMNS", "200")
    run(*MLP, "--out", "p.json")
    said = run(*command, "--html", "out.html")
    assert said.rstrip().endswith("page written to out.html")
    source = (here / "out.html").read_text(encoding="utf-8")
    found = Page(source)
    words = " ".join(data for _, data in found.texts)
    numbers = set(re.findall(r"\d[\d.,]* (?:[mµ]?s|[kMG]?B)\b", said.replace("\n", " ")))
    assert numbers <= set(re.findall(r"\d[\d.,]* (?:[mµ]?s|[kMG]?B)\b", words))
    assert source.count("<svg") == (command[0] == "search" and "--memory-curve" not in command)
    assert found.loaded == []
