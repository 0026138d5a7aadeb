"""Evaluation: the mean loss and metrics over held-out samples, every sample once, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerwise.api.feed import Feed
from layerwise.run.parallel import ParallelModule, of
from layerwise.train.score import evaluating

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of some samples -> the mean over these


def accuracy(out: Tensor, target: Tensor) -> Tensor:
    """Returns the part of the predictions that are right; dimension 1 is the classes."""
    return (out.argmax(1) == target).double().mean()


def classes(out: object, target: Tensor) -> bool:
    """True if these are scores of classes and their numbers."""
    fits = isinstance(out, Tensor) and out.is_floating_point() and out.dim() == target.dim() + 1
    return fits and not target.is_floating_point()


def evaluate(module: ParallelModule, held_out: Feed, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """Returns each metric by its name: means over all samples. Every rank calls this alike.

    The last batch is filled up to the plan's size with samples that do not count. Accuracy comes by itself where the
    outputs are scores of classes.
    """
    count, size, totals = len(held_out.dataset), of(module).plan.batch, dict[str, float]()
    batches = [[i if i < count else 0 for i in range(first, first + size)] for first in range(0, count, size)]
    with evaluating(module):
        for first, (inputs, targets) in zip(range(0, count, size), held_out.batches(module, batches), strict=True):
            out = module(*inputs, batch=size)
            counts = torch.arange(first, first + size)[of(module).share(size)] < count
            counted, target = _counted(out, counts), targets[counts]
            if not int(counts.sum()):
                continue
            default = {"accuracy": accuracy} if classes(counted, target) else {}
            for name, metric in {**default, **metrics}.items():
                totals[name] = totals.get(name, 0.0) + float(metric(counted, target)) * int(counts.sum())
    everyone = of(module).comm.all_gather_object(totals)
    names = dict.fromkeys(name for of_rank in everyone for name in of_rank)
    ranks = everyone[:1] if of(module).plan.io != "sample" else everyone
    return {name: sum(of_rank.get(name, 0.0) for of_rank in ranks) / count for name in names}


def _counted(out: Any, counts: Tensor) -> Any:
    """Returns the outputs of the samples that count."""
    if isinstance(out, Tensor):
        return out[counts]
    if isinstance(out, Mapping):
        return {name: _counted(value, counts) for name, value in out.items()}
    assert isinstance(out, tuple | list), type(out)
    return type(out)(_counted(value, counts) for value in out)
