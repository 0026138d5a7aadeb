"""A user's mistake is one line on stderr and exit code 2, whatever was typed or handed in."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import onnx
import pytest

from layerwise.errors import LayerwiseError
from tests.cli.commands import MLP, NETWORKS, Run, onnx_file

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
    ("lenet5 --gpus 4 --search-memory inf", "'inf' is not a number above 0"),
    ("lenet5 --gpus 4 --search-memory -1", "'-1' is not a number above 0"),
    ("lenet5 --gpus 4 --input-shape 3xx", "'3xx' is not sizes joined by x"),
    ("lenet5 --gpus 4 --input-shape 1x32x32", "has its own input shape"),
    ("lenet5 --gpus 4 --profile h10", "did you mean h100?"),
    ("lenet5 --gpus 4 --profile missing.json", "missing.json: cannot be read: No such file"),
    ("lenet5 --gpus 4 --profile p100 --dtype bfloat16", "no peak for dtype 'bf16'"),
    ("lenet5 --gpus 4 --out missing/plan.json", "cannot be written: No such file"),
    ("lenet5 --gpus 4 --out .", "cannot be written: Is a directory"),
    ("lenet5 --gpus 4 --out /proc/plan.json", "cannot be written"),
    ("lenet5 --gpus 4 --export-costs missing/costs.cfn", "cannot be written: No such file"),
    ("lenet5 --gpus 4 --price missing.json", "cannot be read: No such file"),
    ("lenet5 --gpus 4 --price s.json --export-costs c.cfn", "--price does not search"),
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
