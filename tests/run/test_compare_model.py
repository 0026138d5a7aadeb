"""In steps 2 and 100 the model computes two samples beside its layers: what no look at its code finds is noticed."""

import os
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import layerwise
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.run import in_full
from tests.api.keywords import quiet
from tests.comm.thread import run_threads

STRATEGIES: list[Any] = ["data", {"hidden": {"c": 2}}]
CHANGED = "in training step 2 layer 'drop' gives other numbers than the model as written, unlike when"


class Net(nn.Module):
    """It has a batch norm, a dropout and its loss inside, and reads the environment."""

    def __init__(self) -> None:
        super().__init__()
        self.hidden, self.norm = nn.Linear(6, 8), nn.BatchNorm1d(8)
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.norm(self.hidden(x)) / float(os.environ.get("TEST_TEMPERATURE", "1"))
        return functional.cross_entropy(self.out(self.drop(h)), y)


Before = Callable[[int, Any], None]


def nothing(step: int, net: nn.Module) -> None:
    pass


def trained(strategy: Any, before: Before = nothing, steps: int = 3, **options: Any) -> list[dict[str, Tensor]]:
    """Returns the state of each of two ranks after some steps, and the state of random numbers."""

    def rank(comm: Comm) -> dict[str, Tensor]:
        draws = torch.Generator().manual_seed(comm.rank)
        net = Net()
        with torch.no_grad():
            for p in net.parameters():
                p.uniform_(-0.3, 0.3, generator=torch.Generator().manual_seed(1))
        x, y = torch.zeros(4, 6), torch.zeros(4, dtype=torch.int64)
        model = layerwise.parallelize(net, (x, y), strategy=strategy, **quiet(comm, **options))
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for step in range(1, steps + 1):
            before(step, model)
            x, y = torch.rand(4, 6, generator=draws), torch.randint(3, (4,), generator=draws)
            optimizer.zero_grad()
            model(x, y).backward()
            optimizer.step()
        return {**model.full_state_dict(), "draws": torch.get_rng_state()}

    return run_threads(2, rank)


def warmer(step: int, _: nn.Module) -> None:
    os.environ["TEST_TEMPERATURE"] = str(1 + 0.5 * (step - 1))


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_temperature_of_the_environment_that_changes_is_noticed_on_all_ranks(strategy: object) -> None:
    """Unless the user wants no comparison."""
    with pytest.raises(LayerwiseError, match=CHANGED):
        trained(strategy, warmer)
    trained(strategy, warmer, compare_model=False)


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_comparison_leaves_nothing_behind(strategy: object) -> None:
    states = []
    for compare in (True, False):
        torch.manual_seed(3)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # that it was not made
            states.append(trained(strategy, compare_model=compare))
    for with_it, without in zip(*states, strict=True):
        assert with_it.keys() == without.keys()
        assert all(torch.equal(x, without[name]) for name, x in with_it.items())


def test_a_loop_that_has_diverged_is_not_compared() -> None:
    def diverge(step: int, model: Any) -> None:
        if step == 2:
            with torch.no_grad():
                model.out.bias.fill_(float("nan"))

    with pytest.warns(UserWarning, match="could not be compared with its layers in step 2: parameters or inputs"):
        trained("data", diverge)


def test_the_hundredth_step_is_compared_too() -> None:
    with pytest.raises(LayerwiseError, match="in training step 100 layer 'drop' gives other numbers"):
        trained("data", lambda step, net: warmer(1 if step < 50 else 3, net), steps=101)


def test_a_device_without_room_for_the_full_model_does_not_compare(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError("no room")

    monkeypatch.setattr(in_full, "fill", full)
    with pytest.warns(UserWarning, match="could not be compared with its layers in step 2: no room"):
        trained({"hidden": {"c": 2}})
