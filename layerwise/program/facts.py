"""Facts of a strategy from which the program of its step follows, beside the graph's own."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from layerwise.geometry.arrays import Mask
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd
from layerwise.partition.buckets import BUCKET_BYTES


class Gradient(NamedTuple):
    """Gradients of a layer's parameters that the same groups of devices sum."""

    layer: str
    group: Hashable  # equal where the groups are
    members: Mask  # (N,) the devices that take part in any of the groups
    size_bytes: float
    states: str  # of the parameters: replicated, sharded or gathered


@dataclass(frozen=True, slots=True)
class StrategyFacts:
    """The facts of a strategy that a program follows from."""

    travels: Collection[EdgeEnd]  # the inputs of layers that are not where they are needed
    late: Collection[str]  # layers that return their input's gradient before they make that of their weights
    recomputed: Collection[str]
    gathered: Sequence[str]  # layers whose parameters are gathered for them alone, in the graph's order
    gradients: Sequence[Gradient]  # in the order of `gradient_order`
    bucket_bytes: float = BUCKET_BYTES  # at which a bucket of gradients is full


def gradient_order(graph: LayerGraph) -> list[Layer]:
    """The layers in the order in which their gradients are complete.

    That is from the last to the first; parameters that several layers use come last of all.
    """
    tied = [layer for layer in reversed(graph.layers) if layer.role is Role.TIED]
    return [*(layer for layer in reversed(graph.layers) if layer.role is not Role.TIED), *tied]
