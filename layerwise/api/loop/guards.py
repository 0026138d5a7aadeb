"""Guards: mistakes in a loop of the user's that would go unnoticed, because training looks as if it went on."""

from __future__ import annotations

from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.utils.weak import WeakIdKeyDictionary

from layerwise.errors import LayerwiseError
from layerwise.run.guards.optimizers import before_every_step
from layerwise.run.parallel import ParallelModule

# The parameters of models that were made parallel, and not trained since.
_originals = WeakIdKeyDictionary()


def watch(model: nn.Module, module: ParallelModule) -> None:
    """From now on an optimizer over `model`'s own parameters, which get no gradients, raises at its step."""
    mine = {id(p) for p in module.parameters()}
    for p in model.parameters():
        if id(p) not in mine:
            _originals[p] = None
    before_every_step(_check)


def original(model: nn.Module) -> bool:
    """Whether it was made parallel, and has not been trained: its values are those of before."""
    return any(p in _originals for p in model.parameters())


def written_back(model: nn.Module) -> None:
    """It has the values of the parallel one now."""
    for p in model.parameters():
        if p in _originals:
            del _originals[p]


def _check(optimizer: Optimizer, *_: Any) -> None:
    originals = [p for group in optimizer.param_groups for p in group["params"] if p in _originals]
    if originals and all(p.grad is None for p in originals):
        raise LayerwiseError(
            "build the optimizer over the returned model's parameters: this one has those of the model that "
            "parallelize was given, which get no gradients and would never be trained"
        )
