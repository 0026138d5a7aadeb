"""python -m docs.pages writes the help of every command and the public names' docstrings into docs/reference.

A page has marks, `<!-- help: search -->` or `<!-- api: layerwise.Plan save -->` (a name, and the members to show), each
with what was written for it up to `<!-- end -->`. `--check` writes nothing, and exits with 1 if a page is stale.
"""

from __future__ import annotations

import argparse
import importlib
import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path

import griffe

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "docs/reference/api.md", ROOT / "docs/reference/cli.md"]
MARK = re.compile(r"(<!-- (help|api): (.+?) -->\n).*?(<!-- end -->)", re.DOTALL)
WIDTH = 100


def command_help(command: str) -> str:
    """Returns what `layerwise COMMAND --help-all` prints, as blocks of text."""
    os.environ |= {"COLUMNS": str(WIDTH), "NO_COLOR": "1"}
    from layerwise.__main__ import COMMANDS

    parser: argparse.ArgumentParser = importlib.import_module(COMMANDS[command][0]).parser()
    below = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    texts = [parser.full_help(), *(one.full_help() for action in below for one in action.choices.values())]
    return "\n".join(f"```text\n{text.rstrip()}\n```\n" for text in texts)


class Reference:
    """The package as its source says: nothing of it is imported."""

    def __init__(self) -> None:
        self.package = griffe.load("layerwise", search_paths=[ROOT], docstring_parser="google")

    def described(self, mark: str) -> str:
        """Returns the section of a name, with those of its members."""
        path, *members = mark.split()
        name = path.removeprefix("layerwise.")
        top = self.found(name)
        parts = [(f"### {path}", path, top)]
        parts += [(f"#### {name}.{member}", member, top[member]) for member in members]
        return "\n".join(f"{heading}\n\n{section(call, one)}" for heading, call, one in parts)

    def found(self, name: str) -> griffe.Object:
        entry = self.package[name]
        if entry.is_alias:
            return entry.final_target
        return self.found(str(entry.value)) if entry.is_attribute else entry


def section(call: str, entry: griffe.Object | griffe.Alias) -> str:
    """Returns the signature and the docstring of one name, as Markdown."""
    blocks = []
    if entry.is_function or entry.is_class:
        blocks.append(f"```python\n{signature(call, entry)}\n```")
    for part in entry.docstring.parsed if entry.docstring else ():
        kind = part.kind.value
        if kind == "text":
            blocks.append(part.value)
        elif kind == "examples":
            blocks += ["**Example:**", *(fenced(text) if of.value == "examples" else text for of, text in part.value)]
        elif kind == "admonition":
            blocks.append(f"**{part.title}:**\n\n{part.value.description}")
        elif kind in ("parameters", "attributes", "raises", "returns", "yields"):
            blocks.append(f"**{kind.capitalize()}:**\n\n" + "\n".join(listed(part.value, kind)))
        else:
            raise ValueError(f"{entry.path}: a docstring's section {kind!r} is not known to docs/pages.py")
    return "\n\n".join(blocks) + "\n"


def signature(call: str, entry: griffe.Object | griffe.Alias) -> str:
    text = entry.signature(name=call) or call
    if len(text) <= WIDTH:
        return text
    head, _, rest = text.partition("(")
    inner, end, result = rest.rpartition(")")
    lines = re.split(r", (?=\*{0,2}\w+(?:: |=)|\*, |/)", inner)
    return f"{head}(\n" + "".join(f"    {line},\n" for line in lines) + f"{end}{result}"


def listed(items: Iterable[griffe.DocstringNamedElement], kind: str) -> Iterable[str]:
    for item in items:
        name = str(item.annotation) if kind == "raises" else getattr(item, "name", "")
        text = " ".join(item.description.split())
        yield f"- `{name}`: {text}" if name else f"- {text}"


def fenced(text: str) -> str:
    return f"```python\n{text}\n```"


def main() -> int:
    """Returns 1 if pages are stale, which `--check` names; they are written otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing")
    check = parser.parse_args().check
    reference = Reference()

    def written(kind: str, of: str) -> str:
        return command_help(of) if kind == "help" else reference.described(of)

    stale = []
    for page in PAGES:
        text = page.read_text(encoding="utf-8")
        made = MARK.sub(lambda found: f"{found[1]}\n{written(*found.group(2, 3))}\n{found[4]}", text)
        if made != text:
            stale.append(str(page.relative_to(ROOT)))
            if not check:
                page.write_text(made, encoding="utf-8")
    if stale:
        print(f"{', '.join(stale)}: {'stale; `make pages` writes them' if check else 'written'}")
    return int(check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
