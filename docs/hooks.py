"""What MkDocs takes from the repository instead of a copy: the notebooks, and the help of every command."""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import CombinedEvent, event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
log = logging.getLogger("mkdocs.hooks")
HELP = re.compile(r"<!-- help: ([\w-]+) -->")


def _tutorial(notebook: Path) -> Path:
    """The copy that `make notebooks` executed, with its pictures, where it is still of the same cells."""
    executed = ROOT / "build/notebooks" / notebook.name
    if executed.exists() and _sources(executed) == _sources(notebook):
        return executed
    log.info("%s is shown without outputs: `make notebooks` makes them", notebook.name)
    return notebook


def _sources(notebook: Path) -> list[str]:
    return ["".join(cell["source"]) for cell in json.loads(notebook.read_text(encoding="utf-8"))["cells"]]


@event_priority(100)  # before mkdocs-jupyter looks for notebooks
def _add(files: Files, config: MkDocsConfig) -> Files:
    """Notebooks stay in notebooks/, without outputs."""
    for path in NOTEBOOKS:
        files.append(File.generated(config, f"tutorials/{path.name}", abs_src_path=str(path)))
    return files


@event_priority(-100)  # after it has put its own files in their place, which forget where a generated one is
def _place(files: Files, config: MkDocsConfig) -> Files:
    for path in NOTEBOOKS:
        file = files.get_file_from_path(f"tutorials/{path.name}")
        assert file is not None
        file.abs_src_path = str(_tutorial(path))
    return files


on_files = CombinedEvent(_add, _place)


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """`<!-- help: search -->` becomes what `layerwise search --help` prints."""
    return HELP.sub(lambda found: _help(found[1]), markdown)


def _help(command: str) -> str:
    os.environ |= {"COLUMNS": "100", "NO_COLOR": "1"}
    from layerwise.__main__ import COMMANDS

    parser: argparse.ArgumentParser = importlib.import_module(COMMANDS[command][0]).parser()
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    texts = [parser.format_help(), *(one.format_help() for action in below for one in action.choices.values())]
    return "\n".join(f"```text\n{text.rstrip()}\n```\n" for text in texts)
