"""Collectives of a layer: gradients after the backward pass, statistics and reductions inside it. Who, and how much."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from layerwise.cost.collectives import Groups, group_shapes
from layerwise.cost.setting import Setting
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.machine import DeviceGraph
from layerwise.ops.facts import Parameter
from layerwise.partition.largest import all_boxes, largest_box, largest_extents
from layerwise.partition.layout import Cells, Layout
from layerwise.partition.sharding import sharded_each, states_of


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a layer under C configurations."""

    size_bytes: Floats  # (C,) of the member with the largest box
    total_bytes: Floats  # (C,) of all devices together
    group_shapes: Groups  # (C,) of the devices that agree in the dimensions `keys` of their cells
    cells: Cells
    keys: tuple[int, ...]
    epilogue: bool = False  # whether what travels belongs to a fused follower, whose boxes may differ


def gradients_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """What is all-reduced after the backward pass, one entry for each kind of box."""
    by_keys: dict[tuple[tuple[int, ...], bool], tuple[Floats, Floats]] = {}
    zero = np.zeros(len(layout.computed.degrees))
    for _, p, item_bytes in layer.held():
        if p.trainable:
            degrees = layout.at(p.epilogue).degrees
            whole = _replicated(setting, layer, p, layout)
            keys = tuple(sorted({m.source for m in p.maps if m.source is not None}))
            size, total = by_keys.get((keys, p.epilogue), (zero, zero))
            size = size + largest_box(p.maps, layer.space.dims, degrees) * item_bytes * whole
            total = total + all_boxes(p.maps, layer.space.dims, degrees) * item_bytes * whole
            by_keys[keys, p.epilogue] = size, total
    collectives: list[Collective] = []
    for (keys, epilogue), (size, total) in by_keys.items():
        cells = layout.at(epilogue)
        held = total * cells.count / cells.degrees.prod(1)  # in this order, whole numbers stay whole
        collectives.append(_collective(size, held, cells, keys, setting.devices, epilogue=epilogue))
    return collectives


def _replicated(setting: Setting, layer: Layer, p: Parameter, layout: Layout) -> Floats:
    """(C,) 1.0 where all devices of a group keep all of a parameter that they hold alike, else 0.0."""
    found = sharded_each(layer, p, layout.configs, setting.devices.count, unfed=layer.name in setting.graph.unfed)
    return np.array([float(one is None) for one in found])


def shares_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """What is reduce-scattered after the backward pass, and gathered: sizes are of whole boxes as they travel."""
    if all(config.states == "replicated" for config in layout.configs):
        return []
    by_keys: dict[tuple[tuple[int, ...], bool], tuple[Floats, Floats]] = {}
    zero = np.zeros(len(layout.configs))
    for _, p, item_bytes in layer.held():
        found = sharded_each(layer, p, layout.configs, setting.devices.count, unfed=layer.name in setting.graph.unfed)
        keys = tuple(sorted({m.source for m in p.maps if m.source is not None}))
        size, total = by_keys.get((keys, p.epilogue), (zero, zero))
        size = size + np.array([0.0 if one is None else one.largest * item_bytes for one in found])
        total = total + np.array([0.0 if one is None else one.total * item_bytes for one in found])
        by_keys[keys, p.epilogue] = size, total
    return [
        _collective(size, total, layout.at(epilogue), keys, setting.devices, epilogue=epilogue)
        for (keys, epilogue), (size, total) in by_keys.items()
        if size.any()
    ]


def gathers_of(layer: Layer, layout: Layout) -> Floats:
    """(C,) how often a step gathers what is shared out: for the forward pass, and once more for the backward pass.

    And once more for a forward pass that is done again.
    """
    gathered = (states_of(layer, config) == "gathered" for config in layout.configs)
    return np.array([2.0 + c.recompute if again else 1.0 for again, c in zip(gathered, layout.configs, strict=True)])


def kept_share(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """(C,) of the elements of parameters that a device computes with, the share that it keeps and updates."""
    kept = whole = np.zeros(len(layout.configs))
    for _, p in layer.own_parameters():
        if p.trainable:
            size = largest_box(p.maps, layer.space.dims, layout.at(p.epilogue).degrees)
            found = sharded_each(
                layer, p, layout.configs, setting.devices.count, unfed=layer.name in setting.graph.unfed
            )
            part = [1.0 if one is None else 1 / one.members for one in found]
            kept, whole = kept + size * part, whole + size
    return kept / np.maximum(whole, 1.0)


def _collective(
    size: Floats, total: Floats, cells: Cells, keys: Sequence[int], graph: DeviceGraph, *, epilogue: bool = False
) -> Collective:
    return Collective(size, total, group_shapes(cells, tuple(keys), graph), cells, tuple(keys), epilogue)


def statistics_of(setting: Setting, layer: Layer, layout: Layout, *, again: bool = False) -> list[Collective]:
    """All-reduces inside the layer: one forward, one back where the gradient of what is normalised is wanted.

    again: of the layer's forward pass done once more, after which nothing new is remembered.
    """
    collectives: list[Collective] = []
    for stage, gradients in zip(layer.stages, setting.graph.gradients(layer), strict=True):
        out, statistics = stage.space.out, stage.statistics(local_batch_norm=setting.options.local_batch_norm)
        running = setting.options.kind == "inference" and stage.op.remembers  # its statistics are those of training
        if statistics is None or running:
            continue
        here = layout.at(stage.epilogue)
        degrees = here.degrees
        extents = largest_extents(layer.space.dims[: degrees.shape[1]], degrees)
        keys = [i for i in range(degrees.shape[1]) if i not in statistics.over]
        each = statistics.per_key / statistics.block
        elements = np.prod(extents[:, statistics.keys], axis=1, dtype=np.float64) * each
        spare = [i for i in range(degrees.shape[1]) if i not in statistics.keys]
        total = degrees[:, spare].prod(1) * prod(out.shape[i] for i in statistics.keys) * each
        forward, back = statistics.item_bytes(out.item_bytes)
        for item_bytes in (forward, back) if gradients.inputs and not again else (forward,):
            sizes = elements * item_bytes, total * item_bytes
            collectives.append(_collective(*sizes, here, keys, setting.devices))
    return collectives


def reductions_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """Where k is split: the reduce-scatter of the partial sums."""
    ks, computed = layer.space.reductions, layout.computed
    if not ks or (computed.degrees[:, ks.start :] == 1).all():
        return []
    main = layer.stages[0].space.out
    extents = largest_extents(layer.space.dims, computed.degrees)[:, : ks.start]
    size = np.prod(extents, axis=1, dtype=np.float64) * main.item_bytes
    total = computed.degrees[:, ks.start :].prod(1) * float(main.volume * main.item_bytes)
    return [_collective(size, total, computed, range(ks.start), setting.devices)]


def reduces_back(setting: Setting, layer: Layer) -> bool:
    """Whether the gradient of the partial sums is asked for: of the main operator's weights or inputs."""
    return setting.graph.gradients(layer)[0].result
