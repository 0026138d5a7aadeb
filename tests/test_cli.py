"""The command lines, as a user and as a program see them. In-process: only what needs a process has one."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from math import prod
from pathlib import Path
from typing import Any

import onnx
import pytest
from onnx import TensorProto, helper
from rich.cells import cell_len

from layerwise.__main__ import COMMANDS, dispatch
from layerwise.cli import PIPED_WIDTH, run_main
from layerwise.errors import LayerwiseError
from layerwise.plan import checksum
from layerwise.search.report.text import broken, units

LENET, MLP = ("search", "lenet5", "--gpus", "4"), ("search", "mlp:64x32x8", "--gpus", "4")
Run = Callable[..., str]

NETWORKS = """
import torch
from torch import nn
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 4)
    def forward(self, x):
        return self.second(torch.relu(self.first(x)))
def alone(): return Net()
def chatty():
    print("building")
    return Net(), torch.randn(2, 8)
def listed(): return Net(), [torch.randn(2, 8)]
def number(): return 3
def wrong_inputs(): return Net(), torch.randn(2, 9)
def faulty(): raise RuntimeError("out of\\nluck")
def leaves(): raise SystemExit(3)
def needy(x): return Net()
ready = Net()
"""


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Every test in a directory of its own, on a terminal of no particular width."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    for name in ("networks", "broken_code", "quits"):
        sys.modules.pop(name, None)


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a command that must succeed; returns its stdout."""

    def go(*argv: str) -> str:
        assert run_main(dispatch, argv) == 0, capsys.readouterr().err
        return capsys.readouterr().out

    return go


@pytest.fixture
def refuse(capsys: pytest.CaptureFixture[str], here: Path) -> Run:
    """Runs a command that must be refused; returns its one line of stderr."""

    def go(*argv: str) -> str:
        before = {path: path.read_bytes() for path in here.iterdir() if path.is_file()}
        assert run_main(dispatch, argv) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert err.startswith("layerwise: error: ")
        assert err.endswith("\n")
        assert err.count("\n") == 1
        assert "Traceback" not in err
        assert {path: path.read_bytes() for path in here.iterdir() if path.is_file()} == before
        return err

    return go


# ------------------------------------------------------------------------------------------------- bad input

LONG = "a" * 50_000
ENDLESS = [
    f"search {LONG} --gpus 2",
    f"search {LONG}.onnx --gpus 2",
    f"search lenet5 --gpus {LONG}",
    f"search lenet5 --gpus 2 --dims {LONG}",
    f"search lenet5 --gpus 2 --profile {LONG}",
    f"search lenet5 --gpus 2 --{LONG}",
    f"search lenet5 --gpus 2 --out {LONG}",
    f"export {LONG} out.safetensors",
    f"explain key.json {LONG}",
    f"{LONG}",
]


@pytest.mark.parametrize("line", ENDLESS, ids=[line[:40] for line in ENDLESS])
def test_an_error_does_not_repeat_what_is_too_long(line: str, refuse: Run, here: Path) -> None:
    (here / "key.json").write_text(json.dumps({"format": "layerwise-plan " + LONG}))
    error = refuse(*line.split())
    assert len(error) < 800
    assert "characters)…a" in error
    assert "a" * 201 not in error


def test_a_sentence_between_two_quotations_is_not_cut() -> None:
    own = " is what PyTorch's loop is told, at some length" * 6
    for text in (f"parameter 'fc.bias'{own}, strategy='data'", f'layer "fc"{own}, the layers\' "data" and \'fc\''):
        assert str(LayerwiseError(text)) == text
    assert len(str(LayerwiseError(f"model ('{'a b ' * 100}'){own}: take 'fc'"))) < len(own) + 320


def test_a_path_of_255_characters_is_readable(refuse: Run) -> None:
    path = "/" + "/".join("folder" for _ in range(35)) + "/plan.json"
    assert len(path) == 255
    assert repr(path) in refuse("explain", path, "fc")


def test_a_long_sentence_with_apostrophes_is_not_cut() -> None:
    sentence = "the plan's " + "words that nobody has given, " * 20 + "the model's"
    assert str(LayerwiseError(sentence)) == sentence


def test_what_is_too_long_has_spaces(refuse: Run) -> None:
    error = refuse("search", "a " * 50_000, "--gpus", "2")
    assert len(error) < 800
    assert "; nearest: " in error


