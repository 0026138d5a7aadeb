"""Laws 6 and 7 for the plans that are run in earnest: the optimised ones, of the networks of docs/reference/cli.md."""

import pytest

from layerwise.config import Config
from tests.comm.thread import run_threads
from tests.run.plans import check_equal, optimised_plan, train, trained_alone


def kinds(strategy: dict[str, Config]) -> set[str]:
    """Which dimensions are cut: "n", "c", "hw", or "" for a layer on one device."""
    return {"".join(label for label, _ in config.degrees) for config in strategy.values()}


def check(name: str, ranks: int) -> None:
    given, single = trained_alone(name)
    plan = optimised_plan(given.graph, ranks)
    found = kinds(plan.strategy)
    assert len(found) >= 2, found  # a mix, not plain data parallelism
    if name.startswith("unet"):
        assert any(set(kind) & set("dhw") for kind in found), found
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm)), single, plan)


# The other number of ranks is quick; U-Net in two dimensions is as in three, and has random plans in test_module.
SLOW = {("vgg16", 4), ("unet2d", 2), ("unet2d", 4), ("unet3d", 4)}


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        pytest.param(name, ranks, marks=pytest.mark.slow if (name, ranks) in SLOW else ())
        for name in ("lenet5", "alexnet", "vgg16", "unet2d", "unet3d")
        for ranks in (2, 4)
    ],
)
def test_optimised_plans_equal_one_device(name: str, ranks: int) -> None:
    check(name, ranks)


def test_the_optimised_plan_of_a_large_network_on_two_ranks() -> None:
    check("resnet50", 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inception_v3", "densenet121"])
def test_optimised_plans_of_large_networks_on_two_ranks(name: str) -> None:
    check(name, 2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["inception_v3", "resnet50", "densenet121"])
def test_optimised_plans_of_large_networks_on_four_ranks(name: str) -> None:
    check(name, 4)
