"""Placer: adds what a row of either table returns to a graph, as layers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace

from layerwise.graph.builder import GraphBuilder
from layerwise.importers.registry import Built, Operand, Result
from layerwise.ops.ends import Constant
from layerwise.ops.tensor.view import Permute, Reshape
from layerwise.tensor import TensorSpec


class Placer(ABC):
    """Adds layers to a GraphBuilder. Parameters and constants outside layers become layers of their own."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.sources: dict[object, str] = {}  # the layers of parameters and constants outside layers
        self.standing: dict[str, Operand] = {}  # constants that are layers, by name
        self._made: dict[int, tuple[Built, Operand]] = {}  # by id; holds the Built, so that no other object gets its id

    def activation(self, layer: str) -> Operand:
        """The output of a layer."""
        return Operand("activation", layer, self.builder.spec(layer))

    def place(self, result: Result, name: str) -> Operand:
        """Adds the layers of a row's result; nested ones are named `name.kind`."""
        if isinstance(result, Operand):
            return result
        assert isinstance(result, Built)
        if id(result) not in self._made:
            inputs = [self.place(i, f"{name}.{i.op.kind}" if isinstance(i, Built) else name) for i in result.inputs]
            self._made[id(result)] = result, self.activation(self._add(result, inputs, name))
        return self._made[id(result)][1]

    @abstractmethod
    def _add(self, built: Built, inputs: list[Operand], name: str) -> str:
        """Adds one layer, whose inputs are placed. Returns its name."""

    def source(self, x: Operand) -> str:
        """The layer that computes an operand."""
        if x.activation:
            return x.name
        if x.role == "constant":
            return self._constant(x)
        node = self._tied(x)
        if x.transposed:
            return self.builder.add(f"{x.name}.permute", Permute((1, 0)), [node])
        shape = self.builder.spec(node).shape
        return node if x.shape == shape else self.builder.add(f"{x.name}.reshape", Reshape(x.shape), [node])

    @abstractmethod
    def _tied(self, x: Operand) -> str:
        """The layer that is the parameter `x`."""

    def _constant(self, x: Operand) -> str:
        self.standing[x.name] = x
        key = (x.name, x.shape, x.transposed)
        if key not in self.sources:
            self.sources[key] = self.builder.add(x.name, Constant(_labelled(x.spec)), ())
        return self.sources[key]


def _labelled(spec: TensorSpec) -> TensorSpec:
    """The spec of a constant that is a source: positions and token types are sequences."""
    if spec.differentiable or not 1 <= len(spec.shape) <= 2 or spec.dims[-1]:
        return spec
    return replace(spec, dims=(*spec.dims[:-1], "s"))


def as_tied(spec: TensorSpec) -> TensorSpec:
    """The spec of a parameter that is a source: its last dimension is channels."""
    return replace(spec, dims=(*(None,) * (len(spec.shape) - 1), "c") if spec.shape else ())
