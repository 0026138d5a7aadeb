"""Which gradients travel together, by `partition.buckets`, and after which layer's backward pass."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerwise.cost.collectives import GroupShape
from layerwise.cost.layer_collectives import gradients_of
from layerwise.cost.model import CostModel, Strategy
from layerwise.geometry.arrays import Ints
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.buckets import fill
from layerwise.partition.groups import replicas


@dataclass(frozen=True, slots=True, eq=False)
class Bucket:
    """Gradients that are all-reduced at once."""

    name: str  # of the layer whose gradients were first in it
    row: Ints  # (N,) devices with the same number take part in one all-reduce; -1: in none
    group: GroupShape
    bytes: float


def buckets(model: CostModel, strategy: Strategy) -> dict[str, list[Bucket]]:
    """By the layer after whose backward pass they leave. A strategy with the inputs' and the sink's configurations.

    Gradients come from the last layer to the first; those of parameters that several layers use come last.
    """
    inner = [layer for layer in reversed(model.graph.layers) if layer.role is not Role.TIED]
    tied = [layer for layer in reversed(model.graph.layers) if layer.role is Role.TIED]
    gradients = [(layer.name, *g) for layer in (*inner, *tied) for g in _gradients(model, layer, strategy)]
    leaving: dict[str, list[Bucket]] = {}
    for places in fill((row.tobytes(), size) for _, row, _, size in gradients):
        name, row, group, _ = gradients[places[0]]
        size_bytes = sum(gradients[i][3] for i in places)
        leaving.setdefault(gradients[places[-1]][0], []).append(Bucket(name, row, group, size_bytes))
    return leaving


def _gradients(model: CostModel, layer: Layer, strategy: Strategy) -> list[tuple[Ints, GroupShape, float]]:
    """Who shares a layer's gradients, and their bytes; what nobody shares does not travel."""
    config = strategy[layer.name]
    gradients = []
    collectives = gradients_of(model, layer, model.layout(layer, (config,)))
    for c in reversed(collectives):  # the last parameter first: a bias, then its weight
        if c.group_shapes[0].size > 1:
            row = replicas(c.cells, c.keys)[0]
            if layer.role is Role.TIED and config.total == 1:  # replicated
                row = np.zeros_like(row)
            gradients.append((row, c.group_shapes[0], float(c.size_bytes[0])))
    return gradients
