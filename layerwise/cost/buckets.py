"""Which gradients travel together, and after which layer's backward pass: the rules of the runtime's replicas."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerwise.config import BUCKET_BYTES, FIRST_BUCKET_BYTES
from layerwise.cost.sync import Group, replicas
from layerwise.cost.tables import CostModel, Strategy
from layerwise.graph.layer import Layer
from layerwise.ops.ends import Tied

Ints = NDArray[np.int64]


@dataclass(eq=False)
class Bucket:
    """Gradients that are all-reduced at once, among devices with the same number in `row` (N,); -1: has no part.

    name: of the layer whose gradients were first in it; last: of the one that completes it.
    """

    name: str
    row: Ints
    group: Group
    first: bool  # of its groups
    bytes: float = 0.0
    last: str = ""


def buckets(model: CostModel, strategy: Strategy) -> dict[str, list[Bucket]]:
    """By the layer after whose backward pass they leave. A strategy with the inputs' and the sink's configurations.

    A bucket takes gradients, from the last layer to the first, until it is full; it leaves with its last one. The
    first bucket of a group is small, so that communication begins early. Parameters that several layers use come last.
    """
    inner = [layer for layer in reversed(model.graph.layers) if not isinstance(layer.op, Tied)]
    tied = [layer for layer in reversed(model.graph.layers) if isinstance(layer.op, Tied)]
    filling: dict[bytes, Bucket] = {}
    found: list[Bucket] = []
    for layer in (*inner, *tied):
        for row, group, size in _gradients(model, layer, strategy):
            bucket = filling.get(row.tobytes())
            if bucket is None or bucket.bytes >= (FIRST_BUCKET_BYTES if bucket.first else BUCKET_BYTES):
                bucket = filling[row.tobytes()] = Bucket(layer.name, row, group, first=bucket is None)
                found.append(bucket)
            bucket.bytes += size
            bucket.last = layer.name
    leaving: dict[str, list[Bucket]] = {}
    for bucket in found:
        leaving.setdefault(bucket.last, []).append(bucket)
    return leaving


def _gradients(model: CostModel, layer: Layer, strategy: Strategy) -> list[tuple[Ints, Group, float]]:
    """Who shares a layer's gradients, and their bytes; what nobody shares does not travel."""
    config = strategy[layer.name]
    lay = model.layout(layer, (config,))
    found = []
    for c in reversed(model.gradients_of(layer, lay)):  # the last parameter first: a bias, then its weight
        if c.groups[0].size > 1:
            row = replicas(lay, c.keys, c.late)[0]
            if isinstance(layer.op, Tied) and config.total == 1:  # replicated
                row = np.zeros_like(row)
            found.append((row, c.groups[0], float(c.size_bytes[0])))
    return found
