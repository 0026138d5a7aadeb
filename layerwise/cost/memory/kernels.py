"""Kernels: what the stages of a layer make and keep, in bytes on every device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.base import Stage
from layerwise.ops.facts import Saved
from layerwise.ops.tensor.pointwise import Cast
from layerwise.partition.place import Place
from layerwise.tensor import ITEM_BYTES

BEFORE = -1  # instead of a slot: the result of the stage before


@dataclass(frozen=True, slots=True, eq=False)
class StageMemory:
    """One operator of a layer on all N devices; arrays are (N,), in bytes."""

    saved: Saved
    made: Floats  # its result
    extra: Floats  # this, `forward` and `between`: as in Saved, where a device has a part of the layer
    forward: Floats
    between: Floats
    slots: tuple[int, ...]  # the layer's inputs that it reads
    tracked: bool  # whether its result has a gradient
    running: bool  # whether the result of the stage before has
    view: bool
    copies: dict[int, Floats]  # what autocast reads a copy of: by slot, BEFORE for the result of the stage before
    weights: Floats  # the copies that it makes of weights
    padded: Floats  # of `extra` and `between`, of a padded copy of its first input; see `given_padded`

    def given_padded(self) -> StageMemory:
        """The stage where that input travels: it arrives padded, which it saves instead of a copy."""
        saved = replace(self.saved, inputs=self.saved.inputs | (self.padded > 0))
        return replace(self, saved=saved, extra=self.extra - self.padded, between=self.between - self.padded)


def stages_of(layer: Layer, place: Place, flows: Sequence[bool], split: bool) -> list[StageMemory]:
    """A layer's stages on all devices. flows: whether its inputs have a gradient; split: whether its reduction is."""
    rows: list[StageMemory] = []
    running = False
    for stage, gradients in zip(layer.stages, layer.gradients(flows), strict=True):
        space, boxes = stage.space, place.at(stage.epilogue)
        dims, rank = len(space.dims), len(space.out.shape)
        saved = stage.op.saved(stage.specs, boxes.lo[:, :dims], boxes.hi[:, :dims])
        made = place.owned.volume * space.out.item_bytes
        around = 0.0 if stage.epilogue or (stage.views and stage.views[0]) else saved.padded
        extra, forward, between, padded = (
            np.where(boxes.active, size, 0.0) for size in (saved.extra, saved.forward, saved.between, around)
        )
        if split and not stage.epilogue:  # partial sums; what leaves of them and what comes; then backward those of all
            extents = (boxes.hi - boxes.lo)[:, :rank].astype(np.float64)
            partial = np.where(boxes.active, extents.prod(1), 0.0) * space.out.item_bytes
            forward, between = forward + 3 * partial, between + 2 * partial
        slots = tuple(range(stage.inputs.stop)[stage.inputs])
        flags = gradients.result, running, stage.view
        copies, weights = _copies(layer, stage, place, slots)
        rows.append(StageMemory(saved, made, extra, forward, between, slots, *flags, copies, weights, padded))
        running = gradients.result
    return rows


def remembered(layer: Layer, place: Place) -> list[tuple[str, Floats]]:
    """The running statistics, to which training writes, where they are computed."""
    rows = ((name, place.at(p.epilogue).needs(p.maps).volume * ITEM_BYTES[d]) for name, p, d in layer.remembered)
    return [(name, np.where(place.computed.active, size, 0.0)) for name, size in rows]


def _copies(layer: Layer, stage: Stage, place: Place, slots: Sequence[int]) -> tuple[dict[int, Floats], Floats]:
    """The casts of autocast for a stage, to the type that it makes: bytes by slot, and of weights.

    Matrix products cast all that they read; so do operators that autocast brings to float32.
    """
    out, none = stage.space.out, np.zeros(len(place.owned.volume))
    if layer.types is None or not out.differentiable:
        return {}, none
    product = bool(stage.op.gemms(stage.specs, np.ones((1, len(stage.space.dims)), np.int64)))
    types = [spec.dtype for spec in stage.specs if spec.differentiable]
    if isinstance(stage.op, Cast) or not (product or (types and out.dtype not in types)):
        return {}, none
    boxes = place.at(stage.epilogue)
    sources = list(slots) if stage.slot is None else [*slots[: stage.slot], BEFORE, *slots[stage.slot :]]
    copies = {
        slot: boxes.needs(maps).volume * out.item_bytes
        for slot, maps, spec in zip(sources, stage.space.needs, stage.specs, strict=True)
        if spec.differentiable and spec.dtype != out.dtype
    }
    number = next(i for i, one in enumerate(layer.stages) if one is stage)
    if not product or layer.types.parameters[number] == out.dtype:
        return copies, none
    weights = [place.at(p.epilogue).needs(p.maps).volume for p in layer.space.parameters[stage.parameters]]
    return copies, sum(weights, none) * out.item_bytes


def update(sizes: Sequence[Floats], model: CostModel) -> Iterator[Floats]:
    """Bytes that an optimizer's step takes meanwhile, for parameters of these bytes: Adam has its denominators.

    For all parameters at once (PyTorch's foreach, https://pytorch.org/docs/stable/generated/torch.optim.Adam.html),
    but on a CPU for one after the other: its root and that divided, beside the last one's.
    """
    if model.options.optimizer != "adam":
        return
    before = np.zeros(model.devices.count)
    if model.devices.device_type != "cpu":
        yield sum(sizes, before)
        return
    for size in sizes:
        yield before + 2 * size
        before = size
