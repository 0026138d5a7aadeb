"""Profiles: numbers with sources, files, measured times of layers; what is wrong in one is named."""

import copy
import json
import os
import re
import tempfile
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from layerwise.errors import LayerwiseError
from layerwise.machine import DTYPES, Link, LinkLevel, load, names, save
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes, Work
from layerwise.machine.profiles import folder, parse, write
from tests.examples import examples
from tests.machine.test_devices import LINKS

FILES = {name: (resources.files("layerwise.profiles") / f"{name}.json").read_text(encoding="utf-8") for name in names()}
V100 = json.loads(FILES["v100"])
README = (resources.files("layerwise.profiles") / "README.md").read_text(encoding="utf-8")


def bare_numbers(value: object, path: str = "") -> list[str]:
    """Paths of numbers that stand without a source."""
    if isinstance(value, dict):
        if set(value) == {"value", "source"}:
            return [] if str(value["source"]).strip() else [path]
        return [found for key, item in value.items() for found in bare_numbers(item, f"{path}.{key}")]
    if isinstance(value, list):
        return [found for i, item in enumerate(value) for found in bare_numbers(item, f"{path}[{i}]")]
    return [path] if isinstance(value, int | float) else []


@pytest.mark.parametrize("name", names())
def test_built_in_profiles_say_where_every_number_comes_from(name: str) -> None:
    profile = load(name)
    assert profile.name == name
    assert bare_numbers(json.loads(FILES[name])) == [".version"]
    assert len(profile.sources) == FILES[name].count('"source"')
    assert f"`{name}`" in README
    efficiencies = [tile.efficiency for tile in sorted(profile.processor.tiles, key=lambda t: -t.rows * t.columns)]
    assert efficiencies == sorted(efficiencies, reverse=True)


def test_the_machines_are_those_that_were_asked_for() -> None:
    """Sizes and bandwidths of issue 2, section 3: a slip in a power of ten would spoil every plan."""
    gb, gbit = 1e9, 0.125e9
    stated = {name: [(level.devices, level.bandwidth_bytes_per_s) for level in load(name).levels] for name in names()}
    assert stated == {
        "h100": [(8, 450 * gb), (None, 400 * gbit)],
        "h200-measured": [(8, 450 * gb), (None, 400 * gbit)],
        "p100": [(4, 20 * gb), (None, 100 * gbit)],
        "v100": [(4, 50 * gb), (136, 100 * gbit), (None, 283.3 * gb)],
        "pcie": [(4, 31.5 * gb), (None, 25 * gbit)],
        "cpu": [(1, 1.5 * gb), (None, pytest.approx(0.936 * gbit))],
    }
    assert load() == load("h100")
    assert load("v100").other_links == (Link("pcie", 3.00011e-3, 16 * gb),)


def test_the_readme_shows_a_profile_that_loads() -> None:
    example = README.split("```json")[1].split("```")[0]
    assert parse(example, "README.md").device_graph(16).levels[1].devices_per_port == 8


def test_bf16_has_one_name() -> None:
    """Files that say `bfloat16` are read, and written with `bf16`."""
    h100 = replace(load("h100"), layers=(replace(ONE, conditions=replace(ONE.conditions, dtype="bf16")),))
    old = write(h100).replace('"bf16"', '"bfloat16"')
    assert "bfloat16" in old
    assert parse(old, "old.json") == h100
    assert h100.processor.peak("bfloat16") == h100.processor.peak("bf16")


@pytest.mark.parametrize("name", names())
def test_a_saved_profile_loads_as_it_was(name: str, tmp_path: Path) -> None:
    profile = load(name)
    save(profile, tmp_path / "copy.json")
    assert load(tmp_path / "copy.json") == profile
    assert [path.name for path in tmp_path.iterdir()] == ["copy.json"]


positive = st.floats(min_value=1e-300, max_value=1e300)
label = st.text(min_size=1).filter(lambda text: text.strip() != "")


