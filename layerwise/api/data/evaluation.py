"""Evaluation: the mean loss and metrics over held-out samples, every sample once, by all ranks together."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from layerwise.api.data.feed import Feed
from layerwise.api.loop import losses
from layerwise.run.parallel import ParallelModule
from layerwise.train.objective import filled_batches

Metric = Callable[[Tensor, Tensor], Tensor]  # (outputs, targets) of some samples -> the mean over these


def accuracy(out: Tensor, target: Tensor) -> Tensor:
    """The part of the predictions that are right; dimension 1 is the classes."""
    return (out.argmax(1) == target).double().mean()


def classes(out: object, target: Tensor) -> bool:
    """Whether these are scores of classes and their numbers."""
    fits = isinstance(out, Tensor) and out.is_floating_point() and out.dim() == target.dim() + 1
    return fits and not target.is_floating_point()


def evaluate(module: ParallelModule, held_out: Feed, loss: Metric, metrics: Mapping[str, Metric]) -> dict[str, float]:
    """`loss`, and each metric by its name: means over all samples. Every rank calls this alike.

    The last batch is filled up to the plan's size with samples that do not count. Accuracy comes by itself where the
    outputs are scores of classes.
    """
    batches = list(filled_batches(module, held_out.count))
    totals: dict[str, float] = {}
    training = module.training
    module.eval()
    try:
        with torch.no_grad():
            loaded = held_out.batches([numbers.tolist() for numbers, _ in batches])
            for (_, counts), (inputs, target) in zip(batches, loaded, strict=True):
                losses.check_targets(loss, target[counts], held_out.name)
                out = module(*inputs, batch=module.plan.batch)
                kept, wanted = _kept(out, counts), target.to(module.device)[counts]
                if not int(counts.sum()):
                    continue
                default = {"accuracy": accuracy} if classes(kept, wanted) else {}
                for name, metric in {**default, **metrics, "loss": loss}.items():
                    totals[name] = totals.get(name, 0.0) + float(metric(kept, wanted)) * int(counts.sum())
    finally:
        module.train(training)
    everyone = module.comm.all_gather_object(totals)
    names = dict.fromkeys(name for one in everyone for name in one)
    ranks = everyone[:1] if module.io == "free" else everyone
    return {name: sum(one.get(name, 0.0) for one in ranks) / held_out.count for name in names}


def _kept(out: Any, counts: Tensor) -> Any:
    """The outputs of the samples that count."""
    if isinstance(out, Tensor):
        return out[counts]
    if isinstance(out, Mapping):
        return {name: _kept(value, counts) for name, value in out.items()}
    assert isinstance(out, tuple | list), type(out)
    return type(out)(_kept(value, counts) for value in out)
