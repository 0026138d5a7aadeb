"""Files that users hand in: JSON that only looks like it, in every file that layerwise reads."""

import json
import os
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from layerwise.checkpoint.reader import Reader
from layerwise.errors import LayerwiseError
from layerwise.files import MAX_DEPTH, check_writable, parse_json, read_json, write_text
from layerwise.machine import load
from layerwise.oracle.runs import read_runs
from layerwise.plan import load_plan, parse_plan
from layerwise.report.figures import save_plot

READERS = {
    "plan": load_plan,
    "plan's text": lambda path: parse_plan(path.read_text(), "plan"),
    "profile": lambda path: load(str(path)),
    "measured runs": read_runs,
    "checkpoint": lambda path: Reader(path.parent),
    "strategy": lambda path: read_json(path, "strategy"),
}
TEXTS = {
    '{"batch": 1e999}': "1e999 is more than a float64 holds",
    '{"batch": -1e999}': "-1e999 is more than a float64 holds",
    '{"batch": NaN}': "NaN is not a number of JSON",
    '{"batch": -Infinity}': "-Infinity is not a number of JSON",
    '{"batch": 1' + "0" * 400 + "}": "0 is more than a float64 holds",
    '{"batch": 1' + "0" * 5000 + "}": "0 is more than a float64 holds",
    '{"batch": 1, "batch": 2}': "'batch' appears twice",
    "[" * 500 + "]" * 500: "nested deeper",
    '{"a":' * 100_000: "nested deeper",
}


@pytest.mark.parametrize("reader", READERS)
def test_numbers_that_are_none_and_deep_nesting_are_refused_in_every_json_file(reader: str, tmp_path: Path) -> None:
    file = tmp_path / "checkpoint.json"
    for text, said in TEXTS.items():
        file.write_text(text)
        with pytest.raises(LayerwiseError, match=said) as caught:
            READERS[reader](file)
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 400


def test_a_link_of_somebody_else_s_beside_a_file_is_not_written_through(tmp_path: Path) -> None:
    """In a folder that others write into, too, with the name that a temporary file used to have."""
    (tmp_path / "precious").write_text("mine")
    (tmp_path / f".plan.json.{os.getpid()}.tmp").symlink_to("precious")
    (tmp_path / f".plan.png.{os.getpid()}.tmp").symlink_to("precious")
    check_writable(tmp_path / "plan.json")
    write_text(tmp_path / "plan.json", "new")
    save_plot(Figure(), tmp_path / "plan.png")
    assert (tmp_path / "precious").read_text() == "mine"
    assert (tmp_path / "plan.json").read_text() == "new"


def test_what_json_holds_is_read() -> None:
    value = {"a": [1.5e300, 2**63 - 1, -(2**63), 0], "b]}": {'"\\{[': None}, "c": [[]] * 1000}
    assert parse_json(json.dumps(value), "it") == value
    assert parse_json("[" * MAX_DEPTH + "]" * MAX_DEPTH, "it")
