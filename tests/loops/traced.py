"""Rows about what a model does in its forward that a trace of its operators does not show."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.loops.row import Numbers, row, train
from tests.loops.setting import Net, Setting


class Checkpointed(Net):
    """Computes its convolutions twice."""

    def __init__(self, *, smooth: bool, reentrant: bool) -> None:
        super().__init__(smooth=smooth)
        self.reentrant = reentrant

    def forward(self, x: Tensor) -> Tensor:
        again = checkpoint(self.middle, self.first(x), use_reentrant=self.reentrant)
        return self.head(torch.tanh(self.hidden(torch.tanh(again).flatten(1))))

    def middle(self, x: Tensor) -> Tensor:
        x = torch.nn.functional.softplus(self.norm(x))
        return self.second(x)


class Reversed(torch.autograd.Function):
    """Gradients go back with the other sign."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return -gradient


class Adversarial(Net):
    """Its convolutions are trained against its head."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.norm(self.first(x)))).flatten(1)
        made: Tensor = self.head(torch.tanh(self.hidden(Reversed.apply(x))))  # type: ignore[no-untyped-call]
        return made


class Damped(Net):
    """Halves a gradient on its way."""

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.second(self.norm(self.first(x))))
        if x.requires_grad:
            x.register_hook(lambda gradient: gradient / 2)  # type: ignore[no-untyped-call]
        return self.head(torch.tanh(self.hidden(x.flatten(1))))


class Functional(Net):
    """Gives the statistics of its batch norm to a function."""

    def forward(self, x: Tensor) -> Tensor:
        norm = self.norm
        assert isinstance(norm, nn.BatchNorm2d)
        x = F.batch_norm(self.first(x), norm.running_mean, norm.running_var, norm.weight, norm.bias, self.training)
        return self.head(torch.tanh(self.hidden(torch.tanh(self.second(x)).flatten(1))))


@row
def functional_norm(setting: Setting) -> Numbers:
    """`F.batch_norm` with the statistics of a module"""
    return train(setting, setting.parallel(Functional()))


@row
def checkpointed_inside(setting: Setting) -> Numbers:
    """`torch.utils.checkpoint` inside the model"""
    made = {}
    for reentrant in (False, True):
        model = setting.parallel(Checkpointed(smooth=True, reentrant=reentrant))
        made |= {f"{name} {reentrant}": value for name, value in train(setting, model).items()}
    return made


@row
def checkpointed_norm(setting: Setting) -> Numbers:
    """a batch norm within `torch.utils.checkpoint`"""
    return train(setting, setting.parallel(Checkpointed(smooth=False, reentrant=False)))


@row
def function(setting: Setting) -> Numbers:
    """an autograd function with a backward pass of its own"""
    return train(setting, setting.parallel(Adversarial()))


@row
def hook_inside(setting: Setting) -> Numbers:
    """`x.register_hook` in the model's forward"""
    return train(setting, setting.parallel(Damped()))
