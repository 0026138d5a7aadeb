"""Kernels: what the stages of a layer make and keep, in bytes on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.base import Kept
from layerwise.partition.place import Place


@dataclass(frozen=True, slots=True, eq=False)
class StageMemory:
    """One operator of a layer on all N devices; arrays are (N,), in bytes."""

    kept: Kept
    made: Floats  # its result
    extra: Floats  # this, `forward` and `between`: as in Kept, where a device has a part of the layer
    forward: Floats
    between: Floats
    slots: tuple[int, ...]  # the layer's inputs that it reads
    tracked: bool  # whether its result has a gradient
    running: bool  # whether the result of the stage before has
    view: bool


def stages_of(layer: Layer, place: Place, flows: Sequence[bool], split: bool) -> list[StageMemory]:
    """A layer's stages on all devices. flows: whether its inputs have a gradient; split: whether its reduction is."""
    rows: list[StageMemory] = []
    running = False
    for stage, gradients in zip(layer.stages, layer.gradients(flows), strict=True):
        space, boxes = stage.space, place.at(stage.epilogue)
        dims, rank = len(space.dims), len(space.out.shape)
        kept = stage.op.kept(stage.specs, boxes.lo[:, :dims], boxes.hi[:, :dims])
        made = place.owned.volume * space.out.item_bytes
        extra, forward, between = (
            np.where(boxes.active, size, 0.0) for size in (kept.extra, kept.forward, kept.between)
        )
        if split and not stage.epilogue:  # partial sums; what leaves of them and what comes; then backward those of all
            extents = (boxes.hi - boxes.lo)[:, :rank].astype(np.float64)
            partial = np.where(boxes.active, extents.prod(1), 0.0) * space.out.item_bytes
            forward, between = forward + 3 * partial, between + 2 * partial
        slots = tuple(range(stage.inputs.stop)[stage.inputs])
        rows.append(StageMemory(kept, made, extra, forward, between, slots, gradients.result, running, stage.op.view))
        running = gradients.result
    return rows