@given(label, label, positive, positive, st.integers(1, 10**6))
def test_any_sound_profile_round_trips(name: str, source: str, latency: float, bandwidth: float, node: int) -> None:
    base = load("p100")
    levels = (LinkLevel(name, node, latency, bandwidth, 1), LinkLevel(f"{name}+", None, bandwidth, latency, name))
    profile = replace(base, name=name, levels=levels, sources=dict.fromkeys(base.sources, source))
    assert parse(write(profile), "x.json") == profile


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is not JSON: Expecting value: line 1"),
        (FILES["v100"].encode()[:900], "is not JSON"),
        (b"[]", "not a profile of layerwise"),
        (b"\xff\xfe\x00", "not a text file"),
    ],
)
def test_a_file_that_is_no_profile(content: bytes, said: str, tmp_path: Path) -> None:
    file = tmp_path / "bad.json"
    file.write_bytes(content)
    with pytest.raises(LayerwiseError, match=said) as caught:
        load(str(file))
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given_name", "said"),
    [
        ("h10", "did you mean h100"),
        ("P100", "did you mean p100"),
        ("", "built in are cpu, h100, h200-measured, p100, pcie, v100"),
        ("none/such.json", "profile none/such.json: cannot be read: No such file"),
        ("such.json", "profile such.json: cannot be read: No such file"),
        (".", "cannot be read: Is a directory"),
        ("a" * 300, "unknown profile 'aaa"),
        ("a" * 300 + ".json", "cannot be read: File name too long"),
        ("a\0.json", "not a text file"),
    ],
)
def test_a_profile_that_is_not_there(
    given_name: str, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(LayerwiseError, match=said):
        load(given_name)


def test_a_profile_may_be_a_file_without_an_ending(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("mine").write_text(FILES["p100"])
    assert load("mine") == load("p100")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.just("node"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text() | st.sampled_from(DTYPES), inner, max_size=3),
    max_leaves=6,
)


@given(st.data(), json_values)
def test_no_file_makes_anything_but_a_clear_error(data: st.DataObject, value: object) -> None:
    """Whatever stands anywhere in a profile, it loads and gives a graph, or one line says why not."""
    document = copy.deepcopy(V100)
    target: Any = document
    while True:
        keys = list(target) if isinstance(target, dict) else list(range(len(target)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(target[key], dict | list) or data.draw(st.booleans()):
            break
        target = target[key]
    target[key] = value
    said = "profile x.json: "
    try:
        parse(json.dumps(document), "x.json").device_graph(1)
    except LayerwiseError as error:
        said = str(error)
    assert said.startswith("profile x.json")
    assert len(said.splitlines()) == 1


@pytest.mark.parametrize("there", [True, False])
def test_what_load_would_refuse_is_not_written(there: bool, tmp_path: Path) -> None:
    good, file = load("cpu"), tmp_path / "mine.json"
    if there:
        save(good, file)
    level = replace(good.levels[0], latency_s=-1.0)
    with pytest.raises(LayerwiseError, match=r"mine.json: levels\[0\].latency_s.value"):
        save(replace(good, levels=(level, *good.levels[1:])), file)
    assert [path.name for path in tmp_path.iterdir()] == (["mine.json"] if there else [])
    assert not there or load(file) == good


def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for place in (tmp_path / "none" / "x.json", tmp_path / "folder"):
        with pytest.raises(LayerwiseError, match=r"cannot be written"):
            save(load("cpu"), place)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


seconds = st.floats(0, 1e3).map(lambda x: float(f"{x:.5g}"))
works = st.builds(Work, seconds, seconds, seconds)
times = st.builds(
    CellTime, seconds, seconds, st.floats(0, 2).map(lambda x: round(x, 4)), st.integers(0, 99), works, works
)
measured_names = st.text(min_size=1).filter(lambda text: text.strip() != "" and text[0] != "{")  # a layer's is JSON
cells = st.dictionaries(
    measured_names, st.dictionaries(st.tuples(st.integers(0, 9)) | st.just(()), times, min_size=1), max_size=3
)
where = st.builds(
    Conditions,
    measured_names,
    measured_names,
    st.sampled_from(["float32", "bf16"]),
    st.sampled_from(["off", "conv", "all"]),
    st.booleans(),
    st.booleans(),
    st.integers(0, 8),
)
sets = st.builds(
    LayerTimes, where, st.dictionaries(measured_names, measured_names, max_size=2), cells, st.none() | seconds
)

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
@examples(18)
def test_any_times_round_trip(layers: list[LayerTimes]) -> None:
    profile = replace(load("cpu"), layers=tuple(layers))
    assert parse(write(profile), "x.json") == profile


def test_a_cell_is_a_line_of_the_file(tmp_path: Path) -> None:
    save(replace(load("cpu"), layers=(ONE,)), tmp_path / "mine.json")
    lines = [line for line in (tmp_path / "mine.json").read_text().splitlines() if '"extents"' in line]
    assert [json.loads(line.strip().rstrip(","))["extents"] for line in lines] == [[8, 4], []]
    assert load(tmp_path / "mine.json").device_graph(1).layers == (ONE,)


# `...` takes the field away, "same" repeats the first of a list.
FIELDS: list[tuple[str, object, str]] = [
    ("levels[1].latency_s.value", -1e-6, "finite number above 0, found -1e-06"),
    ("levels[0].bandwidth_bytes_per_s.value", 1e-310, "above 0, found 1e-310"),
    ("device.memory_bytes.value", "16 GB", "expected a number, found the string '16 GB'"),
    ("device.memory_bytes.value", True, "expected a number, found true"),
    ("device.processors.value", 79.5, "expected a whole number, found 79.5"),
    ("device.tiles[2].efficiency", {"value": 85, "source": "in per cent"}, "at most 1, found 85"),
    ("device.tiles", [], "expected a list of at least one item, found a list with nothing in it"),
    ("device.peak_flops.float32", ..., "missing"),
    ("device.peak_flops.bfloat", {"value": 1e12, "source": "x"}, "unknown field; did you mean 'bfloat16'"),
    ("device.memory_bytes.source", ..., "missing"),
    ("device.memory_bytes.source", "  ", "expected a non-empty string"),
    ("device.kernel_floor_s", 5e-6, "expected an object with value, source, found the number 5e-06"),
    ("device.memmory_bytes", {}, "unknown field; did you mean 'memory_bytes'"),
    ("levels[0].devices", ..., "missing"),
    ("levels[2].devices", {"value": 272, "source": "two racks"}, "leave it out"),
    ("levels[1].devices", {"value": 138, "source": "x"}, "must nest: 138 is no larger multiple of node's 4"),
    ("levels[1].devices", {"value": 4, "source": "x"}, "must nest: 4 is no larger multiple"),
    ("levels[1].devices_per_port", {"value": 3, "source": "x"}, "3 does not divide the 4 devices"),
    ("levels[1].devices_per_port.value", "rack", "expected a whole number or 'node', found 'rack'"),
    ("levels[1].name", "node", "two levels are named 'node'"),
    ("other_links[0].latency_s", ..., "missing"),
    ("layer", {}, "unknown field; did you mean 'layers'"),
    ("layers", {"conv1": {"s": 1}}, "unknown field; known here: version, sets"),
    ("format", "profile", '"format": "layerwise-profile"'),
    ("version", 3, "reads versions 1 and 2, found 3"),
    ("version", ..., "reads versions 1 and 2, found null"),
]
OF_LINKS: list[tuple[str, object, str]] = [
    ("links.version", 2, "this layerwise reads version 1 only"),
    ("links.version", True, "this layerwise reads version 1 only"),
    ("links.curves", [], "expected a list of at least one item"),
    ("links.conditions", 3, "expected an object"),
    ("links.curves[0].operation", "gossip", "expected one of message"),
    ("links.curves[0].fan", [2, 1], "the last level must have more than one member"),
    ("links.curves[0].load", 0, "expected a whole number from 1"),
    ("links.curves[0].knots", [[1, 1]], "expected at least two pairs"),
    ("links.curves[0].knots", [[1, 2], [2, 1]], "seconds must not fall"),
    ("links.curves[0].knots", [[2, 1], [2, 1]], "bytes must rise"),
    ("links.curves[0].knots[0][1]", "fast", "expected a number, found the string 'fast'"),
    ("links.curves[2].message_s", [[2, 1], [1, 1]], "bytes must rise"),
    ("links.overlaps[0].operation", "gossip", "expected one of message"),
    ("links.overlaps[0].sync", 1.5, "expected a share from 0.01 to 1, found 1.5"),
    ("links.overlaps", {}, "expected a list"),
]
OF_LAYERS: list[tuple[str, object, str]] = [
    ("layers.version", 2, "this layerwise reads version 1 only, found the number 2"),
    ("layers.sets", [], "expected a list of at least one item"),
    ("layers.sets[0].conditions.dtype", "float8", "expected one of float64"),
    ("layers.sets[0].conditions.threads", -1, "expected a finite number of at"),
    ("layers.sets[0].conditions.channels_last", 1, "channels_last: expected true or false, found the number 1"),
    ("layers.sets[0].conditions.gpu", "x", "unknown field"),
    ("layers.sets[0].made.date", 3, "expected a non-empty string"),
    ("layers.sets[0].operators[0].cells[0].forward_s", "fast", "operators[0].cells[0].forward_s: expected a num"),
    ("layers.sets[0].operators[0].cells[0].extents", [1.5], "cells[0].extents[0]: expected a whole number"),
    ("layers.sets[0].operators[0].cells[0].work", [1, 2], "cells[0].work: expected a list of 6 numbers"),
    ("layers.sets[0].operators[0].cells[0].samples", ..., "cells[0].samples: missing"),
    ("layers.sets[0].operators[0].operator", "{", "operators[0].operator is not JSON"),
    ("layers.sets[0].operators[0].operator", '{"a": 1e999}', "1e999 is more than a float64 holds"),
    ("layers.sets[0].operators[0].operator", "{}", "operators[0].operator: expected a layer's operator"),
    ("layers.sets[0].operators[0].operator", '{"op":1}', "operators[0].operator: expected a layer's operator"),
    ("layers.sets[0].operators[0].operator", '{"op":{"kind":"conv"},"followers":[3]}', "expected a layer's"),
    ("layers.sets[0].operators[1].operator", "update sgd", "operators[1].operator: appears twice"),
    ("layers.sets[0].operators[0].cells[1]", "same", "cells[1]: the extents [8, 4] appear twice"),
    ("layers.sets[1]", "same", "layers: sets[1] has the conditions of an earlier one"),
]


@pytest.mark.parametrize(
    ("base", "path", "value", "said"),
    [
        *((V100, *row) for row in FIELDS),
        *((json.loads(write(replace(load("cpu"), links=LINKS))), *row) for row in OF_LINKS),
        *((json.loads(write(replace(load("cpu"), layers=(ONE,)))), *row) for row in OF_LAYERS),
    ],
    ids=[f"{path}: {said}" for path, _, said in (*FIELDS, *OF_LINKS, *OF_LAYERS)],
)
def test_a_bad_field_is_named(base: dict[str, Any], path: str, value: object, said: str) -> None:
    document = copy.deepcopy(base)
    *parents, last = [int(key) if key.isdigit() else key for key in re.findall(r"\w+", path)]
    target: Any = document
    for key in parents:
        target = target[key]
    if value is ...:
        del target[last]
    elif value == "same":
        target.append(copy.deepcopy(target[0]))
    else:
        target[last] = value
    with pytest.raises(LayerwiseError) as caught:
        parse(json.dumps(document), "mine.json")
    message = str(caught.value)
    assert message.startswith("profile mine.json")
    assert said in message
    assert "\n" not in message
    assert value == "same" or path in message


def test_where_measured_profiles_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LAYERWISE_CACHE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert folder() == Path("/x/layerwise")
    monkeypatch.setenv("LAYERWISE_CACHE", "/y")
    assert folder() == Path("/y")


@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder among temporary files of a user without a home."""
    monkeypatch.delenv("LAYERWISE_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", lambda: Path("~none").expanduser())  # which raises
    monkeypatch.setattr(tempfile, "gettempdir", lambda: str(tmp_path))
    return tmp_path / f"layerwise-{os.getuid()}"


def test_a_user_without_a_home(homeless: Path) -> None:
    assert folder() == homeless
    assert homeless.stat().st_mode & 0o777 == 0o700


def test_a_folder_among_temporary_files_that_others_can_write_into_is_not_used(homeless: Path, tmp_path: Path) -> None:
    homeless.mkdir()
    homeless.chmod(0o777)
    with pytest.raises(LayerwiseError, match="set LAYERWISE_CACHE to your own folder"):
        folder()
    homeless.rmdir()
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    homeless.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(LayerwiseError, match="set LAYERWISE_CACHE to your own folder"):
        folder()