BAD = [
    ("vgg61 --gpus 4", "unknown model 'vgg61'; nearest: vgg16"),
    ("mlp:0x3 --gpus 4", "mlp:1024x2048x10"),
    ("vgg16:3 --gpus 4", "importing 'vgg16' raised ModuleNotFoundError"),
    ("lenet5", "required: --gpus"),
    ("--gpus 4", "required: MODEL"),
    ("lenet5 --gpus four", "invalid int value: 'four'"),
    ("lenet5 --gpus 0", "must be 1 to 65,536, not 0"),
    ("lenet5 --gpus -1", "must be 1 to 65,536, not -1"),
    ("lenet5 --gpus 65537", "must be 1 to 65,536, not 65,537"),
    ("lenet5 --gpus 6 --gpus-per-node 4", "6 GPUs do not fill nodes of 4"),
    ("lenet5 --gpus 6 --profile p100", "6 GPUs do not fill nodes of 4"),
    ("lenet5 --gpus 4 --gpus-per-node 0", "at least 1"),
    ("lenet5 --gpus 4 --batch 0", "global batch is 0"),
    ("lenet5 --gpus 4 --batch -2", "global batch is -8"),
    ("lenet5 --gpus 4 --global-batch 0", "global batch is 0"),
    (f"lenet5 --gpus 4 --global-batch {10**30}", "at most 1,073,741,824"),
    ("lenet5 --gpus 4 --batch 2 --global-batch 8", "not allowed with"),
    ("lenet5 --gpus 4 --bogus", "unrecognized arguments: --bogus"),
    ("lenet5 --gpus 4 --dims n,q", "--dims 'n,q'"),
    ("lenet5 --gpus 4 --dims ,", "--dims ','"),
    ("lenet5 --gpus 4 --degrees odd", "invalid choice: 'odd'"),
    ("lenet5 --gpus 4 --search-memory 0", "'0' is not a number above 0"),
    ("lenet5 --gpus 4 --search-memory nan", "'nan' is not a number above 0"),
    ("lenet5 --gpus 4 --depth-first inf", "'inf' is not a number above 0"),
    ("lenet5 --gpus 4 --depth-first -1", "'-1' is not a number above 0"),
    ("lenet5 --gpus 4 --input-shape 3xx", "'3xx' is not sizes joined by x"),
    ("lenet5 --gpus 4 --input-shape 1x32x32", "has its own input shape"),
    ("lenet5 --gpus 4 --profile h10", "did you mean h100?"),
    ("lenet5 --gpus 4 --profile missing.json", "missing.json: cannot be read: No such file"),
    ("lenet5 --gpus 4 --profile p100 --dtype bfloat16", "no peak for dtype 'bfloat16'"),
    ("lenet5 --gpus 4 --out missing/plan.json", "cannot be written: No such file"),
    ("lenet5 --gpus 4 --out .", "cannot be written: Is a directory"),
    ("lenet5 --gpus 4 --out /proc/plan.json", "cannot be written"),
    ("lenet5 --gpus 4 --export-costs missing/costs.cfn", "cannot be written: No such file"),
    ("lenet5 --gpus 4 --price missing.json", "cannot be read: No such file"),
    ("lenet5 --gpus 4 --price s.json --out p.json", "--price does not search"),
    ("lenet5 --gpus 4 --out p.json --timeline p.json", "name the same file"),
    ("missing.onnx --gpus 4", "missing.onnx"),
    ("missing.pt2 --gpus 4", "missing.pt2"),
    ("no.such.module:net --gpus 4", "importing 'no.such.module' raised ModuleNotFoundError"),
    (":net --gpus 4", "importing '' raised ValueError"),
    (".net:net --gpus 4", "importing '.net' raised TypeError"),
    ("broken_code:net --gpus 4", "raised SyntaxError"),
    ("quits:net --gpus 4", "raised SystemExit: 5"),
    ("networks:missing --gpus 4", "module 'networks' has no 'missing'"),
    ("networks:alone --gpus 4", "returned no example inputs"),
    ("networks:number --gpus 4", "returned int, not an nn.Module"),
    ("networks:faulty --gpus 4", "raised RuntimeError: out of luck (" + "{here}/networks.py:17)"),
    ("networks:leaves --gpus 4", "raised SystemExit: 3"),
    ("networks:needy --gpus 4", "raised TypeError: needy() missing 1 required"),
    ("networks:wrong_inputs --gpus 4", "torch.export fails"),
    ("networks:listed --gpus 4 --input-shape 8", "leave out --input-shape"),
]


