"""Kernels: what the stages of a layer make and keep, in bytes on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerwise.graph.layer import Layer
from layerwise.ops.base import Kept
from layerwise.partition.place import Place

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True, eq=False)
class StageMemory:
    """One operator of a layer. Bytes are (N,): made, its result; extra, there, back: see ops.base.Kept.

    slots: the layer's inputs that it reads. tracked: whether its result has a gradient; running: whether that of the
    stage before has.
    """

    kept: Kept
    made: Floats
    extra: Floats
    there: Floats
    back: Floats
    slots: tuple[int, ...]
    tracked: bool
    running: bool
    view: bool


def stages_of(layer: Layer, place: Place, flows: Sequence[bool], split: bool) -> list[StageMemory]:
    """A layer's stages on all devices. flows: whether its inputs have a gradient; split: whether its reduction is."""
    rows: list[StageMemory] = []
    running = False
    for stage, gradients in zip(layer.stages, layer.gradients(flows), strict=True):
        where, boxes = stage.space, place.at(stage.epilogue)
        dims, rank = len(where.dims), len(where.out.shape)
        kept = stage.op.kept(stage.specs, boxes.lo[:, :dims], boxes.hi[:, :dims])
        made = place.owned.volume * where.out.item_bytes
        extra, there, back = (np.where(boxes.there, size, 0.0) for size in (kept.extra, kept.forward, kept.between))
        if split and not stage.epilogue:  # partial sums; what leaves of them and what comes; then backward those of all
            extents = (boxes.hi - boxes.lo)[:, :rank].astype(np.float64)
            partial = np.where(boxes.there, extents.prod(1), 0.0) * where.out.item_bytes
            there, back = there + 3 * partial, back + 2 * partial
        slots = tuple(range(stage.inputs.stop)[stage.inputs])
        rows.append(StageMemory(kept, made, extra, there, back, slots, gradients.result, running, stage.op.view))
        running = gradients.result
    return rows
