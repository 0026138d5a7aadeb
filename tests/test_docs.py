"""The pages of docs/ against the code: `make docs` checks their links, and these what it cannot know."""

import re
import textwrap
from pathlib import Path

import numpy as np

import layerwise
from layerwise.__main__ import COMMANDS
from layerwise.config import Config
from layerwise.cost import terms
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.ops.base import Role
from layerwise.ops.specs import same

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
COST_MODEL = (DOCS / "explanation/cost_model.md").read_text(encoding="utf-8")
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_api_page_has_every_public_name() -> None:
    page = (DOCS / "reference/api.md").read_text(encoding="utf-8")
    shown = set(re.findall(r"^<!-- api: layerwise\.(\w+)\b(?!\.)", page, re.MULTILINE))
    assert set(layerwise.__all__) - shown == {"__version__"}


def test_the_page_of_commands_has_every_command() -> None:
    page = (DOCS / "reference/cli.md").read_text(encoding="utf-8")
    assert {*re.findall(r"<!-- help: ([\w-]+) -->", page)} == {*COMMANDS}


def test_equations_are_numbered_in_order() -> None:
    blocks = "".join(re.findall(r"^```text\n(.*?)^```", COST_MODEL, re.DOTALL | re.MULTILINE))
    numbers = [int(number) for number in re.findall(r"^\((\d+)\)", blocks, re.MULTILINE)]
    assert len(numbers) > 20
    assert numbers == [*range(1, len(numbers) + 1)]


def test_modules_that_pages_name_are_there() -> None:
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        for name in re.findall(r"`((?:layerwise|tests|examples)/[\w/]+(?:\.py|/))`", text):
            assert (ROOT / name).exists(), (page.name, name)


def test_functions_that_the_cost_model_names_are_there() -> None:
    """Each behind its file: `layerwise/cost/collectives.py`: `wire_bytes`."""
    named = re.findall(r"`(layerwise/[\w/]+\.py)`:((?: `[\w.]+`(?: \([^)]*\))?,?)+)", " ".join(COST_MODEL.split()))
    assert len(named) > 10
    for name, functions in named:
        code = (ROOT / name).read_text(encoding="utf-8")
        for function in re.findall(r"`(?:\w+\.)?(\w+)`", functions):
            assert re.search(rf"(?:def|class) {function}\b|^    {function}: ", code, re.MULTILINE), (name, function)


def test_the_readme_is_short_and_its_links_lead_somewhere() -> None:
    assert len(README.splitlines()) <= 150
    for target in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", README):
        assert target.startswith("https://") or (ROOT / target).exists(), target


def test_links_of_pages_lead_to_files_of_the_repository() -> None:
    """So that the pages can be read there; `make docs` checks those of the site."""
    pages = [*DOCS.rglob("*.md"), ROOT / "profiles/README.md", ROOT / "ARCHITECTURE.md", ROOT / "CONTRIBUTING.md"]
    for page in pages:
        text = re.sub(r"^```.*?^```|`[^`]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
        for target in re.findall(r"\]\(([^)#\s]+)", text):
            assert target.startswith("https://") or (page.parent / target).exists(), (page.name, target)


def test_pages_are_written_out() -> None:
    """A page that is made of other files has what they say, not marks in their places: `make pages`."""
    for page in DOCS.rglob("*.md"):
        text = page.read_text(encoding="utf-8")
        assert not re.search(r"^(?:--8<--|:::)|^<!-- (?:api|help|job): .*-->\n<!-- end -->", text, re.MULTILINE), (
            page.name
        )


def test_the_glossary_is_short() -> None:
    assert len(re.findall(r"^\| ", (DOCS / "reference/glossary.md").read_text(encoding="utf-8"), re.MULTILINE)) <= 31


def test_every_page_is_in_the_navigation() -> None:
    navigation = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    assert [p.name for p in DOCS.rglob("*.md") if p.relative_to(DOCS).as_posix() not in navigation] == []
    assert [p.name for p in (ROOT / "notebooks").glob("*.ipynb") if f"tutorials/{p.name}" not in navigation] == []


def test_the_cost_term_of_the_how_to_is_one() -> None:
    """As written, with the imports of `cost/terms.py`: seconds of every configuration, in the tables' shape."""
    page = (DOCS / "how-to" / "add_a_cost_term.md").read_text(encoding="utf-8")
    known = vars(terms) | {"np": np, "Role": Role, "same": same}
    for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL):
        exec(textwrap.dedent(block), known)
    model = CostModel(fuse(load_model("lenet5", 8)), load("cpu").device_graph(2), CostOptions())
    configs = (Config.of({"n": 2}), Config())
    for layer in model.graph.layers[:2]:
        seconds = known["READING"].seconds(model, layer, model.layout(layer, configs), False)
        assert seconds.shape == (2,)
        assert (seconds > 0).all() == (layer.role is Role.INPUT)
        assert known["READING"].sent_bytes(model, layer, model.layout(layer, configs)) == 0
    assert f"\n({known['READING'].equation})" not in COST_MODEL  # a new number