@pytest.mark.parametrize(("line", "reason"), BAD, ids=[line for line, _ in BAD])
def test_bad_input(refuse: Run, here: Path, line: str, reason: str) -> None:
    (here / "networks.py").write_text(NETWORKS)
    (here / "broken_code.py").write_text("def net(:")
    (here / "quits.py").write_text("raise SystemExit(5)")
    assert reason.replace("{here}", str(here)) in refuse("search", *line.split())


def test_empty_names(refuse: Run) -> None:
    assert "cannot be written" in refuse(*MLP, "--out", "")
    assert "cannot be read" in refuse(*MLP, "--price", "")
    assert "unknown model" in refuse("search", "", "--gpus", "4")
    assert "unknown profile" in refuse(*MLP, "--profile", "")
    assert "unknown model 'a\\n\\nb'" in refuse("search", "a\n\nb", "--gpus", "4")


def test_unknown_command(refuse: Run) -> None:
    assert "unknown command 'serach'; there are search, explain, diff" in refuse("serach")


def number_at(document: Any, *path: Any) -> dict[str, Any]:
    for key in path:
        document = document[key]
    assert isinstance(document, dict)
    return document


@pytest.mark.parametrize("value", ["NaN", "Infinity", "-1", "0", "null", '"fast"', "1e999", "true"])
@pytest.mark.parametrize("path", [("levels", 1, "bandwidth_bytes_per_s"), ("device", "peak_flops", "float32")])
def test_bad_number_in_a_profile(refuse: Run, here: Path, value: str, path: tuple[Any, ...]) -> None:
    from importlib import resources

    document = json.loads((resources.files("layerwise.profiles") / "p100.json").read_text())
    number_at(document, *path)["value"] = "HERE"
    (here / "mine.json").write_text(json.dumps(document).replace('"HERE"', value))
    error = refuse(*MLP, "--profile", "mine.json")
    if value in ("NaN", "Infinity", "1e999"):
        assert f"profile mine.json is not JSON: {value} is" in error
    else:
        assert "profile mine.json: " in error
        assert str(path[-1]) in error
    del number_at(document, *path)["value"]
    (here / "mine.json").write_text(json.dumps(document))
    assert "missing" in refuse(*MLP, "--profile", "mine.json")


@pytest.mark.parametrize("suffix", [".onnx", ".pt2", ".pt"])
@pytest.mark.parametrize("data", [b"", b"not a model", b"PK\x03\x04 broken", b"\x80\x04."])
def test_corrupt_model(refuse: Run, here: Path, suffix: str, data: bytes) -> None:
    (here / f"net{suffix}").write_bytes(data)
    assert f"net{suffix}" in refuse("search", f"net{suffix}", "--gpus", "4")
    (here / f"dir{suffix}").mkdir()
    assert f"dir{suffix}" in refuse("search", f"dir{suffix}", "--gpus", "4")


def onnx_file(path: Path, op: str, shape: list[Any], opset: int = 17, domain: str = "") -> None:
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in "xy")
    graph = helper.make_graph([helper.make_node(op, ["x"], ["y"], "it", domain=domain)], "g", [x], [y])
    opsets = [helper.make_opsetid("", opset), *([helper.make_opsetid(domain, 1)] if domain else [])]
    path.write_bytes(helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString())


def test_unsupported_onnx(refuse: Run, run: Run, here: Path) -> None:
    onnx_file(here / "good.onnx", "Relu", ["batch", 8])
    assert json.loads(run("search", "good.onnx", "--gpus", "2", "--json"))["strategy"]
    onnx_file(here / "odd.onnx", "Wobble", ["batch", 8], domain="acme")
    assert "Wobble" in refuse("search", "odd.onnx", "--gpus", "4")
    onnx_file(here / "new.onnx", "Relu", ["batch", 8], opset=onnx.defs.onnx_opset_version() + 50)
    assert "opset" in refuse("search", "new.onnx", "--gpus", "4")
    onnx_file(here / "open.onnx", "Relu", ["batch", "width"])
    assert "width" in refuse("search", "open.onnx", "--gpus", "4")


