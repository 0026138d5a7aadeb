"""GraphBuilder: builds a LayerGraph for importers."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.mixed import made_by, types_of
from layerwise.graph.types import Regions, Types, autocast_within
from layerwise.ops.base import Op, Role
from layerwise.ops.ends import Input, Sink, Tied
from layerwise.tensor import TensorSpec

SINK = "outputs"  # the name of the sink


class GraphBuilder:
    """Collects layers in topological order, for importers."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.traced = "cpu"  # the device type that the model's own element types belong to
        self.autocast: Regions = ()  # the autocast regions of the layers being added
        # the model's parameters, which may be layers: no operator may have their names
        self.parameters: Collection[str] = ()
        self._layers: dict[str, Layer] = {}

    def input(self, name: str, spec: TensorSpec) -> str:
        """Adds a tensor that the data loader feeds. Returns the layer's name."""
        return self.add(name, Input(spec), ())

    def tied(self, name: str, spec: TensorSpec) -> str:
        """Adds a parameter that is used more than once; name it in `add(parameters=...)` of each use."""
        return self.add(name, Tied(spec), ())

    def spec(self, name: str) -> TensorSpec:
        """The output of a layer added before."""
        return self._layers[name].out

    def add(
        self,
        name: str,
        op: Op,
        inputs: Sequence[str],
        parameters: Sequence[str] = (),
        weights: str | None = None,
        computed: Collection[int] = (),
    ) -> str:
        """Adds `op` on the named layers, and checks shapes. Returns the layer's name (made unique).

        weights: the element type of its parameters, if known. computed: the parameters that layers of these names
        compute, as with weight norm.
        """
        specs = tuple(self._layers[i].out for i in inputs)
        sources = {i: self._layers[p] for i, p in enumerate(parameters) if p in self._layers}
        tied = tuple(i for i, source in sources.items() if i in computed or source.role is Role.TIED)
        edges = (*inputs, *(parameters[i] for i in tied))
        unique, count = name, 1
        taken = () if isinstance(op, Tied | Input) else self.parameters
        while unique in self._layers or unique == SINK or unique in taken:
            count += 1
            unique = f"{name}:{count}"
        layer = Layer(unique, op, edges, specs, tuple(parameters), tied, autocast=self.autocast)
        for i in computed:
            own, made = layer.space.parameters[i].shape, sources[i].out
            if own != made.shape:
                raise LayerwiseError(f"its parameter has shape {own}, but is computed with shape {made.describe()}")
        types = self._types(layer, weights)
        self._layers[unique] = layer if types is None else replace(layer, types=types)
        return unique

    def _types(self, layer: Layer, weights: str | None) -> Types | None:
        """The element types of its single stage; None if the operator determines them itself."""
        sources = [self._layers[name] for name in layer.inputs[: len(layer.specs)]]
        types = types_of(layer.op, sources) or layer.all_types
        if layer.role is Role.COMPUTE and weights is not None:
            types = replace(types, parameters=(weights,))
        here = autocast_within(layer.autocast, self.traced, None)
        if layer.role is Role.COMPUTE and here is not None:
            made = made_by(layer.op, layer.specs, types.parameters[0], here, self.traced)
            types = replace(types, made=(made,))
        return None if types == layer.all_types else types

    def finish(self, outputs: Sequence[str]) -> LayerGraph:
        """Closes the graph with the sink, without layers that no output needs and that have no running statistics."""
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
        graph = LayerGraph((*kept, sink), self.name)
        return graph.freeze(graph.unreached) if len(graph.returned) < len(graph.layers) else graph
