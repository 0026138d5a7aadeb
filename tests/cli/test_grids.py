"""Process grids on the command line: searched, and run by four ranks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerwise.__main__ import dispatch
from layerwise.cli import run_main
from layerwise.plan import load_plan
from tests.comm.launch import launch

MODEL = "mlp:64x48x32x10"


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("COLUMNS", "RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def search(capsys: pytest.CaptureFixture[str], flags: str) -> str:
    assert run_main(dispatch, ["search", MODEL, "--profile", "cpu", *flags.split()]) == 0, capsys.readouterr().err
    return capsys.readouterr().out


def test_a_grid_is_priced_beside_the_baselines(capsys: pytest.CaptureFixture[str]) -> None:
    lines = search(capsys, "--gpus 8 --price grid:4x2").splitlines()
    rows = [line.split()[0] for line in lines if line.startswith(("grid:4x2", "data", "model", "owt"))]
    assert rows == ["grid:4x2", "data", "model", "owt"]
    found = json.loads(
        search(capsys, "--gpus 8 --price grid:4x2 --json"), parse_constant=lambda name: pytest.fail(name)
    )
    assert all(config == {"n": 4, "c": 2} for config in found["strategy"].values())
    best = json.loads(search(capsys, "--gpus 8 --json"))
    assert best["lower_bound_s"] <= found["step_time_s"] * (1 + 1e-12)


def test_a_pure_grid_costs_what_the_baseline_does(capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(search(capsys, "--gpus 8 --price grid:8x1 --json"))
    data = json.loads(search(capsys, "--gpus 8 --price data --json"))
    assert found == data
    assert all(found[key] == value for key, value in found["baselines"]["data"].items())
    rows = [line.split()[:1] for line in search(capsys, "--gpus 8 --price data").splitlines()]
    assert rows.count(["data"]) == 1


def test_one_grid_as_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    out = search(capsys, "--gpus 4 --price grid:2x2 --global-batch 8 --out plan.json")
    assert "plan written to plan.json" in out
    plan = load_plan("plan.json")
    assert {str(config) for config in plan.strategy.values()} == {"{n=2, c=2}"}
    assert (plan.gpus, plan.batch, plan.provenance["chosen"]) == (4, 8, "grid:2x2")


BAD = [
    ("search", f"{MODEL} --gpus 4 --price grid:2x3", "grid 2x3 has 6 processes, there are 4: give --gpus 6"),
    ("search", f"{MODEL} --gpus 4 --price grid:two", "grid 'two': write batch groups x model parts"),
    (
        "search",
        f"{MODEL} --gpus 4 --price grid:2x2 --export-costs c.cfn",
        "leave out --export-costs",
    ),
    (
        "search",
        f"{MODEL} --gpus 4 --price grid:4x1 --global-batch 2",
        "a batch of 2 samples cannot be cut into 4 groups",
    ),
    (
        "search",
        f"{MODEL} --gpus 128 --price grid:1x128",
        "the widest layer has 48 outputs and cannot be cut into 128 parts",
    ),
    ("search", "lenet5 --gpus 2 --price grid:2x1", "process grids are for MLPs"),
    ("run", f"{MODEL} --grid 2x2", "--grid 2x2 has 4 processes, there is 1: start them with torchrun"),
    ("run", f"{MODEL} --grid all", "grid 'all': write batch groups x model parts"),
    ("run", "plan.json --grid 1x1", "--grid is for a model, such as mlp:64x256x10, and 'plan.json' is a plan"),
    ("run", "lenet5 --grid 1x1", "process grids are for MLPs"),
    ("run", "missing.json --global-batch 8", "plan 'missing.json' cannot be read"),
]


@pytest.mark.parametrize(("command", "line", "reason"), BAD, ids=[f"{command} {line}" for command, line, _ in BAD])
def test_mistakes(command: str, line: str, reason: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_main(dispatch, [command, *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("layerwise: error: ")
    assert err.count("\n") == 1
    assert reason in err
    assert not list(Path.cwd().iterdir())


def test_flags_of_a_grid_do_not_go_with_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    search(capsys, "--gpus 1 --price grid:1x1 --out plan.json")
    assert run_main(dispatch, ["run", "plan.json", "--global-batch", "8"]) == 2
    assert "--global-batch and --profile go with --grid" in capsys.readouterr().err


def test_four_ranks_on_a_grid_equal_one_device() -> None:
    flags = ("--grid", "2x2", "--global-batch", "32", "--dtype", "float64", "--data", "synthetic", "--steps", "4")
    done = launch(["-m", "layerwise.run", MODEL, *flags, "--compare-single", "--json"], ranks=4)
    assert done.codes == [0] * 4, done.stderr
    result = json.loads(done.stdout[0])
    assert (result["world_size"], len(result["losses"])) == (4, 4)
    assert max(result["compare"].values()) < 1e-9
    assert result["bytes_sent"] == result["bytes_predicted"]
    # float64; a gradient's box is on two ranks: 2 (2 - 1) / 2 of it each, half of the parameters, on four ranks.
    assert result["bytes_sent"]["sync"] == 4 * 8 * (65 * 48 + 49 * 32 + 33 * 10) // 2
