"""Curves of measured links: their values, their lookup, their file."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.machine import Curve, Links, Overlap, load, save
from layerwise.machine.curves import trimmed

CURVE = Curve("all_reduce", (1, 2), 1, ((1000.0, 1e-3), (3000.0, 2e-3), (4000.0, 4e-3)))
LINKS = Links(
    (CURVE, replace(CURVE, load=2), Curve("exchange", (2,), 1, ((1.0, 1e-6), (2.0, 2e-6)), 5e-7)),
    (Overlap((1, 2), 1, 0.9, 0.8), Overlap((2, 2), 1, 0.7, 0.6)),
    {"date": "today"},
)


def seconds(size: float) -> float:
    return float(CURVE.seconds(np.array(size)))


def test_lines_between_knots_the_last_one_going_on() -> None:
    assert seconds(0) == 0
    assert seconds(1) == seconds(1000) == 1e-3
    assert seconds(2000) == pytest.approx(1.5e-3)
    assert seconds(3000) == pytest.approx(2e-3)
    assert seconds(6000) == pytest.approx(8e-3)


def test_pieces_are_alpha_and_beta() -> None:
    for at, alpha, beta in CURVE.pieces:
        assert seconds(at + 10) == pytest.approx(alpha + beta * (at + 10))
    assert [at for at, _, _ in CURVE.pieces] == [1000, 3000]


@given(st.lists(st.tuples(st.floats(1, 1e9), st.floats(1e-9, 10)), min_size=2, max_size=8, unique_by=lambda p: p[0]))
def test_a_curve_never_falls(points: list[tuple[float, float]]) -> None:
    """Bounds on configurations rest on it: what some devices see is no more than all."""
    sizes, times = sorted(p[0] for p in points), sorted(p[1] for p in points)
    curve = Curve("exchange", (2,), 1, tuple(zip(sizes, times, strict=True)), 1e-6)
    at = np.sort(np.concatenate([np.geomspace(0.5, 3e9, 200), sizes]))
    assert (np.diff(curve.seconds(at)) >= -1e-12).all()
    assert (np.diff(curve.ports_seconds(np.full(5, 100.0), np.arange(5.0))) >= 0).all()


def test_the_next_higher_load_stands_in() -> None:
    assert LINKS.curve("all_reduce", (1, 2, 1), 1) is CURVE
    assert LINKS.curve("all_reduce", (1, 2), 2) == replace(CURVE, load=2)
    assert LINKS.curve("all_reduce", (1, 2), 3) is None
    assert LINKS.curve("all_reduce", (1, 4), 1) is None
    assert LINKS.port(0) == LINKS.curves[2]
    assert LINKS.port(1) is None


def test_overlap_of_a_shape_or_of_one_of_as_many_levels() -> None:
    assert LINKS.overlap((1, 2), 1) == LINKS.overlaps[0]
    assert LINKS.overlap((4, 4), 1) == LINKS.overlaps[1]
    assert LINKS.overlap((2,), 1) is None


def test_trimmed() -> None:
    assert trimmed((2, 1, 1)) == (2,)
    assert trimmed((1, 1)) == ()
    assert trimmed((1, 3)) == (1, 3)


def test_a_profile_keeps_its_links(tmp_path: Path) -> None:
    profile = replace(load("cpu"), links=LINKS)
    save(profile, tmp_path / "x.json")
    assert load(tmp_path / "x.json") == profile
    assert "[1000.0, 0.001]" in (tmp_path / "x.json").read_text()
    assert profile.device_graph(2).links is LINKS
    assert hash(profile.device_graph(2)) == hash(load("cpu").device_graph(2))
    assert profile.device_graph(2) != load("cpu").device_graph(2)


@pytest.mark.parametrize(
    ("path", "value", "said"),
    [
        (("version",), 2, "links.version: this layerwise reads version 1 only"),
        (("version",), True, "links.version: this layerwise reads version 1 only"),
        (("curves",), [], "links.curves: expected a list of at least one item"),
        (("conditions",), 3, "links.conditions: expected an object"),
        (("curves", 0, "operation"), "gossip", "links.curves[0].operation: expected one of message"),
        (("curves", 0, "fan"), [2, 1], "links.curves[0].fan: the last level must have more than one member"),
        (("curves", 0, "load"), 0, "links.curves[0].load: expected a whole number from 1"),
        (("curves", 0, "knots"), [[1, 1]], "links.curves[0].knots: expected at least two pairs"),
        (("curves", 0, "knots"), [[1, 2], [2, 1]], "seconds must not fall"),
        (("curves", 0, "knots"), [[2, 1], [2, 1]], "bytes must rise"),
        (("curves", 0, "knots", 0, 1), float("nan"), "NaN is not a number of JSON"),
        (
            ("curves", 0, "knots", 0, 1),
            "fast",
            "links.curves[0].knots[0][1]: expected a number, found the string 'fast'",
        ),
        (("overlaps", 0, "sync"), 1.5, "links.overlaps[0].sync: expected a share from 0.01 to 1, found 1.5"),
        (("overlaps",), {}, "links.overlaps: expected a list"),
    ],
)
def test_a_bad_field_is_named(path: tuple[str | int, ...], value: object, said: str, tmp_path: Path) -> None:
    save(replace(load("cpu"), links=LINKS), tmp_path / "x.json")
    document = json.loads((tmp_path / "x.json").read_text())
    at = document["links"]
    for key in path[:-1]:
        at = at[key]
    at[path[-1]] = value
    (tmp_path / "x.json").write_text(json.dumps(document))
    with pytest.raises(LayerwiseError) as caught:
        load(tmp_path / "x.json")
    assert said in str(caught.value)
