"""Backward passes that training loops do, beside one of a loss: on ranks as on one device, or refused in a sentence."""

import copy
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from layerwise.geometry import Box
from layerwise.importers.load import Network
from layerwise.plan import Plan
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule
from tests.run.plans import difference
from tests.run.small_modules import SAMPLES, loss, mlp, on_ranks, plan_of, refused, traced

Loop = Callable[[nn.Module, Tensor], list[Tensor]]  # of a module and a rank's samples: numbers of these samples
CUTS: list[tuple[int, Mapping[str, int]]] = [
    (2, {"n": 2}), (2, {"c": 2}), (2, {"k": 2}), (2, {}), (3, {"c": 3}), (4, {"n": 2, "c": 2}), (4, {"c": 2, "k": 2}),
]  # fmt: skip


class Images(nn.Module):
    """Halos, a branch, and smooth enough to be differentiated twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(1, 4, 3, padding=1)
        self.left, self.right = nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)
        self.head = nn.Conv2d(4, 2, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.softplus(self.first(x))
        return self.head(torch.tanh(self.left(x)) + self.right(x)).mean((2, 3))


PICTURES = torch.randn(12, 1, 6, 6, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


@cache
def smooth() -> tuple[nn.Module, Network]:
    torch.manual_seed(3)
    module = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6), nn.Softplus(), nn.Linear(6, 6)).double()
    return module, traced(module, SAMPLES.flatten(0, 1)[:12])


@cache
def images() -> tuple[nn.Module, Network]:
    torch.manual_seed(4)
    module = Images().double()
    return module, traced(module, PICTURES)


def whole(modules: list[tuple[list[tuple[str, tuple[int, ...], Box]], dict[str, Tensor]]]) -> dict[str, Tensor]:
    """The gradients of all parameters, put together from those of the ranks, who agree where they hold the same."""
    result: dict[str, Tensor] = {}
    for held, gradients in modules:
        for name, shape, box in held:
            full = result.setdefault(name, torch.full(shape, torch.nan, dtype=torch.float64))
            known = full[box.slices()]
            assert bool((known.isnan() | (difference(known, gradients[name]) <= 1e-12)).all()), name
            full[box.slices()] = gradients[name]
    return result


def check(given: tuple[nn.Module, Network], samples: Tensor, ranks: int, degrees: Mapping[str, int] | Plan) -> None:
    """Each loop's numbers and the parameters' gradients afterwards, on ranks and on one device."""
    module, network = copy.deepcopy(given[0]), given[1]

    def rank(made: ParallelModule) -> list[Any]:
        told = []
        for loop in LOOPS:
            made.zero_grad()
            numbers = loop(made, samples[made.share()])
            gradients = {n: local_tensor(p.grad).clone() for n, p in made.named_parameters() if p.grad is not None}
            held = [(shard.name, shard.shape, shard.box) for shard in made.shards() if shard.name in gradients]
            told.append(((held, gradients), numbers))
        return told

    plan = degrees if isinstance(degrees, Plan) else plan_of(network, ranks, degrees)
    for loop, told in zip(LOOPS, zip(*on_ranks(network, rank, ranks, plan), strict=True), strict=True):
        module.zero_grad()
        single, together = loop(module, samples), whole([gradients for gradients, _ in told])
        assert set(together) >= {name for name, p in module.named_parameters() if p.grad is not None}, loop
        for name, gradient in together.items():
            expected = module.get_parameter(name).grad  # where PyTorch has none, a rank may have zeros
            wanted = torch.zeros_like(gradient) if expected is None else expected
            assert difference(gradient, wanted) <= 1e-9, (loop, name)
        for i, number in enumerate(single):
            assert difference(torch.cat([numbers[i] for _, numbers in told]), number) <= 1e-9, loop


def twice(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Two passes through one forward pass; the gradients add up."""
    out = loss(module(x))
    out.backward(retain_graph=True)
    (3 * out).backward()
    return []


def two_losses(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Two forward passes, one backward pass; and one more, of two losses of one output."""
    (loss(module(x)) + 2 * loss(module(x * 0.5))).backward()
    out = module(x + 1)
    out.mean().backward(retain_graph=True)
    loss(out).backward()
    return []


def of_inputs(module: nn.Module, x: Tensor) -> list[Tensor]:
    """Adversarial samples: gradients of a sum and by `backward`."""
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(module(x).square().sum(), x)
    adversarial = (x + 0.1 * g.sign()).detach().requires_grad_()
    loss(module(adversarial)).backward()
    assert adversarial.grad is not None
    return [g]


def penalty(module: nn.Module, x: Tensor) -> list[Tensor]:
    """A gradient penalty, as of a Wasserstein GAN's critic."""
    x = x.clone().requires_grad_()
    out = module(x)
    (g,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    (out.mean() + 10 * (g.flatten(1).norm(dim=1) - 1).square().mean()).backward()
    return [g.detach()]


def only_penalty(module: nn.Module, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    (g,) = torch.autograd.grad(module(x).sum(), x, create_graph=True)
    g.square().flatten(1).sum(1).mean().backward()
    return []


LOOPS = [twice, two_losses, of_inputs, penalty, only_penalty]


@pytest.mark.parametrize(("ranks", "degrees"), CUTS)
def test_passes_of_a_multilayer_perceptron(ranks: int, degrees: Mapping[str, int]) -> None:
    check(smooth(), SAMPLES.flatten(0, 1)[:12], ranks, degrees)


@pytest.mark.parametrize(("ranks", "degrees"), [(2, {"h": 2}), (4, {"h": 2, "w": 2}), (4, {"n": 2, "w": 2})])
def test_passes_with_halos(ranks: int, degrees: Mapping[str, int]) -> None:
    check(images(), PICTURES, ranks, degrees)


def test_a_second_pass_without_retain_graph_is_pytorchs_own_error_on_every_rank() -> None:
    _, network = smooth()

    def rank(made: ParallelModule) -> None:
        out = loss(made(SAMPLES.flatten(0, 1)[:12][made.share()]))
        out.backward()
        with pytest.raises(RuntimeError, match="second time"):
            out.backward()

    for degrees in ({"c": 2}, {}):
        on_ranks(network, rank, 2, plan_of(network, 2, degrees))


def test_gradients_of_inputs_of_unlike_shares_are_refused() -> None:
    _, network = mlp()
    x = SAMPLES[0].clone().requires_grad_()
    for text in refused(network, lambda made: made(x[made.share(7)], batch=7)):
        assert "requires a gradient, which layerwise computes only if all ranks feed the same number of samples" in text
