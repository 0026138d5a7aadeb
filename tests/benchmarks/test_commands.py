"""Every benchmark that a page names can be run: its module is there, with all that it imports."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


MODULES = sorted(".".join(p.relative_to(ROOT).with_suffix("").parts) for p in (ROOT / "benchmarks").rglob("[a-z]*.py"))


@pytest.mark.parametrize("name", MODULES)
def test_it_can_be_imported(name: str) -> None:
    importlib.import_module(name)


def test_pages_name_benchmarks_that_are_there() -> None:
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md"), ROOT / "profiles/README.md"]
    named = {
        name for page in pages for name in re.findall(r"-m benchmarks\.([\w.]*\w)", page.read_text(encoding="utf-8"))
    }
    assert len(named) > 10
    paths = {name: ROOT / "benchmarks" / name.replace(".", "/") for name in named}
    assert [
        n for n, path in paths.items() if not (path.with_suffix(".py").exists() or (path / "__main__.py").exists())
    ] == []