def test_an_onnx_model_of_one_identity_has_nothing_to_plan(refuse: Run, here: Path) -> None:
    onnx_file(here / "same.onnx", "Identity", ["batch", 8])
    assert "computes nothing from its inputs" in refuse("search", "same.onnx", "--gpus", "2")
    onnx_file(here / "turned.onnx", "Transpose", ["batch", 8, 8])
    for more in ([], ["--json"]):
        assert "nothing to plan" in refuse("search", "turned.onnx", "--gpus", "2", *more)


STRATEGIES = [
    ("{", "is not JSON"),
    ("[]", "must be a JSON object"),
    ("{}", "no configuration for layer '0'"),
    ('{"0": {"n": 4}, "2": {"n": 4}, "1": {}}', "names layer '1'"),
    ('{"0": {"n": 8}, "2": {"n": 4}}', "needs 8 devices, there are 4"),
    ('{"0": {"n": 4}, "2": {"c": 9}}', "c=9 is more than the 8"),
    ('{"0": {"n": 4}, "2": {"c": 1e1}}', "a degree >= 1"),
    ('{"0": {"n": 4}, "2": {"c": NaN}}', "NaN"),
    ('{"0": {"n": 4}, "2": {"n": 1, "n": 4}}', "'n' appears twice"),
]


@pytest.mark.parametrize(("text", "reason"), STRATEGIES)
def test_bad_strategy(refuse: Run, here: Path, text: str, reason: str) -> None:
    (here / "s.json").write_text(text)
    assert reason in refuse(*MLP, "--price", "s.json")


