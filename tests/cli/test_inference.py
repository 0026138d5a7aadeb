"""--inference: plans for answers alone."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from layerwise.plan import load_plan
from tests.cli.commands import Run


def test_a_plan_for_answers(run: Run, refuse: Run, here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["lenet5", "--gpus", "2", "--gpus-per-node", "2"]
    training = json.loads(run("search", *flags, "--json"))
    found = json.loads(run("search", *flags, "--json", "--inference", "--out", "plan.json"))
    assert found["optimal"]
    assert found["baselines"]["data"]["timeline_s"] < training["baselines"]["data"]["timeline_s"]
    plan = load_plan("plan.json")
    assert plan.provenance["cost_options"]["kind"] == "inference"
    assert plan.predicted["sync_bytes"] == plan.predicted["backward_s"] == 0
    assert "inference" in run("search", *flags, "--inference")
    assert run("explain", "plan.json", next(iter(plan.strategy)))
    assert run("diff", "plan.json", "plan.json")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert "layerwise.run trains" in refuse("run", "plan.json")
