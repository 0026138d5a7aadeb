"""Outputs: what the sink takes of memory, and the losses that are taken of what leaves it."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.cost.memory.allocations import AllocationTracker, Ref
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer

TARGET_BYTES = 8  # a class is an int64


def returned(tracker: AllocationTracker, sizes: Sequence[Floats], received: Sequence[Ref]) -> None:
    """In inference outputs of (N,) bytes leave as copies of what is received, and stay."""
    for size in sizes:
        tracker.new(size)
    _drop(tracker, received)


def differentiated(
    tracker: AllocationTracker, model: CostModel, sink: Layer, sizes: Sequence[Floats], received: Sequence[Ref]
) -> list[Ref]:
    """The gradients of outputs of (N,) bytes, which leave as copies of what is received.

    Of those that are no losses the cross entropy is taken, as `layerwise train` does. It has targets and keeps
    logarithms, whose gradient comes before that of the output.
    """
    free, batch = model.options.io == "free", model.graph.batch
    uneven = not free and bool(batch % min(model.devices.count, batch))
    copies = [tracker.new(size) for size in sizes]
    _drop(tracker, received)
    scored: list[Floats] = []
    for size, name, spec in zip(sizes, sink.inputs, sink.specs, strict=True):
        ends = not spec.differentiable or len(spec.shape) < 2 or name in model.graph.losses
        scored.append(0 * size if ends else size)
        if not ends:
            elements = np.full_like(size, spec.volume) if free else size / spec.item_bytes
            tracker.new(elements / spec.shape[1] * TARGET_BYTES)
    # Of 16 bits it is taken in float32.
    wide = [spec.item_bytes == 2 for spec in sink.specs]
    scored = [score * (1 + twice) for score, twice in zip(scored, wide, strict=True)]
    widened = [tracker.new(score * twice) for score, twice in zip(scored, wide, strict=True)]
    logs = [tracker.new(size) for size in scored]
    _drop(tracker, [*copies, *widened])
    gradients = list[Ref]()
    for slot, (size, score, log, twice) in enumerate(zip(sizes, scored, logs, wide, strict=True)):
        flows = model.has_gradient[sink.inputs[slot]]
        first, gradient = tracker.new(score), tracker.new(np.where(twice, score, size) * flows)
        _drop(tracker, [first, log])
        for again in (twice, uneven):  # as 16 bits again; scaled to the mean over all samples
            if again:
                made = tracker.new(size * flows)
                tracker.drop(gradient)
                gradient = made
        gradients.append(gradient)
    return gradients


def _drop(tracker: AllocationTracker, refs: Sequence[Ref]) -> None:
    for ref in refs:
        tracker.drop(ref)
