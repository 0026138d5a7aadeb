"""layerwise doctor: here nothing is broken; what is, it names, within the time it was given."""

import json
import time

import pytest

from layerwise.__main__ import dispatch
from layerwise.cli import run_main


def test_nothing_is_broken_here(capsys: pytest.CaptureFixture[str]) -> None:
    code = run_main(dispatch, ["doctor", "--json", "--timeout", "90"])
    said = json.loads(capsys.readouterr().out)
    assert said["2 ranks"] == "compute as one device"
    assert said["devices"].endswith("gloo")
    assert code == any(value.startswith("BROKEN") for value in said.values())


def test_what_is_broken_is_named_in_time(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr("layerwise.commands.doctor.LITTLE", float("inf"))  # as in a container with too little
    began = time.monotonic()
    assert run_main(dispatch, ["doctor", "--timeout", "0.2"]) == 1
    assert time.monotonic() - began < 20
    out = " ".join(capsys.readouterr().out.split())
    assert "not done after 0.2 s" in out
    assert "start the container with --shm-size=8g" in out
    assert "Broken: shared memory, 2 ranks." in out or "Broken: host name, shared memory, 2 ranks." in out
