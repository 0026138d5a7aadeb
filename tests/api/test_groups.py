"""Groups of ranks: each with its model and its plan, beside others; and replicas of a group as one plan."""

from pathlib import Path
from statistics import mean
from typing import Any

import pytest
import torch

from tests.api.group_ranks import STEPS, Parts, net, steps
from tests.api.script import BATCH, apart, data, network
from tests.comm.pool import run_ranks


def test_a_model_in_each_group(tmp_path: Path) -> None:
    ranks: list[Any] = run_ranks(4, "tests.api.group_ranks:own_models", str(tmp_path))
    for group, count in enumerate(STEPS):
        alone = net(group)
        losses = steps(alone, count)
        (first, state), (second, same) = ranks[2 * group : 2 * group + 2]
        assert list(map(mean, zip(first, second, strict=True))) == pytest.approx(losses, rel=1e-9)
        assert max(apart(state, alone.state_dict()), apart(same, alone.state_dict())) <= 1e-9
        assert apart(torch.load(tmp_path / f"{group}.pt"), alone.state_dict()) <= 1e-9


def test_ranks_outside_are_not_waited_for() -> None:
    ranks: list[Any] = run_ranks(4, "tests.api.group_ranks:some_ranks")
    first, outside, second, (losses, state) = ranks
    alone = network().eval()
    answers = torch.stack([alone(x) for x in data().tensors[0].split(BATCH)])
    assert outside is None
    assert torch.allclose(torch.cat((first, second), 1), answers, rtol=0, atol=1e-12)
    assert losses == pytest.approx(steps(alone.train(), 2), rel=1e-9)
    assert apart(state, alone.state_dict()) <= 1e-9


@pytest.mark.parametrize(
    "how",
    [
        {},
        {"strategy": "model"},
        {"batch": 2},
        {"strategy": {"0": {"n": 2, "h": 2}, "5": {"n": 2, "k": 2}, "7": {"n": 2, "placement": "strided"}}},
    ],
    ids=["searched", "model", "few samples", "by hand"],
)
def test_replicas_have_one_devices_numbers(how: dict[str, Any]) -> None:
    ranks: list[Any] = run_ranks(4, "tests.api.group_ranks:replicas", how)
    alone = network()
    losses = steps(alone, 2, batch=how.get("batch", BATCH))
    assert list(map(mean, zip(*(rank[0][0] for rank in ranks), strict=True))) == pytest.approx(losses, rel=1e-9)
    for (_, state), strategy in ranks:
        assert apart(state, alone.state_dict()) <= 1e-9
        assert all("n=2" in config or "n=4" in config for config in strategy.values()), strategy


def test_fit_in_each_group() -> None:
    alone = network()
    steps(alone, 2)
    for state in run_ranks(4, "tests.api.group_ranks:fitted"):
        assert apart(state, alone.state_dict()) <= 1e-9


def test_groups_measure_once_and_at_the_same_time() -> None:
    """Links are measured once, then taken from the cache; layers are added to it."""
    ranks: list[Any] = run_ranks(4, "tests.api.group_ranks:measured")
    assert ranks[0] == ranks[1]
    assert ranks[2] == ranks[3]
    assert ranks[0][0] != ranks[2][0]
    for _, (first, second) in ranks:
        assert first["dtype"] == "float64"
        assert second["links"] == first["links"]
        assert second["cells"] >= first["cells"] > 0


def test_what_is_refused() -> None:
    first, _, _, last = (dict(said) for said in run_ranks(4, "tests.api.group_ranks:refusals"))
    assert "device_mesh has 3 dimensions; a plan is for the ranks of a 1-D mesh, or for" in first["3-D"]
    assert (
        "device_mesh is a process group that this rank is not in: call parallelize on the ranks" in first["not in it"]
    )
    assert "device_mesh has rank 9, and there are 4" in first["too many"]
    assert "device_mesh is 'domain'; it must be a DeviceMesh, a ProcessGroup or None" in first["no mesh"]
    assert "the plan is for 2 ranks, there are 4" in first["a plan of another size"]
    assert "the plan is for 4 ranks, and the group of ranks 0 and 1 has 2: give it" in first["a plan for more"]
    assert "samples in common for the 2 replicas: split n into 2" in first["a plan across replicas"]
    assert "layer '0': {h=4} has samples in common for the 2 replicas" in first["by hand across replicas"]
    assert "a batch of 1 does not give each of 2 replicas a sample" in first["too few samples"]
    assert "device_mesh has ranks 0 and 1 of 4, and ParallelOptions(comm=...) has all" in first["a group and a comm"]
    assert "pass a 2-D device mesh to parallelize" in first["DDP"]
    assert "other arguments" not in first
    assert "on rank 2" in last["other arguments"]
    assert "on rank 3: start every rank with the same" in last["other arguments"]


@pytest.mark.parametrize("strategy", [None, {"0": {"n": 2, "h": 2}, "5": {"n": 2, "c": 2}}], ids=["searched", "split"])
def test_a_part_of_a_model(strategy: Any) -> None:
    """Gradients flow back through it into what is before."""
    ranks: list[Any] = run_ranks(4, "tests.api.group_ranks:encoder", strategy)
    alone = Parts()
    losses = steps(alone, 2)
    assert list(map(mean, zip(*(rank[0] for rank in ranks), strict=True))) == pytest.approx(losses, rel=1e-9)
    assert all(apart(rank[1], alone.state_dict()) <= 1e-9 for rank in ranks)
