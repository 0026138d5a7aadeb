"""Guards: mistakes in a loop of the user's that would go unnoticed, because training looks as if it went on."""

from __future__ import annotations

import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from layerwise.errors import LayerwiseError
from layerwise.run.module import ParallelModule


class _Originals:
    """The parameters of the models that were made parallel, by their ids; a hook of all optimizers looks for them."""

    known: ClassVar[dict[int, weakref.ref[nn.Parameter]]] = {}
    watching: ClassVar[bool] = False


def watch(model: nn.Module, module: ParallelModule) -> None:
    """From now on an optimizer over `model`'s own parameters, which get no gradients, raises at its step."""
    live = {number: ref for number, ref in _Originals.known.items() if ref() is not None}
    mine = {id(p) for p in module.parameters()}
    _Originals.known = live | {id(p): weakref.ref(p) for p in model.parameters() if id(p) not in mine}
    if not _Originals.watching:
        register_optimizer_step_pre_hook(_look)
        _Originals.watching = True


def original(model: nn.Module) -> bool:
    """Whether it was made parallel, and has not been trained: its values are those of before."""
    return any(_original(p) for p in model.parameters())


def written_back(model: nn.Module) -> None:
    """It has the values of the parallel one now."""
    mine = {id(p) for p in model.parameters()}
    _Originals.known = {number: ref for number, ref in _Originals.known.items() if number not in mine}


def _look(optimizer: Optimizer, *_: Any) -> None:
    found = [p for group in optimizer.param_groups for p in group["params"] if _original(p)]
    if found and all(p.grad is None for p in found):
        raise LayerwiseError(
            "build the optimizer over the returned model's parameters: this one has those of the model that "
            "parallelize was given, which get no gradients and would never be trained"
        )


def _original(parameter: object) -> bool:
    ref = _Originals.known.get(id(parameter))
    return ref is not None and ref() is parameter


def without_autocast(module: ParallelModule) -> None:
    """Calls within torch.autocast raise, where they would be computed without it."""
    module.register_forward_pre_hook(_refuse_autocast)


def _refuse_autocast(module: nn.Module, _: Any) -> None:
    assert isinstance(module, ParallelModule)
    if torch.is_autocast_enabled(module.device.type):
        raise LayerwiseError(
            "torch.autocast around the call is not supported by parallelize yet: leave it out, or load the model's "
            "plan with layerwise.run.load(..., autocast=torch.bfloat16)"
        )
