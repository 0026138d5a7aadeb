"""`layerwise measure layers` on a tiny network: the profile it writes, the plan that rests on it, and bad input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerwise.__main__ import dispatch
from layerwise.cli import run_main, seconds
from layerwise.machine import load, save
from layerwise.plan import load_plan

MODEL = ["mlp:8x6x4", "--gpus", "2", "--batch", "4"]


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All of a small network."""
    path = tmp_path_factory.mktemp("profiles") / "mine.json"
    command = ["measure", "layers", *MODEL, "--device", "cpu", "--budget", "20s", "--out", str(path), "--json"]
    assert run_main(dispatch, command) == 0
    return path


def test_the_profile_has_every_cell(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = load(profile)
    (times,) = found.layers
    assert times.conditions.device == found.processor.name
    assert times.conditions.dtype == "float32"
    assert set(times.made) >= {"date", "machine", "python", "layerwise"}
    assert {"runtime layer", "runtime copy", "runtime step sgd", "update sgd"} < set(times.cells)
    assert all(t.samples >= 5 and t.forward_s >= 0 for cells in times.cells.values() for t in cells.values())
    assert [level.name for level in found.levels] == ["node", "cluster"]  # of the profile it began with


def test_a_second_run_has_nothing_to_do(profile: Path, capsys: pytest.CaptureFixture[str]) -> None:
    before = load(profile).layers[0].cells
    command = ["measure", "layers", *MODEL, "--device", "cpu", "--out", str(profile), "--json"]
    assert run_main(dispatch, command) == 0
    done = json.loads(capsys.readouterr().out)
    assert (done["measured_now"], done["missing"], done["measured"]) == (0, 0, done["cells"])
    assert done["best_share"] == pytest.approx(1)
    assert load(profile).layers[0].cells == before


def test_a_plan_says_that_it_rests_on_it(profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = tmp_path / "plan.json"
    assert run_main(dispatch, ["search", *MODEL, "--profile", str(profile), "--out", str(plan)]) == 0
    out = capsys.readouterr().out
    assert "100% measured on" in out
    assert "WARNING" not in out
    made = load_plan(plan).provenance["compute_time"]
    assert isinstance(made, dict)
    assert made["measured"] == pytest.approx(1)
    assert made["conditions"]["dtype"] == "float32"
    assert run_main(dispatch, ["search", *MODEL, "--profile", str(profile), "--dtype", "float64", "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert (said["compute_time"]["measured"], said["compute_time"]["conditions"]) == (0.0, None)
    assert "at float64 t_C is analytic" in said["warnings"][0]


def test_a_profile_that_is_damaged_or_of_another_device(
    profile: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "x.json"
    file.write_text(profile.read_text()[:-100])
    command = ["measure", "layers", *MODEL, "--device", "cpu", "--out", str(file)]
    assert run_main(dispatch, command) == 2
    assert f"profile {file} is not JSON" in capsys.readouterr().err
    save(load(profile), file)
    other = file.read_text().replace(load(profile).layers[0].conditions.device, "NVIDIA H100")
    file.write_text(other)
    assert run_main(dispatch, command) == 2
    assert "has times of another device, 'NVIDIA H100'" in capsys.readouterr().err
    assert file.read_text() == other


def test_budgets() -> None:
    assert [seconds(text) for text in ("120s", "2m", "0.5h", "90")] == [120, 120, 1800, 90]
