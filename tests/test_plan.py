"""Plans: what is written is read back equal, and whatever else is in the file is refused with a reason."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from layerwise.config import Config, SearchSpace, parse
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import price
from layerwise.errors import LayerwiseError
from layerwise.files import check_writable, write_text
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.machine import load
from layerwise.ops.facts import Dim
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.plan import Plan, checksum, load_plan, parse_plan, parse_strategy
from layerwise.search.find import candidate, search
from layerwise.search.make_plan import make_plan
from layerwise.search.report import found as report_json

SAME_FILE = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def model_of(name: str, batch: int, gpus: int = 8) -> CostModel:
    return CostModel(fuse(load_model(name, batch)), load("p100").device_graph(gpus), CostOptions(io="free"))


@pytest.fixture(scope="module")
def model() -> CostModel:
    return model_of("lenet5", 4)


@pytest.fixture(scope="module")
def graph(model: CostModel) -> LayerGraph:
    return model.graph


@pytest.fixture(scope="module")
def plan(model: CostModel) -> Plan:
    space = SearchSpace(8, spread=True)
    return make_plan("lenet5", "p100", model, space, search(model, space), fused=True, input_shape=None)


def written(path: Path, body: dict[str, Any]) -> Path:
    """A file that is sound but for what `body` says."""
    body.pop("checksum", None)
    # The checksum stands before the strategy, and is that of all the rest.
    path.write_text(json.dumps({**body, "checksum": checksum(body)}))
    return path


def test_round_trip(plan: Plan, graph: LayerGraph, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    plan.save(path)
    again = load_plan(path)
    assert again == plan
    assert again.dumps() == plan.dumps() == path.read_text()
    assert list(again.strategy) == [layer.name for layer in graph.inner]  # in the graph's order
    again.check(graph, world_size=8)
    assert list(tmp_path.iterdir()) == [path]


placements = st.sampled_from(["contiguous", "strided"])
names = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=12)


choices = st.tuples(st.booleans(), st.sampled_from(["replicated", "sharded", "gathered"]))
configs = st.tuples(st.sampled_from([{}, {"n": 2}, {"c": 2, "k": 2}]), placements, choices)


@given(st.dictionaries(names, configs, max_size=5))
@SAME_FILE
def test_any_names_round_trip(tmp_path: Path, layers: dict[str, tuple[dict[str, int], Any, tuple[bool, Any]]]) -> None:
    strategy = {
        name: Config(Config.of(degrees).degrees, placement if degrees else "contiguous", *saving)
        for name, (degrees, placement, saving) in layers.items()
    }
    plan = Plan("m [/] \n", "d", 8, 8, 4, "sample", True, strategy)
    plan.save(tmp_path / "p.json")
    assert load_plan(tmp_path / "p.json") == plan


def test_buckets_round_trip_and_are_left_out_where_they_are_those_of_ddp(plan: Plan, tmp_path: Path) -> None:
    path, small = tmp_path / "plan.json", replace(plan, bucket_bytes=2**21)
    small.save(path)
    assert load_plan(path) == small
    assert "bucket_bytes" not in replace(plan, bucket_bytes=BUCKET_BYTES).dumps()


def test_a_plan_of_version_1_is_read(plan: Plan, tmp_path: Path) -> None:
    body = json.loads(plan.dumps()) | {"version": 1}
    body["checksum"] = checksum({key: value for key, value in body.items() if key != "checksum"})
    (tmp_path / "old.json").write_text(json.dumps(body))
    assert load_plan(tmp_path / "old.json") == plan


def test_other_graph_batch_world_size(plan: Plan, graph: LayerGraph) -> None:
    with pytest.raises(LayerwiseError, match="for 8 ranks, there are 4"):
        plan.check(graph, world_size=4)
    with pytest.raises(LayerwiseError, match="global batch of 4, here it is 6"):
        plan.check(graph.rebatch(6))
    with pytest.raises(LayerwiseError, match=r"another model: layer .* is only in one"):
        plan.check(fuse(load_model("mlp:8x8", 4)))
    with pytest.raises(LayerwiseError, match="another model: layer"):
        plan.check(load_model("lenet5", 4))  # not fused
    wide, narrow = (model_of(f"mlp:8x{width}x4", 4) for width in (16, 12))
    space = SearchSpace(8)
    other = make_plan("mlp", "p100", wide, space, search(wide, space), fused=True)
    with pytest.raises(LayerwiseError, match="digest"):
        other.check(narrow.graph)
    with pytest.raises(LayerwiseError, match=r"layer '.*': h=32 is more than"):
        replace(plan, strategy={**plan.strategy, "features.5": Config.of({"h": 32})}, gpus=32).check(graph)


ALTERED: list[tuple[str, Any, str]] = [
    ("format", "x", "is not a layerwise plan"),
    ("version", 4, "reads versions 1, 2 and 3"),
    ("version", True, "reads versions 1, 2 and 3"),
    ("model", None, "'model' must be a str"),
    ("fused", 1, "'fused' must be a bool"),
    ("batch", 0, "'batch' must be a whole number"),
    ("batch", True, "'batch' must be a whole number"),
    ("batch", 10**30, "at most 1,073,741,824"),
    ("gpus", 10**12, "'device_order' must name each of the 1000000000000 ranks"),
    ("gpus", 2.0, "'gpus' must be a whole number"),
    ("io", "disk", "'io' must be"),
    ("bucket_bytes", 0, "'bucket_bytes' must be a whole number of at least 1"),
    ("bucket_bytes", 1.5, "'bucket_bytes' must be a whole number of at least 1"),
    ("halos_sent", ["x"], "sends halos of its inputs, which are read now: search again"),
    ("device_order", list(range(7)), "'device_order'"),
    ("device_order", [0] * 8, "'device_order'"),
    ("device_order", [str(i) for i in range(8)], "'device_order'"),
    ("device_order", [[]] * 8, "'device_order'"),
    ("predicted", [], "'predicted' must be a JSON object"),
    ("predicted", {"step_time_s": -1}, "finite number"),
    ("predicted", {"step_time_s": 10**400}, "more than a float64 holds"),
    ("predicted", {"step_time_s": True}, "finite number"),
    ("provenance", None, "'provenance' must be a JSON object"),
    ("strategy", None, "'strategy' must be a JSON object"),
    ("strategy", {"a": 4}, "layer 'a'"),
    ("strategy", {"a": {"n": 0}}, "layer 'a'"),
    ("strategy", {"a": {"n": 16}}, "needs 16 devices, there are 8"),
    ("strategy", {"a": {"q": 2}}, "layer 'a'"),
    ("strategy", {"a": {"n": 2, "placement": []}}, "placement"),
]


@pytest.mark.parametrize(("key", "value", "reason"), ALTERED)
def test_unsound_values(plan: Plan, tmp_path: Path, key: str, value: Any, reason: str) -> None:
    with pytest.raises(LayerwiseError, match=reason):
        load_plan(written(tmp_path / "p.json", json.loads(plan.dumps()) | {key: value}))


def test_altered(plan: Plan, tmp_path: Path) -> None:
    """Values that are each sound, but are not those that were written."""
    body = json.loads(plan.dumps())
    layer = next(iter(body["strategy"]))
    changes: list[dict[str, Any]] = [
        {"batch": 6},
        {"device_order": [1, 0, *range(2, 8)]},
        {"predicted": body["predicted"] | {"step_time_s": 1.0}},
        {"strategy": body["strategy"] | {layer: {"n": 2}}},
        {"strategy": dict(reversed(body["strategy"].items()))},
        {"provenance": {}},
        {"checksum": "0" * 64},
        {"note": "x"},
    ]
    for change in changes:
        (tmp_path / "p.json").write_text(json.dumps(body | change))
        with pytest.raises(LayerwiseError, match="was altered"):
            load_plan(tmp_path / "p.json")
    (tmp_path / "p.json").write_text(json.dumps(body))  # other white space is no alteration
    assert load_plan(tmp_path / "p.json") == plan


edits = st.lists(st.tuples(st.integers(0, 10**4), st.integers(0, 3), st.binary(max_size=4)), min_size=1, max_size=4)


@given(edits)
@SAME_FILE
def test_corrupt_bytes(plan: Plan, tmp_path: Path, cuts: list[tuple[int, int, bytes]]) -> None:
    """Never anything but LayerwiseError, or the same plan."""
    data = plan.dumps().encode()
    for at, length, new in cuts:
        at %= len(data) + 1
        data = data[:at] + new + data[at + length :]
    (tmp_path / "p.json").write_bytes(data)
    try:
        assert load_plan(tmp_path / "p.json") == plan
    except LayerwiseError:
        return


values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("nchwk") | st.text(), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.sampled_from(sorted(f for f in Plan.__dataclass_fields__)), values)
@SAME_FILE
def test_corrupt_values(plan: Plan, graph: LayerGraph, tmp_path: Path, key: str, value: Any) -> None:
    path = written(tmp_path / "p.json", json.loads(plan.dumps()) | {key: value})
    try:
        load_plan(path).check(graph, 8)
    except LayerwiseError:
        return


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"null", b"{", b"\xff", b'{"a": NaN}', b"[" * 10**5, b'{"a": 1, "a": 2}', b"1" * 5000]
)
def test_not_plans(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "p.json").write_bytes(data)
    with pytest.raises(LayerwiseError, match="plan"):
        load_plan(tmp_path / "p.json")


class TestStrategies:
    def test_json_output_costs_the_same(self, model: CostModel) -> None:
        found = search(model, SearchSpace(8, (*"nchwk",), spread=True)).additive
        body = json.loads(json.dumps(report_json.strategy_json(found)))
        again = parse_strategy(body, model.graph, 8)
        assert candidate(model, "", again).price.step_time_s == found.price.step_time_s

    def test_a_plan_is_a_strategy(self, model: CostModel, plan: Plan) -> None:
        again = parse_strategy(json.loads(plan.dumps()), model.graph, 8)
        assert again == plan.strategy

    def test_placements(self, model: CostModel) -> None:
        flat: dict[str, Any] = {layer.name: {"n": 2} for layer in model.graph.inner} | {"classifier.0": {"c": 2}}
        strided = {name: {**degrees, "placement": "strided"} for name, degrees in flat.items()}
        beside = {"strategy": flat, "placements": dict.fromkeys(flat, "strided")}
        assert parse_strategy(strided, model.graph, 8) == parse_strategy(beside, model.graph, 8)
        costs = [price(model, parse_strategy(s, model.graph, 8)).step_time_s for s in (flat, strided)]
        assert costs[0] != costs[1]  # within a node, and between two

    def test_missing_and_misplaced(self, graph: LayerGraph) -> None:
        sound = {layer.name: {"n": 1} for layer in graph.inner}
        with pytest.raises(LayerwiseError, match=r"no configuration for layer 'features.0' \(\d+ missing"):
            parse_strategy({}, graph, 8)
        with pytest.raises(LayerwiseError, match=r"'features.00', which the model does not have \(did you mean"):
            parse_strategy(sound | {"features.00": {"n": 2}}, graph, 8)
        with pytest.raises(LayerwiseError, match="names layer 'nowhere'"):
            parse_strategy({"strategy": sound, "placements": {"nowhere": "strided"}}, graph, 8)
        with pytest.raises(LayerwiseError, match="must be a JSON object, not list"):
            parse_strategy([], graph, 8)

    @given(values)
    def test_anything(self, graph: LayerGraph, value: Any) -> None:
        with pytest.raises(LayerwiseError):
            parse_strategy({"features.0": value}, graph, 8)


class TestFiles:
    def test_whole_or_not_at_all(self, tmp_path: Path) -> None:
        def parts() -> Any:
            yield "half"
            raise KeyboardInterrupt

        (tmp_path / "f").write_text("before")
        with pytest.raises(KeyboardInterrupt):
            write_text(tmp_path / "f", parts())
        assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("f", "before")]

    def test_follows_links(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to(tmp_path / "file")
        check_writable(tmp_path / "link")
        assert not (tmp_path / "file").exists()
        write_text(tmp_path / "link", "text")
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "file").read_text() == "text"

    def test_what_is_no_file_is_not_replaced(self, tmp_path: Path) -> None:
        (tmp_path / "full").symlink_to("/dev/full")
        check_writable(tmp_path / "full")
        with pytest.raises(LayerwiseError, match="No space"):
            write_text(tmp_path / "full", "text")
        assert Path("/dev/full").is_char_device()

    @pytest.mark.parametrize("path", ["", ".", "/", "missing/file", "/proc/file", "x" * 300, "a\0b"])
    def test_impossible(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str) -> None:
        monkeypatch.chdir(tmp_path)
        for write in (check_writable, lambda p: write_text(p, "text")):
            with pytest.raises(LayerwiseError, match="cannot be written"):
                write(path)
        assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([0, 0], "weights of 0 leave every device without a box"),
        ([1, 0], "has 2 boxes, and its weights give 1 devices one"),
        ([1], "weights are 2 whole numbers from 0 to 10,000, one a device"),
        ([1, 2.5], "weights are 2 whole numbers"),
    ],
)
def test_unsound_weights_are_refused(weights: object, said: str) -> None:
    with pytest.raises(LayerwiseError, match=said):
        parse({"n": 2, "weights": weights}, [Dim("n", 8)], 2, "fc1")


def test_a_plan_of_unequal_devices_comes_back_as_it_was() -> None:
    strategy = {"fc1": Config.of({"n": 2}).weighted((3, 0, 1)), "fc2": Config.of({"c": 3})}
    plan = Plan("lenet5", "", 64, 3, 3, "sample", True, strategy, shares=(3, 1, 1))
    assert parse_plan(plan.dumps(), "it") == plan
    assert '"version": 3' in plan.dumps()
