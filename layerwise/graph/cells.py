"""Cells of inputs: a layer behind an input that is read without halos, whose edges send these as any edge does."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role
from layerwise.ops.facts import Local, Maps
from layerwise.ops.specs import same
from layerwise.ops.tensor.view import View
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Cells(View):
    """Its input as it is. It stands between an input and the layers that read that (`graph.cells`)."""

    kind: ClassVar[str] = "cells"

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        return inputs[0]

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return inputs[0]


def with_cells(graph: LayerGraph, inputs: Collection[str]) -> LayerGraph:
    """Returns the network with a layer `x.cells` between each of these inputs and what reads it.

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
