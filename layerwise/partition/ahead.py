"""Transfers issued early: begun as soon as their tensor is computed, and awaited where it is needed."""

from __future__ import annotations

from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role

EdgeEnd = tuple[str, int]  # a layer, and the index of its input


def begun_before(graph: LayerGraph, io: str) -> dict[str, tuple[EdgeEnd, ...]]:
    """The edges that are issued early, by the layer before whose computation they begin.

    An edge is issued early if some layer computes between its source and its consumer, in plan order. It begins before
    the first of these computes, but after that layer's own inputs have arrived, which are needed sooner; edges that are
    needed first begin first. The backward order is the reverse. If all devices feed the full batch (io free), outputs
    are sent at the end.
    """
    begun: dict[str, list[EdgeEnd]] = {}
    following: dict[str, str] = {}  # the first layer that computes after a source
    made: list[str] = []  # computed since the last layer
    for layer in graph.layers if io == "sample" else graph.layers[:-1]:
        for slot, source in enumerate(layer.inputs):
            if source in following:
                begun.setdefault(following[source], []).append((layer.name, slot))
        if layer.role is Role.COMPUTE:
            following |= dict.fromkeys(made, layer.name)
            made = []
        made.append(layer.name)
    return {name: tuple(edges) for name, edges in begun.items()}
