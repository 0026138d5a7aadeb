"""layerwise doctor: here nothing is broken; what is, it names, within the time it was given."""

import json
import time
from pathlib import Path

import pytest
import torch

from layerwise.__main__ import dispatch
from layerwise.cli import run_main


def test_nothing_is_broken_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_main(dispatch, ["doctor", "--json", "--timeout", "90"])
    said = json.loads(capsys.readouterr().out)
    assert said["2 ranks"] == "compute as one device"
    assert said["torch"].startswith(torch.__version__)
    assert "gloo" in said["backends"]
    assert code == any(value.startswith("BROKEN") for value in said.values())


def test_what_is_broken_is_named_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("LAYERWISE_CACHE", str(tmp_path / "file"))
    began = time.monotonic()
    assert run_main(dispatch, ["doctor", "--timeout", "0.2"]) == 1
    assert time.monotonic() - began < 20
    out = " ".join(capsys.readouterr().out.split())
    assert "not done after 0.2 s" in out
    assert "Broken: cache, 2 ranks." in out or "Broken: host name, cache, 2 ranks." in out
