"""The same training four ways, on real images: all learn the same."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

from tests.usability.__main__ import WAYS, measured, saved
from tests.usability.images import images, keep
from tests.usability.launch import launch

RANKS = 2
PER_RANK = ("ddp",)  # is given the samples of one rank
SAME_ORDER = ("model_parallel", "one_call")  # the very samples that one device has in each step
RUNS = {"digits": ("digits", 64), "mnist": ("mnist", 128), "one batch": ("digits", 1536)}  # data set, samples a step


def network(side: int) -> nn.Sequential:
    """The scripts'."""
    return nn.Sequential(
        nn.Conv2d(1, 8, 3, stride=2, padding=1), nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1), nn.ReLU(),
        nn.Flatten(), nn.Linear(16 * side * side, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


@dataclass(frozen=True)
class Trained:
    """Loss over all images and accuracy over those held out, of the whole model that a script has saved; its words."""

    loss: float
    accuracy: float
    printed: str


Results = Callable[[str], dict[str, Trained]]
EACH = [pytest.param(run, marks=pytest.mark.slow) if run == "mnist" else run for run in RUNS]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Of each run in turn, as tests ask for them: what every script gives."""
    folder = tmp_path_factory.mktemp("usability")

    @cache
    def result(run: str) -> dict[str, Trained]:
        data, n = RUNS[run]
        keep(data, folder)
        ways = {}
        for way in ("one_device", *WAYS):
            ranks = 1 if way == "one_device" else RANKS
            parts = RANKS if way in PER_RANK else 1
            file = folder / f"{way}, {run}.pt"
            text = launch(way, ranks, (data, str(n // parts), str(file)), folder)
            ways[way] = Trained(*score(torch.load(file, weights_only=True), data), text)
        return ways

    return result


def score(state: dict[str, Tensor], data: str) -> tuple[float, float]:
    """Of a whole model's state dict."""
    train, test = images(data)
    model = network(test.tensors[0].shape[-1] // 4)
    model.load_state_dict(state)
    with torch.no_grad():
        out, right = model(train.tensors[0]), model(test.tensors[0]).argmax(1) == test.tensors[1]
    return nn.functional.cross_entropy(out, train.tensors[1]).item(), right.double().mean().item()


@pytest.mark.parametrize("name", [run for run in EACH if run != "one batch"])
def test_all_ways_train_to_the_same_loss(name: str, trained: Results) -> None:
    """DistributedSampler and fit shuffle in an order of their own."""
    ways = trained(name)
    one = ways["one_device"]
    assert one.accuracy > 0.9
    for way in WAYS:
        other = ways[way]
        apart = 0.02 * one.loss if way in SAME_ORDER else 0.06  # at first the loss is 2.3
        assert other.loss == pytest.approx(one.loss, abs=apart), way
        assert other.accuracy == pytest.approx(one.accuracy, abs=0.03), way


def test_all_ways_are_exact(trained: Results) -> None:
    """With all samples in one batch their order does not matter: the losses are equal."""
    ways = trained("one batch")
    for way in WAYS:
        assert ways[way].loss == pytest.approx(ways["one_device"].loss, rel=1e-5), way


@pytest.mark.parametrize("run", EACH)
def test_all_ways_print_the_accuracy_of_the_whole_model(run: str, trained: Results) -> None:
    for way, one in trained(run).items():
        said = f"accuracy {one.accuracy:.4g}," if way == "fit" else f"held out: {one.accuracy:.2%} right"
        assert said in one.printed, way


def test_one_call_is_the_least() -> None:
    found = measured()
    assert saved(found, "ddp", "effort") > 0.9
    assert saved(found, "ddp", "lines") > 0.75
    assert saved(found, "model_parallel", "lines") > 0.94
    assert saved(found, "model_parallel", "effort") > 0.99
    assert found["fit"].effort < 0.1 * found["ddp"].effort
