"""The race of the best plans: all ranks keep the same, both numbers are said, and the model is as it was before."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.__main__ import dispatch
from layerwise.api.parallelize import parallelize
from layerwise.api.race import RaceRun, line, timed
from layerwise.cli import run_main
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.errors import LayerwiseError
from tests.api.keywords import keywords, quiet
from tests.api.script import BATCH, SEED, apart, data, network
from tests.comm.launch import launch
from tests.comm.pool import run_ranks
from tests.run.small_plans import plan


def raced(comm: Comm, race: int) -> tuple[bool, list[Any], str, dict[str, Any]]:
    """Whether model and buffers are as before, random numbers that are drawn next, the plan, its provenance."""
    model = network(SEED)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    random.seed(5)
    np.random.seed(5)
    torch.manual_seed(5)
    x = data().tensors[0][: BATCH // comm.size]
    parallel = parallelize(model, x, **quiet(comm, race=race, profile="cpu,node=2"))
    after = parallel.full_state_dict()
    alike = all(torch.equal(before[name], after[name]) for name in before)
    alike = alike and all(p.grad is None for p in parallel.parameters()) and parallel.steps_done == 0
    drawn = [random.random(), np.random.rand(), torch.rand(1).item()]
    return alike, drawn, str(parallel.plan.strategy), dict(parallel.plan.provenance)


def test_the_model_and_random_numbers_are_as_before() -> None:
    """Parameters, running statistics and their counts, gradients; the ranks have one plan, with all that was raced."""
    ranks = run_ranks(2, "tests.api.test_race:raced", 3)
    (_, drawn, _, _), _ = run_ranks(2, "tests.api.test_race:raced", 1)
    for alike, numbers, strategy, provenance in ranks:
        assert alike
        assert numbers == drawn
        assert strategy == ranks[0][2]
        assert provenance["race"] == ranks[0][3]["race"]
        assert len(provenance["race"]) == 3
        kept = next(run for run in provenance["race"] if run["chosen"] == provenance["chosen"])
        assert not any(RaceRun(**run).beats(RaceRun(**kept)) for run in provenance["race"])
        assert all(run["predicted_s"] > 0 for run in provenance["race"])


def test_what_is_trained_after_it_is_plain_pytorchs() -> None:
    found: list[tuple[list[float], dict[str, Tensor]]] = []
    for how in ({"race": 3}, {"strategy": "data"}):
        ranks = run_ranks(2, "tests.api.ranks:trained", how | {"verbose": False})
        found.append(([sum(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)], ranks[0][1]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    assert apart(found[0][1], found[1][1]) <= 1e-9


def test_both_numbers_are_said() -> None:
    said = line(1, [RaceRun("layerwise", 0.001, 0.003, 0.0001), RaceRun("data", 0.002, 0.002, 0.0001)])
    assert "layerwise 3.00 ms a step measured, 1.00 ms predicted; data 2.00 ms" in said
    assert said.endswith("kept number 2 by prediction")


@pytest.mark.parametrize(("second_s", "winner"), [(0.9, 1), (0.97, 0)])
def test_a_tie_goes_to_the_better_prediction(second_s: float, winner: int) -> None:
    """Steps of either vary by 0.02 s."""
    steps = {
        chosen: [9.0, 9.0, *(middle + away for away in (-0.02, -0.02, 0.0, 0.02, 0.02))]
        for chosen, middle in (("layerwise", 1.0), ("data", second_s))
    }
    plans = [
        replace(plan("mlp:8x4", 8, 1), provenance={"chosen": name}, predicted={"timeline_s": 1.0}) for name in steps
    ]
    first, runs = timed(plans, SoloComm(torch.device("cpu")), lambda plan: steps[str(plan.provenance["chosen"])])
    assert first == winner
    assert ("vary" in line(first, runs)) == (winner == 0)


def test_what_cannot_be_raced() -> None:
    comm = SoloComm(torch.device("cpu"))
    with pytest.raises(LayerwiseError, match="race is 0"):
        parallelize(network(), data().tensors[0], **keywords({"race": 0}, comm=comm))
    for message in run_ranks(2, "tests.api.ranks:refused", {"race": 2, "strategy": "data"}):
        assert "race= compares the plans of a search" in message


def test_a_run_after_a_race_has_one_devices_numbers(tmp_path: Path) -> None:
    """Each plan of the race is a session of its own, of which nothing is left."""
    path = tmp_path / "plan.json"
    found = f"search lenet5 --gpu cpu --gpus 2 --gpus-per-node 2 --global-batch 16 --out {path}"
    assert run_main(dispatch, found.split()) == 0
    line = f"-m layerwise.run {path} --data digits --steps 3 --dtype float64 --race 2 --compare-single"
    done = launch(line.split())
    assert done.codes == [0, 0], done.stderr
    assert "race (whole steps): " in done.stdout[0]
    assert " ms predicted: kept " in done.stdout[0]
