"""Losses: those that are no mean over samples, so that means over ranks' samples would not be those of one device."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.errors import LayerwiseError

IGNORED = -100  # ignore_index of torch's cross_entropy and nll_loss, by default


def check(loss: object) -> None:
    """LayerwiseError for what cannot be called, sums, or weights the samples by their classes."""
    if not callable(loss):
        raise LayerwiseError(
            f"loss is of type {type(loss).__name__}: give a function of outputs and targets, such as "
            "nn.CrossEntropyLoss()"
        )
    if getattr(loss, "reduction", "mean") != "mean":
        raise LayerwiseError("the loss must be a mean over samples: give one with reduction='mean'")
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss) and loss.weight is not None:
        raise LayerwiseError(
            f"{type(loss).__name__} with class weights is no mean over samples, so it would depend on the number of "
            "ranks: leave weight= out"
        )


def check_targets(loss: object, target: Tensor, name: str) -> None:
    """LayerwiseError where the loss leaves some of these out: the rest is not what its mean is taken for."""
    index = _ignored(loss)
    if index is not None and not target.is_floating_point() and bool((target == index).any()):
        raise LayerwiseError(
            f"{name} has targets of {index}, which the loss ignores (ignore_index), so it would be no mean over "
            "samples and depend on the number of ranks: leave these samples out"
        )


def _ignored(loss: object) -> int | None:
    if isinstance(loss, nn.CrossEntropyLoss | nn.NLLLoss):
        return int(loss.ignore_index)
    return IGNORED if loss is F.cross_entropy or loss is F.nll_loss else None
