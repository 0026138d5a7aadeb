"""Recomputed layers: one device's numbers, those of the same plan without them to the last bit, and less memory."""

from __future__ import annotations

import random
from functools import cache

import pytest
import torch

from layerwise.comm.solo import SoloComm
from tests.comm.thread import run_threads
from tests.run.plans import SMALL, Case, Trained, case, check_equal, random_plan, recomputed, small, train
from tests.run.test_module import Small


@cache
def known(name: str) -> tuple[Case, Trained]:
    torch.manual_seed(1)
    torch.set_num_threads(1)
    given = case(Small(), (3, 7, 5), 6) if name == "awkward" else small(name)
    return given, train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())


def same(found: Trained, expected: Trained) -> None:
    """To the last bit."""
    assert found.losses == expected.losses
    for name, value in expected.state.items():
        assert torch.equal(found.state[name], value), name
    assert found.gradients.keys() == expected.gradients.keys()
    for name, (_, gradient) in expected.gradients.items():
        assert torch.equal(found.gradients[name][1], gradient), name


@pytest.mark.parametrize("seed", range(12))
def test_random_plans_with_recompute(seed: int) -> None:
    """Tied weights, dropout, batch norm, sizes that do not divide; any configuration, some layers recomputed."""
    given, single = known("awkward")
    ranks = 1 + seed % 4
    plain = random_plan(given.graph, ranks, seed, "sample" if seed % 3 else "free")
    plan = recomputed(plain, given.graph, seed)
    trained = run_threads(ranks, lambda comm: train(given, plan, comm), collectives=seed % 2 == 1, timeout_s=20)
    check_equal(trained, single, plan)
    before = run_threads(ranks, lambda comm: train(given, plain, comm), collectives=seed % 2 == 1, timeout_s=20)
    for found, expected in zip(trained, before, strict=True):
        if ranks > 1:  # on one rank the plain plan is run by the module itself, whose dropout has other kernels
            same(found, expected)


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("seed", [1, 2])
def test_networks(name: str, seed: int) -> None:
    given, single = known(name)
    ranks = 2 + 2 * (seed % 2)
    io, choose = "sample" if given.graph.batch >= ranks else "free", random.Random(seed).choice
    plan = recomputed(random_plan(given.graph, ranks, seed, io, choose), given.graph, seed)
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm), timeout_s=60), single, plan)
