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


def test_all_grids(capsys: pytest.CaptureFixture[str]) -> None:
    lines = search(capsys, "--gpus 8 --grid all").splitlines()
    rows = [line.split()[0] for line in lines if line.startswith(("8x1", "4x2", "2x4", "1x8", "layer-wise"))]
    assert rows == ["8x1", "4x2", "2x4", "1x8", "layer-wise"]
    assert sum(line.split()[1:2] == ["*"] for line in lines) == 1  # the best by the cost tables
    found = json.loads(search(capsys, "--gpus 8 --grid all --json"), parse_constant=lambda name: pytest.fail(name))
    assert [g["grid"] for g in found["grids"]] == ["8x1", "4x2", "2x4", "1x8"]
    assert found["best_grid"] == min(found["grids"], key=lambda g: g["timeline_s"])["grid"]
    assert found["best_grid_by_paper"] == min(found["grids"], key=lambda g: g["paper_communication_s"])["grid"]
    for grid in found["grids"]:
        assert found["layerwise"]["timeline_s"] <= grid["timeline_s"]
        assert found["layerwise"]["least_step_time_s"] <= grid["step_time_s"] * (1 + 1e-12)
    slices = [g["distribution"]["slice_bytes"] for g in found["grids"]]
    assert slices == [256 / groups * 64 * 4 for groups in (8, 4, 2, 1)]


@pytest.mark.parametrize("columns", [80, 100, 140])
def test_the_table_fits(columns: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    lines = search(capsys, "--gpus 8 --grid all").splitlines()
    assert max(map(len, lines)) <= columns
    assert ("input arrives by" in lines[2]) == (columns > 100)
    assert "with overlap" in lines[2]


def test_one_grid_as_a_plan(capsys: pytest.CaptureFixture[str]) -> None:
    out = search(capsys, "--gpus 4 --grid 2x2 --global-batch 8 --out plan.json")
    assert "plan of grid 2x2 written to plan.json" in out
    plan = load_plan("plan.json")
    assert {str(config) for config in plan.strategy.values()} == {"{n=2, c=2}"}
    assert (plan.gpus, plan.batch, plan.provenance["chosen"]) == (4, 8, "grid 2x2")


BAD = [
    ("search", f"{MODEL} --gpus 4 --grid 2x3", "--grid 2x3 has 6 processes: give --gpus 6"),
    ("search", f"{MODEL} --gpus 4 --grid two", "--grid 'two': write batch groups x model parts"),
    ("search", f"{MODEL} --gpus 4 --grid all --out p.json", "say which grid to write"),
    ("search", f"{MODEL} --gpus 4 --grid 2x2 --no-fuse", "leave out --no-fuse"),
    (
        "search",
        f"{MODEL} --gpus 4 --grid 2x2 --depth-first 1 --export-costs c.cfn",
        "leave out --export-costs and --depth-first",
    ),
    ("search", f"{MODEL} --gpus 4 --grid 2x2 --timeline t.json", "leave out --timeline"),
    ("search", f"{MODEL} --gpus 4 --grid 2x2 --layers", "leave out --layers"),
    ("search", f"{MODEL} --gpus 4 --grid 2x2 --objective additive", "leave out --objective"),
    ("search", f"{MODEL} --gpus 4 --grid 4x1 --global-batch 2", "a batch of 2 samples cannot be cut into 4 groups"),
    ("search", f"{MODEL} --gpus 128 --grid 1x128", "the widest layer has 48 outputs and cannot be cut into 128 parts"),
    ("search", "lenet5 --gpus 2 --grid all", "process grids are for MLPs"),
    ("run", f"{MODEL} --grid 2x2", "--grid 2x2 has 4 processes, there is 1: start them with torchrun"),
    ("run", f"{MODEL} --grid all", "--grid 'all': write batch groups x model parts"),
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
    search(capsys, "--gpus 1 --grid 1x1 --out plan.json")
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