def test_failed_write_leaves_nothing(refuse: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    (here / "p.json").write_text("before")
    monkeypatch.setattr(Path, "replace", full)
    assert "No space" in refuse(*MLP, "--out", "p.json")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_read_only_directory(refuse: Run, here: Path) -> None:
    (here / "locked").mkdir(mode=0o500)
    assert "Permission denied" in refuse(*MLP, "--out", "locked/p.json")


# ---------------------------------------------------------------------------------------------------- help


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize("columns", [80, 120])
def test_help(command: str, columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    with pytest.raises(SystemExit, match="0"):
        run_main(dispatch, (command, "--help"))
    out, err = capsys.readouterr()
    assert out.startswith(f"usage: layerwise {command}")
    assert err == ""
    assert max(map(cell_len, out.splitlines())) <= columns


def test_overview(run: Run) -> None:
    for argv in ((), ("-h",), ("--help",)):
        assert all(command in run(*argv) for command in COMMANDS)
    assert run("--version").startswith("layerwise 0.")


# ---------------------------------------------------------------------------------------------------- json

NUMBERS = ("step_time_s", "timeline_s", "bytes_moved")


def finite(value: Any) -> None:
    if isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            finite(inner)
    elif isinstance(value, float):
        assert math.isfinite(value)


@pytest.mark.parametrize(
    "flags",
    [
        "",
        "--gpus 1",
        "--gpus 8 --profile p100 --global-batch 3",
        "--profile pcie --dims n,c,k",
        "--gpus 12 --gpus-per-node 6 --degrees powers-of-two",
        "--no-fuse --dtype bfloat16 --optimizer adam",
        "--link-model sum --sync parameter-server --io free --objective additive",
        "--profile cpu --gpus 2 --local-batch-norm",
    ],
)
def test_json(run: Run, flags: str) -> None:
    found = json.loads(run("search", "lenet5", "--gpus", "4", *flags.split(), "--json"))
    finite(found)
    gpus = found["gpus"]
    assert found["model"] == "lenet5"
    for costs in (found, *(found["baselines"][name] for name in ("data", "model", "owt"))):
        assert all(isinstance(costs[key], int | float) and costs[key] >= 0 for key in NUMBERS)
        assert costs["step_time_s"] >= found["additive_optimum"]["step_time_s"] * (1 - 1e-9)
        assert costs["timeline_s"] > 0
    assert 0 < found["memory_bytes"] < 1e12
    assert isinstance(found["batch"], int)
    layers = found["strategy"]
    assert next(iter(layers)) == "features.0"
    assert set(layers) == set(found["additive_optimum"]["strategy"])
    for degrees in layers.values():
        assert all(isinstance(d, int) and d >= 1 for d in degrees.values())
        assert prod(degrees.values()) <= gpus
    if "additive" not in flags:
        assert found["timeline_s"] <= found["baselines"]["data"]["timeline_s"]
    assert found["optimal"] is True
    assert found["lower_bound_s"] == pytest.approx(found["additive_optimum"]["step_time_s"])
    assert isinstance(found["final_nodes"], int)
    assert set(found["seconds"]) == {"import", "tables", "search"}
    assert all(isinstance(n, int) and n > 0 for n in found["configurations"].values())
    if "powers" in flags:  # 3 is no power of two, and no baseline's degree; 12 is one
        assert all(3 not in degrees.values() for degrees in found["additive_optimum"]["strategy"].values())
    assert found["io"] == ("free" if "free" in flags or found["batch"] < gpus else "sample")


def test_dims_restrict(run: Run) -> None:
    found = json.loads(run(*LENET, "--global-batch", "2", "--dims", "h,w", "--json"))
    baselines = {"n", "c"}  # baselines are always in the space
    used = {d for s in found["strategy"].values() for d, degree in s.items() if degree > 1}
    assert used <= {"h", "w"} | baselines
    wide = json.loads(run(*LENET, "--global-batch", "2", "--json"))
    assert wide["additive_optimum"]["step_time_s"] <= found["additive_optimum"]["step_time_s"]
    assert wide["configurations"]["total"] > found["configurations"]["total"]


def test_no_fuse_has_more_layers(run: Run) -> None:
    fused, plain = (json.loads(run(*LENET, *flag, "--json"))["strategy"] for flag in ((), ("--no-fuse",)))
    assert set(fused) < set(plain)


def test_additive_objective(run: Run) -> None:
    found = json.loads(run(*LENET, "--profile", "pcie", "--objective", "additive", "--json"))
    assert found["step_time_s"] == found["additive_optimum"]["step_time_s"]
    assert found["strategy"] == found["additive_optimum"]["strategy"]


# -------------------------------------------------------------------------------------- the other commands


def test_price_round_trip(run: Run, here: Path) -> None:
    flags = (*LENET, "--profile", "p100", "--gpus", "8", "--global-batch", "4")
    text = run(*flags, "--json", "--out", "plan.json")
    (here / "s.json").write_text(text)
    found = json.loads(text)
    for file in ("s.json", "plan.json"):
        priced = json.loads(run(*flags, "--price", file, "--json"))
        finite(priced)
        assert {key: priced[key] for key in NUMBERS} == {key: found[key] for key in NUMBERS}
        assert priced["strategy"] == found["strategy"]
    table = run(*flags, "--price", "s.json")
    assert "\nyours " in table
    (here / "data").write_text(text)  # named as a baseline
    assert "\nyours " in run(*flags, "--price", "data")


def test_plan_explain_diff(run: Run, refuse: Run, here: Path) -> None:
    text = run(*LENET, "--global-batch", "2", "--profile", "p100", "--out", "a.json")
    assert text.rstrip().endswith("plan written to a.json")
    run(*LENET, "--global-batch", "2", "--profile", "p100", "--dims", "n", "--out", "b.json")
    assert sorted(path.name for path in here.iterdir()) == ["a.json", "b.json"]
    plan = json.loads((here / "a.json").read_text())

    found = json.loads(run("explain", "a.json", "features.0", "--json"))
    rows = found["alternatives"]
    finite(found)
    assert [row["in_plan"] for row in rows].count(True) == 1
    assert [row["step_time_s"] for row in rows] == sorted(row["step_time_s"] for row in rows)
    assert rows[0]["step_time_s"] == pytest.approx(plan["predicted"]["lower_bound_s"])
    assert next(row["config"] for row in rows if row["in_plan"]) == plan["strategy"]["features.0"]
    shown = run("explain", "a.json", "features.0", "--all")
    assert "in the plan" in shown
    assert shown.count("\n") >= len(rows)

    changed = json.loads(run("diff", "a.json", "b.json", "--json"))
    finite(changed)
    other = json.loads((here / "b.json").read_text())
    assert set(changed["layers"]) == {n for n, c in plan["strategy"].items() if c != other["strategy"][n]}
    assert changed["settings"] == {}
    assert changed["predicted"]["timeline_s"] == [p["predicted"]["timeline_s"] for p in (plan, other)]
    assert f"{len(changed['layers'])} of {len(plan['strategy'])} layers differ" in run("diff", "a.json", "b.json")
    assert "0 of" in run("diff", "a.json", "a.json")

    run(*MLP, "--out", "c.json")
    assert "no layer in common" in refuse("diff", "a.json", "c.json")
    assert "no layer 'feature.0' (did you mean 'features.0'?)" in refuse("explain", "a.json", "feature.0")
    assert "cannot be read" in refuse("explain", "d.json", "features.0")
    assert "required: LAYER" in refuse("explain", "a.json")
    assert "does not fit into" in refuse("explain", "a.json", "features.0", "--search-memory", "1e-9")
    (here / "a.json").write_text((here / "a.json").read_text().replace('"batch": 2', '"batch": 4'))
    assert "was altered" in refuse("explain", "a.json", "features.0")


def test_callables(run: Run, refuse: Run, here: Path) -> None:
    (here / "networks.py").write_text(NETWORKS)
    counts = []
    for name, *flags in (["chatty"], ["listed"], ["alone", "--input-shape", "8"], ["ready", "--input-shape", "8"]):
        found = json.loads(run("search", f"networks:{name}", "--gpus", "2", *flags, "--json"))  # nothing printed beside
        counts.append(len(found["strategy"]))
    assert counts == [2] * 4
    text = run("search", "networks:alone", "--gpus", "2", "--input-shape", "8", "--out", "p.json")
    assert "--model networks:alone" in text
    explain = ("explain", "p.json", "first", "--model", "networks:alone")
    assert json.loads(run(*explain, "--json"))["alternatives"]
    (here / "networks.py").write_text(NETWORKS.replace("8, 16", "8, 24").replace("16, 4", "24, 4") + "# longer")
    sys.modules.pop("networks")
    assert "another model" in refuse(*explain)


def test_a_plan_runs_no_code_that_the_user_does_not_name(run: Run, refuse: Run, here: Path) -> None:
    (here / "networks.py").write_text(NETWORKS)
    run("search", "networks:alone", "--gpus", "1", "--input-shape", "8", "--out", "p.json")
    run("run", "p.json", "--model", "networks:alone", "--data", "synthetic", "--steps", "1")
    sys.modules.pop("networks")
    (here / "networks.py").write_text("open('ran', 'w')")
    for command in (
        ["explain", "p.json", "first"],
        ["run", "p.json", "--steps", "1"],
        ["run", "p.json", "--data", "synthetic"],
    ):
        said = refuse(*command)
        assert "the plan is for 'networks:alone', which is code, and a plan runs none" in said
        assert "give --model networks:alone" in said
    run("diff", "p.json", "p.json")
    assert not (here / "ran").exists()


PROVENANCE = [
    ("profile", 5, "'profile' cannot be '5'"),
    ("dims", "n", "'dims' cannot be 'n'"),
    ("dims", [["n"]], "'dims' cannot be"),
    ("dims", ["q"], "'dims' cannot be"),
    ("input_shape", ["8"], "'input_shape' cannot be"),
    ("input_shape", [0], "'input_shape' cannot be '[0]'"),
    ("input_shape", 8, "'input_shape' cannot be '8'"),
    ("powers_of_two", "no", "'powers_of_two' cannot be 'no'"),
    ("cost_options", [], "'cost_options' cannot be '[]'"),
    ("cost_options", {"optimizer": ["sgd"]}, "'cost_options' cannot be"),
    ("cost_options", {"optimizer": "magic"}, "has the optimizer 'magic'; there are sgd"),
    ("cost_options", {"dtype": "float3"}, "has the dtype 'float3'"),
    ("cost_options", {"link_model": "x"}, "has the link_model 'x'"),
    ("cost_options", {"sync": "x"}, "has the sync 'x'"),
    ("cost_options", {"speed": "x"}, "does not say how it was found"),
]


@pytest.mark.parametrize(("key", "value", "reason"), PROVENANCE)
def test_a_plan_whose_provenance_is_unsound(
    run: Run, refuse: Run, here: Path, key: str, value: Any, reason: str
) -> None:
    run(*MLP, "--out", "p.json")
    body = json.loads((here / "p.json").read_text())
    del body["checksum"]
    body["provenance"][key] = value
    (here / "p.json").write_text(json.dumps(body | {"checksum": checksum(body)}))
    assert reason in refuse("explain", "p.json", "0")


def test_export_and_depth_first(run: Run, here: Path) -> None:
    text = run(*MLP, "--export-costs", "m.cfn", "--depth-first", "60")
    assert "depth-first search finished after" in text
    assert "cost tables written to m.cfn" in text
    problem = json.loads((here / "m.cfn").read_text())
    assert set(problem) == {"problem", "variables", "functions"}
    found = json.loads(run(*MLP, "--depth-first", "60", "--json"))
    assert found["depth_first"]["finished"]
    assert found["depth_first"]["cost_s"] == pytest.approx(found["additive_optimum"]["step_time_s"])


# --------------------------------------------------------------------------------------------------- tables


@pytest.mark.parametrize("columns", [80, 100, 140, None])
@pytest.mark.parametrize("flags", ["", "--layers", "--global-batch 2 --dims n,c,h,w,k"])
def test_tables_fit(run: Run, columns: int | None, flags: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if columns:
        monkeypatch.setenv("COLUMNS", str(columns))
    lines = run(*LENET, "--profile", "pcie", "--gpus", "16", *flags.split()).splitlines()
    assert max(map(cell_len, lines)) <= (columns or PIPED_WIDTH)
    heads = [i for i, line in enumerate(lines) if line.startswith(("layers", "strategy"))]
    assert len(heads) == 2
    assert [lines[heads[1] + 1 + i].split()[0] for i in range(3)][-2:] in (["data", "model"], ["model", "owt"])
    text = "\n".join(lines)
    for whole in ("configuration", "devices", "t_X in", "samples/s", "features.0", "optimal: proven."):
        assert whole in text
    assert ("conv+tanh" in text) or columns in (80, 100)  # what layers are made of is left out first
    assert columns != 80 or "conv+tanh" not in text
    for line in lines[heads[0] + 1 : heads[1] - 1]:  # no configuration is cut in two
        assert line.count("{") == line.count("}")


def test_names_are_not_markup(run: Run, here: Path) -> None:
    (here / "[bold]").mkdir()
    onnx_file(here / "[bold]" / "[red].onnx", "Relu", ["batch", 8])
    run("search", "[bold]/[red].onnx", "--gpus", "2", "--out", "[x].json")
    assert run("search", "[bold]/[red].onnx", "--gpus", "2").startswith("[bold]/[red].onnx on 2 × ")
    assert "[x].json" in run("diff", "[x].json", "[x].json")


def test_broken() -> None:
    assert broken("Mixed_7c.branch3x3dbl_3a.conv") == "Mixed_7c.\nbranch3x3dbl_3a.\nconv"
    assert broken("features.0") == "features.0"
    assert broken("") == ""
    assert broken("x" * 40) == "x" * 40


def test_units() -> None:
    seconds = (0, 1.5e-9, 2.2e-2, 0.9996e-3, 1, 999.6e-6, 1234)
    assert [units(x, "s") for x in seconds] == ["0 s", "0.0015 µs", "22.0 ms", "1.00 ms", "1.00 s", "1.00 ms", "1234 s"]
    assert [units(x, "B") for x in (1, 16000, 999_600, 1.5e15)] == ["1.00 B", "16.0 kB", "1.00 MB", "1500 TB"]


# ------------------------------------------------------------------------------------------------ processes


def test_broken_pipe() -> None:
    for code in ("sys.stdout.write('x' * 10**6)", "print('x')", "console().print('x\\n' * 10**5)"):
        script = f"import sys, os\nfrom layerwise.cli import console, run_main\ndef main(argv):\n    {code}\n"
        script += "sys.exit(run_main(main))"
        read, write = os.pipe()
        os.close(read)
        done = subprocess.run([sys.executable, "-c", script], stdout=write, stderr=subprocess.PIPE, timeout=60)
        os.close(write)
        assert (done.returncode, done.stderr) == (0, b""), code


def test_ascii_terminal_and_exit_code() -> None:
    script = "from layerwise.cli import run_main\nimport sys\nsys.exit(run_main(lambda _: print('×') or 3))"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, env=environment, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (3, b"\\xd7\n", b"")


def test_interrupt(capsys: pytest.CaptureFixture[str]) -> None:
    def main(_: object) -> int:
        raise KeyboardInterrupt

    assert run_main(main) == 130
    assert capsys.readouterr().err == "layerwise: interrupted\n"
