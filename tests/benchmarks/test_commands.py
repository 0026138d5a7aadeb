"""Every benchmark that a page names can be run: its module is there, with all that it imports."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", sorted(p.stem for p in (ROOT / "benchmarks").glob("[a-z]*.py")))
def test_it_can_be_imported(name: str) -> None:
    if name == "grids_plot":
        pytest.importorskip("matplotlib")
    importlib.import_module(f"benchmarks.{name}")


def test_pages_name_benchmarks_that_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), ROOT / "profiles/README.md"]
    named = {name for page in pages for name in re.findall(r"-m benchmarks\.(\w+)", page.read_text(encoding="utf-8"))}
    assert len(named) > 10
    assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in named)
