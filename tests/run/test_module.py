"""Laws 6 and 7: under any plan the numbers are one device's, and the bytes sent are those predicted."""

import copy
from collections.abc import Iterator
from functools import cache

import pytest
import torch
from torch import nn

from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import (
    LARGER,
    SMALL,
    Case,
    Trained,
    case,
    check_equal,
    difference,
    plain,
    random_plan,
    train,
    trained_alone,
)


def preferred(configs, degree: int) -> Config:
    """Samples over all ranks where that can be, else serial."""
    return next((c for c in configs if c == Config((("n", degree),))), configs[0])


def seeds() -> Iterator[object]:
    """Every number of ranks with every io and every way to communicate (12 seeds): on a network, slowly on all."""
    for number, name in enumerate(SMALL):
        for seed in range(17):
            quick = seed < 12 and (seed + 5 * number) % len(SMALL) == 0
            yield pytest.param(name, seed, marks=() if quick else pytest.mark.slow)


@pytest.mark.parametrize(("name", "seed"), seeds())
def test_random_plans_equal_one_device(name: str, seed: int) -> None:
    given, single = trained_alone(name)
    free = seed % 2 == 0
    ranks = 2 + seed % 3 if free else min(2 + seed % 3, given.graph.batch)
    plan = random_plan(given.graph, ranks, seed, "free" if free else "sample")
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm), collectives=seed % 4 > 1), single, plan)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", [*LARGER, *SMALL])
def test_random_plans_of_all_networks(name: str, seed: int) -> None:
    given, single = trained_alone(name)
    ranks = 2 + seed % 7
    plan = random_plan(given.graph, ranks, seed, "free")
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm), collectives=seed % 4 > 1), single, plan)


@pytest.mark.parametrize("name", ["lenet5", "resnet18", "unet3d"])
def test_one_rank_is_plain_pytorch(name: str) -> None:
    shape, options, batch = SMALL[name]
    torch.manual_seed(0)
    from layerwise.models import find

    module = find(name).build(**options)
    given = case(module, shape, batch)
    reference = copy.deepcopy(module)
    single = train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())
    assert plain(reference, given) == single.losses
    reference.load_state_dict(single.state, strict=True)
    for key, value in module.state_dict().items():
        assert value.shape == single.state[key].shape


@pytest.mark.parametrize("seed", range(6))  # more of them, some recomputed: test_recompute
def test_tied_weights_dropout_and_odd_sizes(seed: int) -> None:
    given, single = trained_alone("awkward")
    ranks = 2 + seed % 3
    plan = random_plan(given.graph, ranks, seed, "sample")
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm)), single, plan)


class Instances(nn.Module):
    """Instance norm with running statistics, which are averages over the samples of all ranks; plain batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.plain, self.conv = nn.BatchNorm2d(3, affine=False), nn.Conv2d(3, 4, 3, padding=1)
        self.norm = nn.InstanceNorm2d(4, momentum=0.3, affine=True, track_running_stats=True)
        self.last = nn.Linear(4 * 7 * 5, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.relu(self.norm(self.conv(self.plain(x)))).flatten(1))


@cache
def instances() -> tuple[Case, Trained]:
    torch.manual_seed(2)
    given = case(Instances(), (3, 7, 5), 6)
    return given, train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())


@pytest.mark.parametrize("seed", range(6))
def test_running_statistics_of_instances(seed: int) -> None:
    given, single = instances()
    ranks = 2 + seed % 3
    choose = (lambda configs: preferred(configs, ranks)) if seed < 3 else None
    plan = random_plan(given.graph, ranks, seed, "sample", choose)
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm)), single, plan)


def test_running_statistics_of_instances_are_plain_pytorchs() -> None:
    _, single = instances()
    torch.manual_seed(2)
    module = Instances()
    given = case(module, (3, 7, 5), 6)
    plain(module, given)
    for key, value in module.state_dict().items():
        assert difference(single.state[key], value) <= 1e-9, key


def test_a_pure_data_plan_sends_what_ddp_sends() -> None:
    given, _ = trained_alone("vgg16")
    plan = random_plan(
        given.graph, 4, 0, "sample", lambda configs: next(c for c in configs if c == Config((("n", 4),)))
    )
    sent = [rank.sent for rank in run_threads(4, lambda comm: train(given, plan, comm))]
    elements = given.graph.parameter_count()
    assert [rank["transfers"] for rank in sent] == [0] * 4
    assert sum(rank["sync"] for rank in sent) == 2 * 3 * 8 * elements


def test_bad_input_is_one_clear_error() -> None:
    given, _ = trained_alone("lenet5")
    plan = random_plan(given.graph, 2, 0, "sample")

    def wrong(comm):
        module = load(plan, given.network, comm=comm, dtype=torch.float64)
        with pytest.raises(LayerwiseError, match="missing a required argument"):
            module()
        with pytest.raises(LayerwiseError, match="but the plan is for"):
            module(given.inputs[0][module.share(), :, :5])

    run_threads(2, wrong)
    with pytest.raises(LayerwiseError, match="there are 3"):
        run_threads(3, lambda comm: load(plan, given.network, comm=comm))
    with pytest.raises(LayerwiseError, match="for another model"):
        load(plan, trained_alone("alexnet")[0].network, comm=SoloComm())
