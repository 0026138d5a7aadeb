"""Optimizers on parts of parameters: those that compute element by element are right, all others are refused."""

import copy
from collections.abc import Callable, Iterable

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from layerwise.run.parallel import ParallelModule
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, loss, mlp, on_ranks, plan_of, refused

Make = Callable[[Iterable[nn.Parameter]], Optimizer]


class Lamb(torch.optim.AdamW):
    """By its name, whatever package it is from."""


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


class Told(Lion):
    element_wise = True


def matrices(params: Iterable[nn.Parameter]) -> Optimizer:
    return torch.optim.Muon([p for p in params if p.dim() == 2], lr=0.1)


def train(model: nn.Module, make: Make, share: slice) -> None:
    optimizer = make(model.parameters())
    for x in SAMPLES:
        optimizer.zero_grad()
        loss(model(x[share])).backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (torch.optim.Adafactor, "Adafactor takes a parameter as one matrix, but the plan splits"),
        (matrices, "Muon takes a parameter as one matrix"),
        (Lamb, "Lamb takes norms of whole parameters"),
        (Lion, "Lion is not known to treat every element by itself"),
        (lambda params: torch.optim.LBFGS(params), "LBFGS decides by the loss"),
    ],
)
def test_an_optimizer_that_needs_whole_parameters_raises_at_its_first_step(make: Make, message: str) -> None:
    _, network = mlp()

    def act(made: ParallelModule) -> None:
        optimizer = make(made.parameters())
        loss(made(SAMPLES[0][made.share()])).backward()
        optimizer.step(lambda: 0.0)

    for text in refused(network, act, plan=plan_of(network, 2, {"c": 2})):
        assert message in text


@pytest.mark.parametrize("make", [torch.optim.Adafactor, matrices, Lion, Lamb], ids=lambda make: make.__name__)
def test_optimizers_of_whole_parameters_are_right_where_every_rank_holds_all(make: Make) -> None:
    module, network = mlp()
    single = copy.deepcopy(module)
    train(single, make, slice(None))
    for found in on_ranks(network, lambda made: (train(made, make, made.share()), made.full_state_dict())[1], 2):
        for name, value in single.state_dict().items():
            assert difference(found[name], value) <= 1e-9, name


def test_lbfgs_is_refused_on_several_ranks_because_their_losses_differ() -> None:
    _, network = mlp()
    for text in refused(network, lambda made: torch.optim.LBFGS(made.parameters()).step(lambda: 0.0)):
        assert "LBFGS decides by the loss" in text


@pytest.mark.parametrize("degrees", [{"c": 2}, {}], ids=str)
@pytest.mark.parametrize(
    "make",
    [
        lambda params: torch.optim.SGD(params, 0.05, momentum=0.9, weight_decay=0.1, foreach=True),
        lambda params: torch.optim.AdamW(params, 0.01, fused=True),
        lambda params: torch.optim.Rprop(params, 0.01),
        lambda params: Mine(params, 0.05),
        Told,
    ],
)
def test_element_wise_optimizers_are_right_on_a_split_plan(make: Make, degrees: dict[str, int]) -> None:
    module, network = mlp()
    single = copy.deepcopy(module)
    train(single, make, slice(None))
    plan = plan_of(network, 2, degrees)
    for found in on_ranks(network, lambda made: (train(made, make, made.share()), made.full_state_dict())[1], 2, plan):
        for name, value in single.state_dict().items():
            assert difference(found[name], value) <= 1e-9, name
