"""Which gradients travel together, by `partition.buckets`, and after which layer's backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerwise.config import Config, States
from layerwise.cost.collectives import GroupShape
from layerwise.cost.layer_collectives import Collective, gradients_of, shares_of
from layerwise.cost.model import CostModel, Strategy
from layerwise.geometry.arrays import Ints
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.buckets import ALONE, fill
from layerwise.partition.groups import replicas
from layerwise.partition.sharding import states_of


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Gradients that are all-reduced at once; reduce-scattered, where each device keeps a part of the parameters."""

    name: str  # of the layer whose gradients were first in it
    row: Ints  # (N,) devices with the same number take part in one collective; -1: in none
    group: GroupShape
    bytes: float
    states: States
    first: str  # the first layer of the forward pass that has parameters in it


def buckets(model: CostModel, strategy: Strategy) -> dict[str, list[Bucket]]:
    """By the layer after whose backward pass they leave. A strategy with the inputs' and the sink's configurations.

    Gradients come from the last layer to the first; those of parameters that several layers use come last.
    """
    inner = [layer for layer in reversed(model.graph.layers) if layer.role is not Role.TIED]
    tied = [layer for layer in reversed(model.graph.layers) if layer.role is Role.TIED]
    gradients = [(layer.name, *g) for layer in (*inner, *tied) for g in _gradients(model, layer, strategy[layer.name])]
    number = {layer.name: i for i, layer in enumerate(model.graph.layers)}
    leaving: dict[str, list[Bucket]] = {}
    # Where parameters are gathered for a layer at a time, the gradients of each layer travel alone.
    alone = [name if states == "gathered" else "" for name, *_, states in gradients]
    rows = zip(gradients, alone, strict=True)
    keys = (((row.tobytes(), states, layer), ALONE if layer else size) for (_, row, _, size, states), layer in rows)
    for places in fill(keys):
        name, row, group, _, states = gradients[places[0]]
        size_bytes = sum(gradients[i][3] for i in places)
        first = min((gradients[i][0] for i in places), key=number.__getitem__)
        leaving.setdefault(gradients[places[-1]][0], []).append(Bucket(name, row, group, size_bytes, states, first))
    return leaving


def shared_out(model: CostModel, layer: Layer, config: Config) -> list[tuple[Ints, GroupShape, float]]:
    """Who gathers a layer's parameters from the parts that each device keeps, and their bytes."""
    return _rows(layer, config, shares_of(model, layer, model.layout(layer, (config,))))


def _gradients(model: CostModel, layer: Layer, config: Config) -> list[tuple[Ints, GroupShape, float, States]]:
    """Who shares a layer's gradients, their bytes and states; what nobody shares does not travel."""

    def made() -> list[tuple[Ints, GroupShape, float, States]]:
        reduced = _rows(layer, config, gradients_of(model, layer, model.layout(layer, (config,))))
        scattered, states = shared_out(model, layer, config), states_of(layer, config)
        return [*((*row, states) for row in scattered), *((*row, "replicated") for row in reduced)]

    return model.once((_gradients, model.kind(layer), config), made)


def _rows(layer: Layer, config: Config, collectives: list[Collective]) -> list[tuple[Ints, GroupShape, float]]:
    rows = []
    for c in reversed(collectives):  # the last parameter first: a bias, then its weight
        if c.group_shapes[0].size > 1 and c.size_bytes[0]:
            row = replicas(c.cells, c.keys)[0]
            if layer.role is Role.TIED and config.total == 1:  # replicated
                row = np.zeros_like(row)
            rows.append((row, c.group_shapes[0], float(c.size_bytes[0])))
    return rows
