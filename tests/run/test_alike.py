"""Ranks whose own loops differ train unlike models: the one that differs is named."""

from itertools import count

import pytest
import torch
from torch import nn

import layerwise
from layerwise.comm.base import Members
from layerwise.errors import LayerwiseError
from layerwise.run.guards.compare_ranks import RankComparison
from tests.api.keywords import keywords
from tests.comm.thread import ThreadComm, run_threads

ODD = 1  # the rank whose loop is another


def train(strategy: object, *, lr: float = 0.1, skipped: int = -1, steps: int = 9, compare: bool = True) -> None:
    def rank(comm: ThreadComm) -> None:
        generator = torch.Generator().manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))
        with torch.no_grad():
            for p in net.parameters():
                p.uniform_(-0.3, 0.3, generator=generator)
        how = keywords({"strategy": strategy, "compare_ranks": compare}, comm=comm, verbose=False)
        model = layerwise.parallelize(net, torch.zeros(4, 8), **how)
        optimizer = torch.optim.SGD(model.parameters(), lr=lr if comm.rank == ODD else 0.1)
        for step in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(torch.rand(4, 8, generator=generator)), torch.arange(4))
            loss.backward()
            if comm.rank != ODD or step != skipped:
                optimizer.step()

    run_threads(3, rank)


@pytest.mark.parametrize("strategy", ["data", {"2": {"n": 3}}])
def test_a_learning_rate_of_one_rank_alone_is_named_at_the_second_step(strategy: object) -> None:
    """However little it differs."""
    with pytest.raises(LayerwiseError, match="rank 1 of 3 has other parameters than rank 0, when it begins step 2: "):
        train(strategy, lr=0.1001)


def test_a_step_that_one_rank_leaves_out_is_noticed() -> None:
    with pytest.raises(LayerwiseError, match="rank 1 of 3 has other parameters than rank 0, when it begins step 8: "):
        train("data", skipped=5)


def test_ranks_that_are_meant_to_differ_are_left_alone() -> None:
    train("data", lr=0.2, steps=3, compare=False)


def test_rounding_of_other_hardware_is_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates that are apart by a few units in the last place, in every step."""
    processors = count()
    monkeypatch.setattr("layerwise.run.guards.compare_ranks.hardware", lambda: next(processors))
    rng = torch.Generator().manual_seed(1)
    values = torch.rand(2000, generator=rng)
    held = [{"weight": values.clone()}, {"weight": values.clone()}]
    alike = [RankComparison(one, {"weight": [(0, 1)] * 2}, Members((0, 1), 2)) for one in held]
    for step in range(1, 301):
        alike[0].check([one.numbers(step) for one in alike])
        update = 1e-4 * torch.rand(2000, generator=rng)
        for one in held:
            one["weight"] -= update * (1 + 1e-6 * torch.rand(2000, generator=rng))
    assert held[0]["weight"].ne(held[1]["weight"]).any()
    held[1]["weight"] -= 1e-3 * torch.rand(2000, generator=rng)
    with pytest.raises(LayerwiseError, match="rank 1 of 2 has other parameters"):
        alike[0].check([one.numbers(400) for one in alike])
