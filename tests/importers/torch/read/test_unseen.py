"""What a model does in Python or in autograd is noticed while it is traced."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from inspect import getattr_static
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.from_torch import from_torch
from layerwise.importers.torch.read.unseen import TraceWatch

Step = Callable[[nn.Module, Tensor], Tensor]
X = torch.zeros(2, 4)


class Net(nn.Module):
    def __init__(self, between: Step) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.between, self.steps, self.tally = between, 0, {"steps": 0}

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self, self.first(x)))


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x + x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def hooked(_: nn.Module, x: Tensor) -> Tensor:
    x.register_hook(lambda gradient: gradient)  # type: ignore[no-untyped-call]
    return x


def counted(net: nn.Module, x: Tensor) -> Tensor:
    net.steps += 1  # type: ignore[operator]
    return x * (net.steps > 3)


def tallied(net: nn.Module, x: Tensor) -> Tensor:
    net.tally["steps"] += 1  # type: ignore[index, operator]
    return x


def inferred(_: nn.Module, x: Tensor) -> Tensor:
    with torch.inference_mode():
        return x.sum()


def twice(reentrant: bool) -> Step:
    return lambda net, x: checkpoint(lambda y: torch.relu(net.norm(y)), x, use_reentrant=reentrant)


@pytest.mark.parametrize(
    ("between", "words"),
    [
        (lambda net, x: Doubled.apply(x), "has an autograd function, Doubled,"),
        (hooked, "registers a hook of a gradient"),
        (lambda net, x: x + torch.autograd.grad(x.sum(), net.first.weight)[0].sum(), "calls torch.autograd.grad"),
        (lambda net, x: x if x.grad_fn is None else -x, "looks at x.grad_fn"),
        (lambda net, x: inferred(net, x) + x, "uses torch.inference_mode"),
        (tallied, "changes its attribute 'tally'"),
        (twice(reentrant=False), "moves running statistics of batch norms twice"),
        (twice(reentrant=True), "moves running statistics of batch norms twice"),
    ],
)
def test_noticed(between: Step, words: str) -> None:
    net, watch = Net(between), TraceWatch()
    with watch.on(net):
        net(X)
    assert [found for found in watch.found if words in found] == list(watch.found) != []


def test_exported() -> None:
    net = Net(lambda net, x: counted(net, Doubled.apply(x)))
    assert [found.split()[0] for found in from_torch(net, X).unseen] == ["has", "changes"]
    assert net.steps == 0  # as before


def sized(net: nn.Module, x: Tensor) -> Tensor:
    net.steps, net.training = x.shape[1], True
    return x


def flagged(net: nn.Module, x: Tensor) -> Tensor:
    first, net.steps = net.steps == 0, 1
    return -x if first else x


@pytest.mark.parametrize(
    ("between", "words"), [(counted, "changes its attribute 'steps'"), (flagged, "changes its"), (sized, None)]
)
def test_numbers_that_a_forward_changes(between: Step, words: str | None) -> None:
    """What is set once, and changes nothing then, is not lost."""
    net = Net(between)
    unseen = from_torch(net, X).unseen
    assert unseen == () if words is None else words in unseen[0]
    assert net.steps == 0  # as before


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_layers_are_layers(reentrant: bool) -> None:
    net = Net(lambda net, x: checkpoint(torch.relu, x, use_reentrant=reentrant))
    made, plain = from_torch(net, X), from_torch(Net(lambda net, x: torch.relu(x)), X)
    assert made.unseen == ()
    assert [(layer.op, layer.frozen) for layer in made.layers] == [(layer.op, layer.frozen) for layer in plain.layers]


def test_what_reentrant_checkpointing_does_not_differentiate() -> None:
    """PyTorch warns of it, and gives no gradients."""
    net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net, self.last = net, nn.Linear(4, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(checkpoint(self.net, x, use_reentrant=True))

    graph = from_torch(Outer(), X)
    assert graph.unreached == {"net.0.weight", "net.0.bias", "net.1.weight", "net.1.bias"}


@pytest.mark.parametrize("draw", [random.random, np.random.rand])
def test_other_random_numbers_are_refused(draw: Callable[[], float]) -> None:
    with pytest.raises(LayerwiseError, match="draws from Python's or numpy's random numbers"):
        from_torch(Net(lambda net, x: x if draw() < 0.5 else -x), X)


def test_other_threads_are_not_watched() -> None:
    other = Net(lambda net, x: Doubled.apply(twice(reentrant=True)(net, hooked(net, x))))
    watch, before = TraceWatch(), getattr_static(torch.autograd.Function, "apply")
    made: list[Tensor] = []
    with watch.on(other):
        thread = threading.Thread(target=lambda: made.append(other(torch.randn(2, 4))))
        thread.start()
        thread.join()
    assert watch.found == {}
    made[0].sum().backward()
    assert other.norm.num_batches_tracked == 2  # it was checkpointed
    assert getattr_static(torch.autograd.Function, "apply") is before
