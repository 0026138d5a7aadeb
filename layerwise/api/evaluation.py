"""Evaluation: the mean loss and metrics over held-out samples, every sample once, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from layerwise.api.feed import Feed
from layerwise.errors import LayerwiseError
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.score import evaluating, filled_batches

IGNORED = -100  # ignore_index of torch's cross_entropy and nll_loss, by default


def check_loss(loss: object) -> None:
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


Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of some samples -> the mean over these


def accuracy(out: Tensor, target: Tensor) -> Tensor:
    """Returns the part of the predictions that are right; dimension 1 is the classes."""
    return (out.argmax(1) == target).double().mean()


def classes(out: object, target: Tensor) -> bool:
    """True if these are scores of classes and their numbers."""
    fits = isinstance(out, Tensor) and out.is_floating_point() and out.dim() == target.dim() + 1
    return fits and not target.is_floating_point()


def evaluate(
    module: ParallelModule,
    held_out: Feed,
    loss: Metric,
    metrics: Mapping[str, Metric],
    after: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """Returns `loss` and each metric by its name: means over all samples. Every rank calls this alike.

    The last batch is filled up to the plan's size with samples that do not count. Accuracy comes by itself where the
    outputs are scores of classes. `after` is called after every batch.
    """
    batches = list(filled_batches(module, held_out.count))
    totals: dict[str, float] = {}
    with evaluating(module):
        loaded = held_out.batches([numbers.tolist() for numbers, _ in batches])
        for (_, counts), (inputs, target) in zip(batches, loaded, strict=True):
            check_targets(loss, target[counts], held_out.name)
            out = module(*inputs, batch=of(module).plan.batch)
            after()
            counted, targets = _counted(out, counts), target.to(of(module).device)[counts]
            if not int(counts.sum()):
                continue
            default = {"accuracy": accuracy} if classes(counted, targets) else {}
            for name, metric in {**default, **metrics, "loss": loss}.items():
                totals[name] = totals.get(name, 0.0) + float(metric(counted, targets)) * int(counts.sum())
    everyone = of(module).comm.all_gather_object(totals)
    names = dict.fromkeys(name for of_rank in everyone for name in of_rank)
    ranks = everyone[:1] if of(module).plan.io != "sample" else everyone
    return {name: sum(of_rank.get(name, 0.0) for of_rank in ranks) / held_out.count for name in names}


def _counted(out: Any, counts: Tensor) -> Any:
    """Returns the outputs of the samples that count."""
    if isinstance(out, Tensor):
        return out[counts]
    if isinstance(out, Mapping):
        return {name: _counted(value, counts) for name, value in out.items()}
    assert isinstance(out, tuple | list), type(out)
    return type(out)(_counted(value, counts) for value in out)
