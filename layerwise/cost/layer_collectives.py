"""Collectives of a layer: gradients after the backward pass, statistics and reductions inside it. Who, and how much."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
from layerwise.partition.layout import Layout, LayoutCells
from layerwise.partition.sharding import Sharding, sharded_each, states_of

ParameterKind = tuple[tuple[int, ...], bool]  # what boxes of parameters follow from: dimensions; whether of an epilogue


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a layer under C configurations."""

    size_bytes: Floats  # (C,) of the member with the largest box
    total_bytes: Floats  # (C,) of all devices together
    group_shapes: Groups  # (C,) of the devices that agree in the dimensions `keys` of their cells
    cells: LayoutCells
    keys: tuple[int, ...]
    epilogue: bool = False  # whether what travels belongs to a fused follower, whose boxes may differ


def kind_of(p: Parameter) -> ParameterKind:
    """A key of the collective, of its layer's, that the gradient of a parameter belongs to."""
    return tuple(sorted({m.source for m in p.maps if m.source is not None})), p.epilogue


def gradients_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """The all-reduces after the backward pass, one entry for each kind of box."""

    def sizes(p: Parameter) -> tuple[Floats, Floats]:
        degrees = layout.at(p.epilogue).degrees
        replicated = np.array([float(one is None) for one in _sharded(setting, layer, p, layout)])
        boxes = (measure(p.maps, layer.space.dims, degrees) for measure in (largest_box, all_boxes))
        largest, total = (size * replicated for size in boxes)
        return largest, total

    found = list[Collective]()
    for (keys, epilogue), (size, total) in _of_parameters(layer, layout, sizes).items():
        cells = layout.at(epilogue)
        held = total * cells.count / cells.degrees.prod(1)  # in this order, whole numbers stay whole
        found.append(_collective(size, held, cells, keys, setting.devices, epilogue=epilogue))
    return found


def shares_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """The reduce-scatters after the backward pass, and the gathers: sizes are of full boxes as they travel."""
    if all(config.states == "replicated" for config in layout.configs):
        return []

    def sizes(p: Parameter) -> tuple[Floats, Floats]:
        found = _sharded(setting, layer, p, layout)
        each = [(0.0, 0.0) if one is None else (one.largest, one.total) for one in found]
        largest, total = np.array(each).T
        return largest, total

    return [
        _collective(size, total, layout.at(epilogue), keys, setting.devices, epilogue=epilogue)
        for (keys, epilogue), (size, total) in _of_parameters(layer, layout, sizes).items()
        if size.any()
    ]


def _of_parameters(
    layer: Layer, layout: Layout, sizes: Callable[[Parameter], tuple[Floats, Floats]]
) -> dict[ParameterKind, list[Floats]]:
    """(C,) bytes of the parameters of each kind. sizes: elements of the largest box of one, and of all devices'."""
    by_kind: dict[ParameterKind, list[Floats]] = {}
    for _, p, item_bytes in layer.held():
        if p.trainable:
            of_kind = by_kind.setdefault(kind_of(p), [np.zeros(len(layout.computed.degrees))] * 2)
            of_kind[:] = [before + size * item_bytes for before, size in zip(of_kind, sizes(p), strict=True)]
    return by_kind


def _sharded(setting: Setting, layer: Layer, p: Parameter, layout: Layout) -> list[Sharding | None]:
    """Under each configuration's choice of states."""
    return sharded_each(layer, p, layout.configs, setting.devices.count, unfed=layer.name in setting.graph.unfed)


def gathers_of(layer: Layer, layout: Layout) -> Floats:
    """(C,) how often a step gathers what is sharded: once, or for the forward, the recomputed and the backward pass."""
    gathered = (states_of(layer, config) == "gathered" for config in layout.configs)
    return np.array([2.0 + c.recompute if each else 1.0 for each, c in zip(gathered, layout.configs, strict=True)])


def owned_share(setting: Setting, layer: Layer, layout: Layout) -> Floats:
    """(C,) of the elements of parameters that a device computes with, the share that it owns and updates."""
    owned = full = np.zeros(len(layout.configs))
    for _, p in layer.own_parameters():
        if p.trainable:
            size = largest_box(p.maps, layer.space.dims, layout.at(p.epilogue).degrees)
            part = [1.0 if one is None else 1 / one.members for one in _sharded(setting, layer, p, layout)]
            owned, full = owned + size * part, full + size
    return owned / np.maximum(full, 1.0)


def _collective(
    size: Floats, total: Floats, cells: LayoutCells, keys: Sequence[int], graph: DeviceGraph, *, epilogue: bool = False
) -> Collective:
    return Collective(size, total, group_shapes(cells, tuple(keys), graph), cells, tuple(keys), epilogue)


def statistics_of(setting: Setting, layer: Layer, layout: Layout, *, recomputed: bool = False) -> list[Collective]:
    """All-reduces inside the layer: one forward, one back where the gradient of what is normalised is wanted.

    recomputed: of the forward pass of a recomputed layer, done once more.
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
        for item_bytes in (forward, back) if gradients.inputs and not recomputed else (forward,):
            sizes = elements * item_bytes, total * item_bytes
            collectives.append(_collective(*sizes, here, keys, setting.devices))
    return collectives


def reductions_of(setting: Setting, layer: Layer, layout: Layout) -> list[Collective]:
    """The reduce-scatters of the partial sums, where k is split."""
    ks, computed = layer.space.reductions, layout.computed
    if not ks or (computed.degrees[:, ks.start :] == 1).all():
        return []
    main = layer.stages[0].space.out
    extents = largest_extents(layer.space.dims, computed.degrees)[:, : ks.start]
    size = np.prod(extents, axis=1, dtype=np.float64) * main.item_bytes
    total = computed.degrees[:, ks.start :].prod(1) * float(main.volume * main.item_bytes)
    return [_collective(size, total, computed, range(ks.start), setting.devices)]


def reduces_back(setting: Setting, layer: Layer) -> bool:
    """True if the gradient of the partial sums is asked for: of the main operator's weights or inputs."""
    return setting.graph.gradients(layer)[0].result
