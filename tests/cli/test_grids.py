"""Process grids on the command line: searched, and run by four ranks."""

import json

import pytest

from layerwise.plan import load_plan
from tests.cli.commands import Run
from tests.comm.launch import launch

MODEL = "mlp:64x48x32x10"


def search(run: Run, flags: str) -> str:
    return run("search", MODEL, "--profile", "cpu", *flags.split())


def test_a_grid_is_priced_beside_the_baselines(run: Run) -> None:
    lines = search(run, "--gpus 8 --price grid:4x2").splitlines()
    rows = [line.split()[0] for line in lines if line.startswith(("grid:4x2", "data", "model", "owt"))]
    assert rows == ["grid:4x2", "data", "model", "owt"]
    found = json.loads(search(run, "--gpus 8 --price grid:4x2 --json"), parse_constant=lambda name: pytest.fail(name))
    assert all(config == {"n": 4, "c": 2} for config in found["strategy"].values())
    best = json.loads(search(run, "--gpus 8 --json"))
    assert best["lower_bound_s"] <= found["step_time_s"] * (1 + 1e-12)


def test_one_grid_as_a_plan(run: Run) -> None:
    out = search(run, "--gpus 4 --price grid:2x2 --global-batch 8 --out plan.json")
    assert "plan written to plan.json" in out
    plan = load_plan("plan.json")
    assert {str(config) for config in plan.strategy.values()} == {"{n=2, c=2}"}
    assert (plan.gpus, plan.batch, plan.provenance["chosen"]) == (4, 8, "grid:2x2")


def test_replicas_stay_apart_in_every_alternative(run: Run) -> None:
    search(run, "--gpus 8 --replicas 4 --out plan.json")
    plan = load_plan("plan.json")
    assert plan.provenance["replicas"] == 4
    told = json.loads(run("explain", "plan.json", next(iter(plan.strategy)), "--all", "--json"))
    assert len(told["alternatives"]) > 1
    assert all(row["config"]["n"] in (4, 8) for row in told["alternatives"])


def test_a_profile_does_not_go_with_a_plan_that_stays(run: Run, refuse: Run) -> None:
    search(run, "--gpus 1 --price grid:1x1 --out plan.json")
    assert "give it with --replan or --race" in refuse("run", "plan.json", "--profile", "cpu")


def test_four_ranks_on_a_grid_equal_one_device(run: Run) -> None:
    search(run, "--gpus 4 --price grid:2x2 --global-batch 32 --out plan.json")
    flags = ("--data", "synthetic", "--steps", "4", "--compare-single", "--json")
    done = launch(["-m", "layerwise.run", "plan.json", *flags], ranks=4)
    assert done.codes == [0] * 4, done.stderr
    result = json.loads(done.stdout[0])
    assert (result["world_size"], len(result["losses"])) == (4, 4)
    assert max(result["compare"].values()) < 1e-4
    assert result["bytes_sent"] == result["bytes_predicted"]
    # A gradient's box is on two ranks: 2 (2 - 1) / 2 of it each, half of the parameters, on four ranks.
    assert result["bytes_sent"]["sync"] == 4 * 4 * (65 * 48 + 49 * 32 + 33 * 10) // 2
