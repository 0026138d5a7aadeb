"""Placer: what a row of either table returns becomes layers of a graph. MergedRows: (n, s, c) seen as (n*s, c).

Models and exporters write linear layers on sequences by merged rows. Taken literally, s is lost (and n, where it is not
the outermost), which can be split; so what takes row by row works on the tensor as it was before.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from math import prod

from layerwise.graph.builder import GraphBuilder
from layerwise.importers.registry import Built, Operand, Result
from layerwise.ops.ends import Constant
from layerwise.ops.tensor.view import Permute, Reshape
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True)
class MergedRows:
    """An activation whose leading dimensions are merged; `shape` is what the model sees."""

    unmerged: Operand
    shape: tuple[int, ...]

    @property
    def spec(self) -> TensorSpec:
        """The tensor as the model sees it."""
        named = "n" if "n" in self.unmerged.spec.dims else None
        return TensorSpec(self.shape, (named, None), self.unmerged.spec.dtype)


class Placer(ABC):
    """Adds layers to a GraphBuilder. Parameters and constants that live in no layer become layers of their own."""

    def __init__(self, builder: GraphBuilder) -> None:
        self.builder = builder
        self.sources: dict[object, str] = {}  # the layers of those parameters and constants
        self.standing: dict[str, Operand] = {}  # constants that are layers, by name
        self._made: dict[int, tuple[Built, Operand]] = {}  # by id; the Built is kept, so that no other gets its id

    def activation(self, layer: str) -> Operand:
        """The output of a layer."""
        return Operand("activation", layer, self.builder.spec(layer))

    def place(self, result: Result, name: str) -> Operand:
        """Adds the layers of a row's result; those inside are called `name.kind`."""
        if isinstance(result, Operand):
            return result
        assert isinstance(result, Built)
        if id(result) not in self._made:
            inputs = [self.place(i, f"{name}.{i.op.kind}" if isinstance(i, Built) else name) for i in result.inputs]
            self._made[id(result)] = result, self.activation(self._add(result, inputs, name))
        return self._made[id(result)][1]

    def merged(self, rows: MergedRows) -> Operand:
        """Returns rows as the model sees them."""
        return self.place(Built(Reshape(rows.shape), (rows.unmerged,)), f"{rows.unmerged.name}.rows")

    def reshaped(self, x: Operand | MergedRows, shape: tuple[int, ...], name: str) -> Operand | MergedRows | None:
        """x in another shape, where that merges leading dimensions to rows, or takes rows apart; None elsewhere."""
        tensor = x.unmerged if isinstance(x, MergedRows) else x
        if isinstance(x, MergedRows) and len(shape) > 2:  # merged rows would have one label for two dimensions
            return tensor if shape == tensor.shape else self.place(Built(Reshape(shape), (tensor,)), name)
        if len(shape) != 2 or len(tensor.shape) < 3 or not tensor.activation:
            return None
        before = before_merging(tensor.shape, *shape)
        if before is None:
            return None
        if before != tensor.shape:
            tensor = self.place(Built(Reshape(before), (tensor,)), name)
        return MergedRows(tensor, shape)

    @abstractmethod
    def _add(self, built: Built, inputs: list[Operand], name: str) -> str:
        """Adds one layer, whose inputs are placed. Returns its name."""

    def source(self, x: Operand) -> str:
        """The layer that gives an operand."""
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
        """The layer that is the parameter which `x` reads."""

    def _constant(self, x: Operand) -> str:
        self.standing[x.name] = x
        key = (x.name, x.shape, x.transposed)
        if key not in self.sources:
            self.sources[key] = self.builder.add(x.name, Constant(_labelled(x.spec)), ())
        return self.sources[key]


def _labelled(spec: TensorSpec) -> TensorSpec:
    """A constant that is a source: positions and token types are sequences."""
    if spec.differentiable or not 1 <= len(spec.shape) <= 2 or spec.dims[-1]:
        return spec
    return replace(spec, dims=(*spec.dims[:-1], "s"))


def as_tied(spec: TensorSpec) -> TensorSpec:
    """A parameter that is a source: its last dimension are channels."""
    return replace(spec, dims=(*(None,) * (len(spec.shape) - 1), "c") if spec.shape else ())


def before_merging(shape: tuple[int, ...], rows: int, columns: int) -> tuple[int, ...] | None:
    """Dimensions that merge to (rows, columns): (s, n*heads, e) becomes (s, n, heads*e). None if nothing merges."""
    kept = max(k for k in range(len(shape)) if rows % prod(shape[:k]) == 0)
    rest = rows // prod(shape[:kept])
    lead = shape[:kept] if rest == 1 else (*shape[:kept], rest)
    if len(lead) < 2 or shape[kept] % rest:
        return None
    return (*lead, columns)
