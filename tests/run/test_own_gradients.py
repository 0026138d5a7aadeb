"""A model that several ranks run as it was written: its gradients are one device's, or refused."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor, nn

from layerwise.importers.load import Network
from layerwise.run.parallel import ParallelModule
from tests.run.own_modules import IMAGES, calm, loss, net, same_on_ranks, state_and_gradients
from tests.run.plans import difference
from tests.run.small_modules import gradients, on_ranks, plan_of, refused, traced


def test_penalties_clipping_accumulation() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        for number, x in enumerate(IMAGES):
            penalty = sum(p.square().sum() for p in model.parameters())
            (loss(model(share(x))) + 0.1 * penalty).backward()
            if number % 2:
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad(set_to_none=number == 1)
        loss(model(share(IMAGES[0]))).backward()
        (0.1 * model.head.weight.square().sum()).backward()  # alone
        return state_and_gradients(model)

    same_on_ranks(loop)


def test_no_sync() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        for synchronised in (True, False, False, True, False):
            if isinstance(model, ParallelModule) and not synchronised:
                with model.no_sync():
                    loss(model(share(IMAGES[0]))).backward()
            else:
                loss(model(share(IMAGES[0]))).backward()
        loss(model(share(IMAGES[1]))).backward()
        return state_and_gradients(model)

    same_on_ranks(loop)


def test_several_losses_and_passes() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        first, second = model(share(IMAGES[0]))
        first.square().mean().backward(retain_graph=True)
        second.sin().mean().backward(retain_graph=True)
        first.exp().mean().backward()
        out = (model(share(x)) for x in IMAGES[:2])
        sum(loss(each) for each in out).backward()
        return state_and_gradients(model)

    same_on_ranks(loop)


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


def test_gradients_of_inputs_and_a_penalty_of_them() -> None:
    @cache
    def case() -> tuple[nn.Module, Network]:
        torch.manual_seed(0)
        module = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 1)).double()
        return module, traced(module, torch.randn(6, 4).double())

    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        x = share(torch.randn(6, 4, generator=torch.Generator().manual_seed(3)).double()).clone().requires_grad_()
        out = model(x)
        (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        penalty.backward(retain_graph=True)
        (out.mean() + penalty).backward()
        return {"own slope": slope.detach()} | state_and_gradients(model)

    same_on_ranks(loop, case, ranks=(2, 3))


def test_a_gradient_penalty_through_global_statistics() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        x = share(IMAGES[0]).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(x)[0].sum(), x, create_graph=True)
        slope.square().sum((1, 2, 3)).mean().backward()
        return gradients(model)

    same_on_ranks(loop, calm)


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


def test_gradients_asked_for_by_name_are_refused() -> None:
    """They would be this rank's only."""

    def act(made: ParallelModule) -> None:
        torch.autograd.grad(loss(made(IMAGES[0][made.share()])), made.head.weight)

    for text in refused(net()[1], act):
        assert text.startswith("torch.autograd.grad with respect to parameter 'head.weight' would give")


def test_hooks_of_parameters_have_the_gradient_of_all() -> None:
    def loop(model: nn.Module, share: Callable[[Tensor], Tensor]) -> dict[str, Tensor | None]:
        seen = dict[str, Tensor | None]()

        def hook(p: Tensor) -> None:
            assert p.grad is not None
            seen[f"in the hook {len(seen)}"] = p.grad.clone()

        handle = model.head.weight.register_post_accumulate_grad_hook(hook)
        for x in IMAGES[:2]:
            loss(model(share(x))).backward()
        handle.remove()
        loss(model(share(IMAGES[2]))).backward()
        assert len(seen) == 2
        return seen | state_and_gradients(model)

    same_on_ranks(loop)
