"""A user's mistake is one line on stderr and exit code 2, whatever was typed or handed in."""

from __future__ import annotations

import json
import os
from pathlib import Path

import onnx
import pytest

from layerwise.errors import LayerwiseError
from tests.cli.commands import MLP, Run, onnx_file

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


def test_what_is_too_long_has_spaces(refuse: Run) -> None:
    error = refuse("search", "a " * 50_000, "--gpus", "2")
    assert len(error) < 800
    assert "; nearest: " in error


def test_empty_names(refuse: Run) -> None:
    assert "cannot be written" in refuse(*MLP, "--out", "")
    assert "cannot be read" in refuse(*MLP, "--price", "")
    assert "unknown model" in refuse("search", "", "--gpus", "4")
    assert "unknown profile" in refuse(*MLP, "--profile", "")
    assert "unknown model 'a\\n\\nb'" in refuse("search", "a\n\nb", "--gpus", "4")


def test_unknown_command(refuse: Run) -> None:
    assert "unknown command 'serach' (did you mean 'search'?); there are search, fits, explain, report, diff" in refuse(
        "serach"
    )


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
    ('{"0": {"n": 4}, "2": {"n": 4}, "1": {}}', "names layer '1'"),
    ('{"0": {"n": 4}, "2": {"c": 9}}', "c=9 is more than the 8"),
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
