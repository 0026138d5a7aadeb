"""GraphBuilder: what importers make a LayerGraph with."""

from __future__ import annotations

from collections.abc import Sequence

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import SINK, Layer, LayerGraph
from layerwise.ops.base import Op, Role
from layerwise.ops.ends import Input, Sink, Tied
from layerwise.tensor import TensorSpec


class GraphBuilder:
    """Collects layers in topological order; importers talk to this."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.exempt: list[str] = []  # see LayerGraph
        self._layers: dict[str, Layer] = {}

    def input(self, name: str, spec: TensorSpec) -> str:
        """A tensor that the data loader feeds. Returns the layer's name."""
        return self.add(name, Input(spec), ())

    def tied(self, name: str, spec: TensorSpec) -> str:
        """A parameter used more than once; name it in `add(parameters=...)` of each use."""
        return self.add(name, Tied(spec), ())

    def spec(self, name: str) -> TensorSpec:
        """Output of a layer added before."""
        return self._layers[name].out

    def add(self, name: str, op: Op, inputs: Sequence[str], parameters: Sequence[str] = ()) -> str:
        """Adds `op` on the named layers. Returns the layer's name (made unique). Shapes are checked here."""
        specs = tuple(self._layers[i].out for i in inputs)
        tied = tuple(i for i, p in enumerate(parameters) if p in self._layers and self._layers[p].role is Role.TIED)
        edges = (*inputs, *(parameters[i] for i in tied))
        unique, count = name, 1
        while unique in self._layers or unique == SINK:
            count += 1
            unique = f"{name}:{count}"
        self._layers[unique] = Layer(unique, op, edges, specs, tuple(parameters), tied)
        return unique

    def finish(self, outputs: Sequence[str]) -> LayerGraph:
        """Closes the graph with the sink. Left out is what no output needs, nor what remembers what it is given."""
        if not outputs:
            raise LayerwiseError(f"model {self.name!r} has no tensor output")
        needed = {*outputs, *(layer.name for layer in self._layers.values() if layer.op.remembers)}
        for layer in reversed(self._layers.values()):
            if layer.name in needed:
                needed.update(layer.inputs)
        kept = [layer for layer in self._layers.values() if layer.name in needed]
        batches = [layer.out.shape[0] for layer in kept if layer.role is Role.INPUT and layer.out.index("n") == 0]
        if not batches:
            raise LayerwiseError(f"model {self.name!r}: no input has a sample dimension")
        sink = Layer(SINK, Sink(batches[0]), tuple(outputs), tuple(self._layers[o].out for o in outputs))
        graph = LayerGraph((*kept, sink), self.name, exempt=tuple(self.exempt))
        return graph.freeze(graph.unreached) if len(graph.returned) < len(graph.layers) else graph
