"""Outputs: what the sink takes of memory, and the losses that are taken of what leaves it.

Of one strategy's storages, and of the claims of all configurations. new: makes the storage of an output, by its slot,
of so many bytes (arrays of any shape); drop: gives up the storages that it has made.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer

TARGET_BYTES = 8  # a class is an int64
T = TypeVar("T")
New = Callable[[int, Floats], T]
Drop = Callable[[Sequence[T]], None]


def returned(new: New[T], drop: Drop[T], sizes: Sequence[Floats], received: Sequence[T]) -> None:
    """Returns outputs, in inference, as copies of what is received; they stay."""
    for slot, size in enumerate(sizes):
        new(slot, size)
    drop(received)


def differentiated(
    new: New[T], drop: Drop[T], model: CostModel, sink: Layer, sizes: Sequence[Floats], received: Sequence[T]
) -> list[T]:
    """The gradients of outputs, which leave as copies of what is received.

    Of those that are no losses the cross entropy is taken, as `layerwise train` does. It has targets and saves
    logarithms, whose gradient comes before that of the output.
    """
    free, batch = model.options.io == "free", model.graph.batch
    uneven = not free and bool(batch % min(model.devices.count, batch))
    copies = [new(slot, size) for slot, size in enumerate(sizes)]
    drop(received)
    scored: list[Floats] = []
    for slot, (size, name, spec) in enumerate(zip(sizes, sink.inputs, sink.specs, strict=True)):
        ends = not spec.differentiable or len(spec.shape) < 2 or name in model.graph.losses
        scored.append(0 * size if ends else size)
        if not ends:
            elements = np.full_like(size, spec.volume) if free else size / spec.item_bytes
            new(slot, elements / spec.shape[1] * TARGET_BYTES)
    # Of 16 bits it is taken in float32.
    wide = [spec.item_bytes == 2 for spec in sink.specs]
    scored = [score * (1 + twice) for score, twice in zip(scored, wide, strict=True)]
    widened = [new(slot, score * twice) for slot, (score, twice) in enumerate(zip(scored, wide, strict=True))]
    logs = [new(slot, size) for slot, size in enumerate(scored)]
    drop([*copies, *widened])
    gradients = list[T]()
    for slot, (size, score, log, twice) in enumerate(zip(sizes, scored, logs, wide, strict=True)):
        flows = model.has_gradient[sink.inputs[slot]]
        first, gradient = new(slot, score), new(slot, np.where(twice, score, size) * flows)
        drop([first, log])
        for copied in (twice, uneven):  # to 16 bits; scaled to the mean over all samples
            if copied:
                made = new(slot, size * flows)
                drop([gradient])
                gradient = made
        gradients.append(gradient)
    return gradients
