"""Optimizers on parts of parameters: those that compute element by element are right."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from layerwise.run.parallel import ParallelModule
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, loss, mlp, on_ranks, plan_of, refused

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class Mine(torch.optim.SGD):
    """With settings of its own, but torch's step."""


class Lion(Optimizer):
    def __init__(self, params: Iterable[nn.Parameter]) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.add_(p.grad.sign(), alpha=-group["lr"])


def train(model: nn.Module, make: Make, share: slice) -> None:
    optimizer = make(model.parameters())
    for x in SAMPLES:
        optimizer.zero_grad()
        loss(model(x[share])).backward()
        optimizer.step()


def test_ranks_that_a_line_search_takes_apart_are_refused() -> None:
    """It decides by the loss, and every rank has the loss of its own samples."""
    _, network = mlp()

    def act(made: ParallelModule) -> None:
        optimizer = torch.optim.LBFGS(made.parameters(), max_iter=8, line_search_fn="strong_wolfe")

        def closure() -> Tensor:
            optimizer.zero_grad()
            value = loss(made(SAMPLES[0][made.share()]))
            value.backward()
            return value

        for _ in range(8):
            optimizer.step(closure)

    for text in refused(network, act):
        assert "has other parameters than rank" in text


@pytest.mark.parametrize("degrees", [{"c": 2}, {}], ids=str)
@pytest.mark.parametrize(
    "make", [lambda params: torch.optim.Rprop(params, 0.01), lambda params: Mine(params, 0.05), Lion]
)
def test_element_wise_optimizers_are_right_on_a_split_plan(make: Make, degrees: dict[str, int]) -> None:
    module, network = mlp()
    single = copy.deepcopy(module)
    train(single, make, slice(None))
    plan = plan_of(network, 2, degrees)
    for found in on_ranks(network, lambda made: (train(made, make, made.share()), made.full_state_dict())[1], 2, plan):
        for name, value in single.state_dict().items():
            assert difference(found[name], value) <= 1e-9, name
