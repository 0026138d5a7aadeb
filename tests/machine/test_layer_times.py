"""The measured times of a profile: they round-trip, and a file that was damaged says where."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.machine import load, save
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes, Work
from layerwise.machine.schema import parse, write
from tests.examples import examples

seconds = st.floats(0, 1e3).map(lambda x: float(f"{x:.5g}"))
works = st.builds(Work, seconds, seconds, seconds)
times = st.builds(
    CellTime, seconds, seconds, st.floats(0, 2).map(lambda x: round(x, 4)), st.integers(0, 99), works, works
)
names = st.text(min_size=1).filter(lambda text: text.strip() != "" and text[0] != "{")  # a layer's is JSON
cells = st.dictionaries(
    names, st.dictionaries(st.tuples(st.integers(0, 9)) | st.just(()), times, min_size=1), max_size=3
)
where = st.builds(
    Conditions, names, names, st.sampled_from(["float32", "bf16"]), st.sampled_from(["off", "conv", "all"]),
    st.booleans(), st.booleans(), st.integers(0, 8),
)  # fmt: skip
sets = st.builds(LayerTimes, where, st.dictionaries(names, names, max_size=2), cells, st.none() | seconds)

ONE = LayerTimes(
    Conditions("device", "2.13.0", "float32", threads=1),
    {"date": "2026-11-21"},
    {
        "update sgd": {(8, 4): CellTime(1e-5, 0.0, 0.1, 9, Work(2, 0.0, 1e-6))},
        "runtime layer": {(): CellTime(1e-6, 2e-6, 0.1, 9)},
    },
    0.05,
)


@given(st.lists(sets, max_size=3, unique_by=lambda one: one.conditions))
@examples(30)
def test_any_times_round_trip(layers: list[LayerTimes]) -> None:
    profile = replace(load("cpu"), layers=tuple(layers))
    assert parse(write(profile), "x.json") == profile


def test_old_names_of_types_are_read() -> None:
    profile = replace(load("cpu"), layers=(replace(ONE, conditions=replace(ONE.conditions, dtype="bf16")),))
    assert parse(write(profile).replace('"bf16"', '"bfloat16"'), "old.json") == profile


def test_a_cell_is_a_line_of_the_file(tmp_path: Path) -> None:
    save(replace(load("cpu"), layers=(ONE,)), tmp_path / "mine.json")
    lines = [line for line in (tmp_path / "mine.json").read_text().splitlines() if '"extents"' in line]
    assert [json.loads(line.strip().rstrip(","))["extents"] for line in lines] == [[8, 4], []]
    assert load(tmp_path / "mine.json").device_graph(1).layers == (ONE,)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("version",), 2, "layers.version: this layerwise reads version 1 only, found the number 2"),
        (("sets",), [], "layers.sets: expected a list of at least one item"),
        (("sets", 0, "conditions", "dtype"), "float8", "layers.sets[0].conditions.dtype: expected one of float64"),
        (("sets", 0, "conditions", "threads"), -1, "layers.sets[0].conditions.threads: expected a finite number of at"),
        (("sets", 0, "conditions", "channels_last"), 1, "channels_last: expected true or false, found the number 1"),
        (("sets", 0, "conditions", "gpu"), "x", "layers.sets[0].conditions.gpu: unknown field"),
        (("sets", 0, "made", "date"), 3, "layers.sets[0].made.date: expected a non-empty string"),
        (
            ("sets", 0, "operators", 0, "cells", 0, "forward_s"),
            "fast",
            "operators[0].cells[0].forward_s: expected a num",
        ),
        (("sets", 0, "operators", 0, "cells", 0, "backward_s"), float("nan"), "NaN is not a number of JSON"),
        (("sets", 0, "operators", 0, "cells", 0, "extents"), [1.5], "cells[0].extents[0]: expected a whole number"),
        (("sets", 0, "operators", 0, "cells", 0, "work"), [1, 2], "cells[0].work: expected a list of 6 numbers"),
        (("sets", 0, "operators", 0, "cells", 0, "samples"), ..., "cells[0].samples: missing"),
        (("sets", 0, "operators", 0, "operator"), "{", "operators[0].operator is not JSON"),
        (("sets", 0, "operators", 0, "operator"), '{"a": 1e999}', "1e999 is more than a float64 holds"),
        (("sets", 0, "operators", 0, "operator"), "{}", "operators[0].operator: expected a layer's operator"),
        (("sets", 0, "operators", 0, "operator"), '{"op":1}', "operators[0].operator: expected a layer's operator"),
        (
            ("sets", 0, "operators", 0, "operator"),
            '{"op":{"kind":"conv"},"followers":[3]}',
            "operators[0].operator: expected a layer's operator and followers",
        ),
        (("sets", 0, "operators", 1, "operator"), "update sgd", "operators[1].operator: appears twice"),
        (("sets", 0, "operators", 0, "cells", 1), "same", "cells[1]: the extents [8, 4] appear twice"),
        (("sets", 1), "same", "layers: sets[1] has the conditions of an earlier one"),
    ],
)
def test_a_damaged_section_is_named(path: tuple[str | int, ...], value: object, said: str) -> None:
    document = json.loads(write(replace(load("cpu"), layers=(ONE,))))
    target: Any = document["layers"]
    for key in path[:-1]:
        target = target[key]
    if value is ...:
        del target[path[-1]]
    elif value == "same":
        target.append(copy.deepcopy(target[0]))
    else:
        target[path[-1]] = value
    with pytest.raises(LayerwiseError) as caught:
        parse(json.dumps(document), "mine.json")
    assert str(caught.value).startswith("profile mine.json")
    assert said in str(caught.value)
