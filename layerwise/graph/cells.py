"""Cells of inputs: a layer behind an input that is read without halos, whose edges send these as any edge does."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.base import Role
from layerwise.ops.tensor.cells import Cells


def with_cells(graph: LayerGraph, inputs: Collection[str]) -> LayerGraph:
    """The same network in which a layer `x.cells` stands between each of these inputs and what reads it.

    Where every rank reads boxes (io boxes), it then reads its own cell of x: that layer needs no more, and what its
    readers need is redistributed, priced and counted as between any two layers. LayerwiseError for a name that is no
    input.
    """
    known = {layer.name for layer in graph.layers if layer.role is Role.INPUT}
    if odd := sorted(set(inputs) - known):
        raise LayerwiseError(f"the plan sends halos of {odd[0]!r}, which is no input of the model: search again")
    names = {name: f"{name}.cells" for name in inputs}
    layers: list[Layer] = []
    for layer in graph.layers:
        layers.append(replace(layer, inputs=tuple(names.get(source, source) for source in layer.inputs)))
        if layer.name in names:
            layers.append(Layer(names[layer.name], Cells(), (layer.name,), (layer.out,)))
    return replace(graph, layers=tuple(layers))


def without_cells(graph: LayerGraph) -> LayerGraph:
    """The network as it was before `with_cells`."""
    sources = {layer.name: layer.inputs[0] for layer in graph.layers if isinstance(layer.op, Cells)}
    layers = (layer for layer in graph.layers if layer.name not in sources)
    return replace(
        graph,
        layers=tuple(replace(one, inputs=tuple(sources.get(name, name) for name in one.inputs)) for one in layers),
    )
