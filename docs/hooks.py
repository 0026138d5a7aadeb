"""What MkDocs takes from elsewhere in the repository instead of a copy: the notebooks, and three pages."""

from __future__ import annotations

import json
import logging
import os
import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.plugins import CombinedEvent, event_priority
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))
# Files of the repository, and the site's pages of them. Pages link to the former, so that they can be read there, too.
ELSEWHERE = {
    "ARCHITECTURE.md": "explanation/architecture.md",
    "CHANGELOG.md": "changelog.md",
    "profiles/README.md": "reference/profile_format.md",
    **{f"notebooks/{path.name}": f"tutorials/{path.name}" for path in NOTEBOOKS},
}
LINK = re.compile(r"(?<=\]\()([^)#:\s]+)")
log = logging.getLogger("mkdocs.hooks")


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
    """The pages are not copied into docs/; notebooks are kept without outputs."""
    for file, page in ELSEWHERE.items():
        files.append(File.generated(config, page, abs_src_path=str(ROOT / file)))
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
    """Links to the repository's files lead to the site's pages of them."""
    folder = posixpath.dirname(page.file.src_uri)

    def moved(link: re.Match[str]) -> str:
        file = posixpath.normpath(posixpath.join("docs", folder, link[0]))
        return os.path.relpath(ELSEWHERE[file], folder or ".") if file in ELSEWHERE else link[0]

    return LINK.sub(moved, markdown)
