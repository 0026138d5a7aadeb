"""A model that several ranks run as it was written: its gradients are one device's, or refused."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from layerwise.run.parallel import ParallelModule
from tests.run.own_modules import IMAGES, net, same_on_ranks, state_and_gradients
from tests.run.plans import difference
from tests.run.small_modules import gradients, on_ranks, plan_of, refused, traced


def test_unused_and_frozen_parameters() -> None:
    """What the loss does not depend on has no gradient, as on one device."""

    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        model.norm.bias.requires_grad_(False)
        for x in IMAGES[:2]:
            model(share(x))[0].mean().backward()
        assert model.second.weight.grad is None
        assert model.norm.bias.grad is None
        first = state_and_gradients(model)
        model(share(IMAGES[2]))[1].mean().backward()
        return {f"first {name}": value for name, value in first.items()} | state_and_gradients(model)

    same_on_ranks(loop)


def test_gradients_of_gradients_of_parameters_are_refused() -> None:
    """What ranks sum has no graph, and a penalty on it would be left out of the gradients without a word."""
    module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    network, x = traced(module, torch.randn(6, 4).double()), torch.randn(6, 4).double()

    def penalised(made: ParallelModule) -> None:
        made(x[made.share()]).mean().backward(create_graph=True)
        slopes = [p.grad for p in made.parameters() if p.grad is not None]
        (made(x[made.share()]).mean() + (slopes[0] * slopes[0])[0, 0]).backward()

    for degrees in (None, {"c": 2}):  # as written; layer by layer
        for text in refused(network, penalised, 2, plan_of(network, 2, degrees)):
            assert text.startswith("the gradient of parameter ")
            assert "create_graph=True" in text

    def stepped(made: ParallelModule) -> dict[str, Tensor | None]:
        update = torch.optim.Adam(made.parameters())
        for graph in (True, False, True):
            update.zero_grad(set_to_none=graph)
            made(x[made.share()]).mean().backward(create_graph=graph)
            made.clip_grad_norm_(0.1)
            update.step()
        return gradients(made)

    whole, *parts = (on_ranks(network, stepped, 2, plan_of(network, 2, degrees)) for degrees in (None, {}))
    for found in parts:
        for name, value in found[0].items():
            assert difference(value, whole[0][name]) <= 1e-9


def test_a_gradient_penalty_of_a_part_within_no_sync_is_called_one() -> None:
    """And not a penalty on weights only."""

    def act(made: ParallelModule) -> None:
        x = torch.randn(3, 4).double().requires_grad_()
        with made.no_sync():
            (slope,) = torch.autograd.grad(made.get_submodule("head")(x).sin().sum(), x, create_graph=True)
            slope.square().sum().backward()

    for text in refused(net()[1], act):
        assert "a part of the model that is called alone, for a gradient penalty" in text
