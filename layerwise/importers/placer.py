"""Placer: adds what a row of either table returns to a graph, as layers.

Models and exporters view (n, s, c) as (n*s, c) for linear layers, and back again. Taken literally, s is lost (and n, if
it is not the outermost), though it could be split. So such a view is no layer: what treats every row alike works on the
tensor as it was before (`Operand.whole`), and the rows are a layer only if something else needs them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import replace
from math import prod

from layerwise.graph.builder import GraphBuilder
from layerwise.importers.registry import Built, Operand, Result
from layerwise.ops.base import Op
from layerwise.ops.ends import Constant
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.pointwise import Binary
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
            self._made[id(result)] = result, self._placed(result, inputs, name)
        return self._made[id(result)][1]

    def _placed(self, built: Built, inputs: list[Operand], name: str) -> Operand:
        """The output of one layer whose inputs are placed, or of none: rows, and what is before them."""
        op, x = built.op, inputs[0] if inputs else None
        if isinstance(op, Reshape) and x is not None and x.activation:
            whole = x.whole or x
            merged = _before_merging(whole.spec, op.shape)
            shape = op.shape if merged is None else merged
            if shape != whole.shape:
                whole = self.activation(self._add(Built(Reshape(shape), (whole,)), [whole], name))
            return whole if merged is None else _rows(whole)
        if x is not None and x.whole is not None and len(inputs) == 1 and _treats_rows_alike(op, x.shape[1]):
            return _rows(self.activation(self._add(built, [x.whole], name)))
        return self.activation(self._add(built, inputs, name))

    @abstractmethod
    def _add(self, built: Built, inputs: list[Operand], name: str) -> str:
        """Adds one layer, whose inputs are placed. Returns its name."""

    def source(self, x: Operand) -> str:
        """The layer that computes an operand."""
        if x.whole is not None:
            key = (x.whole.name, x.shape)
            if key not in self.sources:
                self.sources[key] = self.builder.add(f"{x.name}.rows", Reshape(x.shape), [x.whole.name])
            return self.sources[key]
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


def _before_merging(x: TensorSpec, shape: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of x before dimensions merge to rows: (s, n*heads, e) becomes (s, n, heads*e). None if none merge."""
    if len(shape) != 2 or len(x.shape) < 3:
        return None
    kept = max(k for k in range(len(x.shape)) if shape[0] % prod(x.shape[:k]) == 0)
    rest = shape[0] // prod(x.shape[:kept])
    lead = x.shape[:kept] if rest == 1 else (*x.shape[:kept], rest)
    # A batch of 1 may have lost its label by now: any dimension of size 1 may be the samples.
    lost = "n" not in x.dims
    several = sum(extent > 1 or label == "n" or lost for extent, label in zip(lead, x.dims, strict=False)) > 1
    return (*lead, shape[1]) if several and x.shape[kept] % rest == 0 else None


def _rows(whole: Operand) -> Operand:
    """An activation with its leading dimensions merged."""
    shape = (prod(whole.shape[:-1]), whole.shape[-1])
    return replace(whole, spec=Reshape(shape).output(whole.spec), whole=whole)


def _treats_rows_alike(op: Op, width: int) -> bool:
    """True if an operator with a single input does the same to every row of that many numbers."""
    if isinstance(op, Binary) and op.parameter is not None:
        return op.parameter in ((), (1,), (width,), (1, 1), (1, width))
    return op.elementwise or isinstance(op, Linear)


def _labelled(spec: TensorSpec) -> TensorSpec:
    """The spec of a constant that is a source: positions and token types are sequences."""
    if spec.differentiable or not 1 <= len(spec.shape) <= 2 or spec.dims[-1]:
        return spec
    return replace(spec, dims=(*spec.dims[:-1], "s"))


def as_tied(spec: TensorSpec) -> TensorSpec:
    """The spec of a parameter that is a source: its last dimension is channels."""
    return replace(spec, dims=(*(None,) * (len(spec.shape) - 1), "c") if spec.shape else ())
