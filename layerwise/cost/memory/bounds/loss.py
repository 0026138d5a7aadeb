"""Loss: what the sink takes of memory for each output, under all configurations of the layer that makes it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerwise.config import Config, distinct_cells
from layerwise.cost.memory.outputs import TARGET_BYTES
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.partition.moved import Moved, moved, outputs
from layerwise.partition.place import input_maps, place


@dataclass(frozen=True, slots=True, eq=False)
class Scored:
    """One output; arrays are (V, N), in bytes, by configurations of its layer."""

    local: Mask  # (C,) whether nothing travels, by cells
    size: Floats  # what the devices get of it
    received: Floats  # of that, a copy where something travels
    targets: Floats
    scored: Floats  # the logarithms of the cross entropy; 0: none is taken
    wide: bool  # whether it is of 16 bits, and what is taken of it in float32


def scored(model: CostModel, sink: Layer, slot: int, configs: tuple[Config, ...], ends: tuple[Config, ...]) -> Scored:
    """Of the sink's input `slot`, whose layer has these configurations, as `step` has it."""
    spec, name, free = sink.specs[slot], sink.inputs[slot], model.options.io == "free"
    cells, which = distinct_cells(configs)
    rows = [_moved(model, sink, slot, config, ends[0]) for config in cells]
    size = np.stack([row.need for row in rows])[which] * spec.item_bytes
    local = np.array([row.local for row in rows])
    ends_here = not spec.differentiable or len(spec.shape) < 2 or name in model.graph.losses
    twice = spec.item_bytes == 2
    score = np.zeros_like(size) if ends_here else size * (1 + twice)
    elements = np.full_like(size, spec.volume) if free else size / spec.item_bytes
    targets = np.zeros_like(size) if ends_here else elements / spec.shape[1] * TARGET_BYTES
    return Scored(local, size, np.where(local[which, None], 0.0, size), targets, score, twice)


def _moved(model: CostModel, sink: Layer, slot: int, config: Config, end: Config) -> Moved:
    layer, options, devices = model.graph[sink.inputs[slot]], model.options, model.devices.count
    source = place(layer, config, devices, options.io, unfed=layer.name in model.graph.unfed)
    if options.io != "sample":
        return outputs(
            source, sink.specs[slot], options.io, alone=len(sink.specs) == 1, loss=layer.name in model.graph.losses
        )
    maps, epilogue = input_maps(sink, slot)
    return moved(source, maps, place(sink, end, devices, options.io).at(epilogue))
