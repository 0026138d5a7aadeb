"""Transfers issued early: begun as soon as their tensor is made, and awaited where it is needed."""

from __future__ import annotations

from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role

EdgeEnd = tuple[str, int]  # a layer, and which of its inputs


def begun_before(graph: LayerGraph, io: str) -> dict[str, tuple[EdgeEnd, ...]]:
    """The edges that run ahead, by the layer before whose computation they begin.

    An edge runs ahead where some layer computes between its source and its user, in plan order. It begins before the
    first of these computes, but after that one's own inputs have come, which are needed sooner; those that are needed
    first begin first. The way back is the reverse of it. Where all devices feed the whole batch (io free), outputs are
    sent at the end.
    """
    begun: dict[str, list[EdgeEnd]] = {}
    following: dict[str, str] = {}  # the first layer that computes after a source
    made: list[str] = []  # since the last layer that computes
    for layer in graph.layers if io == "sample" else graph.layers[:-1]:
        for slot, source in enumerate(layer.inputs):
            if source in following:
                begun.setdefault(following[source], []).append((layer.name, slot))
        if layer.role is Role.COMPUTE:
            following |= dict.fromkeys(made, layer.name)
            made = []
        made.append(layer.name)
    return {name: tuple(edges) for name, edges in begun.items()}
