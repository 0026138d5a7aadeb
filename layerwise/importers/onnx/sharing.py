"""Adds what the table's rows return to the graph, and tracks where parameters' values are and which
layers share them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

from layerwise.errors import LayerwiseError
from layerwise.graph.builder import GraphBuilder
from layerwise.importers.onnx.constants import Array, FoldedConstant, thin
from layerwise.importers.placer import Placer, as_tied
from layerwise.importers.registry import Built, Operand, Result
from layerwise.ops.base import space
from layerwise.ops.facts import Parameter
from layerwise.ops.tensor.view import Select
from layerwise.tensor import TensorSpec

# How several layers share an initializer: as one node (`tied`; `source` if they use it in several shapes), or not at
# all (`apart`: exporters store equal tensors, such as all-ones, once).
Sharing = Literal["tied", "source", "apart"]


@dataclass(frozen=True, slots=True)
class PlacedValue:
    """The place of a parameter's values, and its shape in the layer."""

    constant: FoldedConstant
    shape: tuple[int, ...]
    transposed: bool = False

    def read(self) -> Array:
        """The values."""
        value = self.constant.value.T if self.transposed else self.constant.value
        if value.size != prod(self.shape):  # repeated; the layer does that itself
            value = value[tuple(slice(0, 1) if extent == 1 else slice(None) for extent in self.shape)]
        return value.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Use:
    """A layer's use of a parameter, in this shape."""

    shape: tuple[int, ...]
    trainable: bool


def sharing_of(root: FoldedConstant, uses: list[Use]) -> Sharing:
    """How the layers share a parameter."""
    if sum(use.trainable for use in uses) < 2:
        return "apart"
    if root.small or len(root.shape) == 1:
        values = thin(root.value).ravel()
        if (values == values[0]).all():
            return "apart"
    return "tied" if all(use.shape == root.shape for use in uses) else "source"


class OnnxPlacer(Placer):
    """A Placer that records how parameters are used."""

    def __init__(self, builder: GraphBuilder, sharing: Mapping[str, Sharing]) -> None:
        super().__init__(builder)
        self.sharing = sharing
        self.constants: dict[str, FoldedConstant] = {}
        self.roots: dict[str, FoldedConstant] = {}  # parameters that are views of no other
        self.stored: dict[str, PlacedValue] = {}  # by name in the graph
        self.uses: dict[str, list[Use]] = defaultdict(list)  # by root
        self.unsampled = ""  # the first layer that drops the sample dimension

    def root(self, c: FoldedConstant) -> FoldedConstant | Operand:
        """A constant that is a view of no other. A shared one is a node of its own from the start."""
        if not c.weight:
            return c
        self.roots.setdefault(c.root, c)
        sharing = self.sharing.get(c.root)
        if sharing in ("tied", "source"):
            self._stored(c, c.name, c.shape)
        return self.activation(self.sources[c.name]) if sharing == "source" else c

    def place(self, result: Result, name: str) -> Operand:
        """Adds a row's result; parameters and constants that a row returns unchanged become layers too."""
        made = super().place(result, name)
        return made if made.activation else self.activation(self.source(made))

    def _add(self, built: Built, inputs: list[Operand], name: str) -> str:
        op, parameters = built.op, built.parameters
        specs = tuple(x.spec for x in inputs)
        if isinstance(op, Select) and specs[0].dims[op.dim] == "n":
            self.unsampled = self.unsampled or name
        try:
            declared = space(op, specs).parameters
        except LayerwiseError as error:
            raise LayerwiseError(f"layer {name!r} ({op.kind}): {error}") from None
        if any(d.trainable for d in declared) and specs and not op.ids and not specs[0].differentiable:
            raise LayerwiseError(f"layer {name!r} ({op.kind}) has weights but works on {specs[0].dtype}: cast to float")
        if len(declared) != len(parameters):
            raise LayerwiseError(f"layer {name!r} ({op.kind}) takes {len(declared)} parameters, not {len(parameters)}")
        names = [self._parameter(p, d, name) for p, d in zip(parameters, declared, strict=True)]
        return self.builder.add(name, op, [self.source(x) for x in inputs], names)

    def _parameter(self, p: Operand, declared: Parameter, layer: str) -> str:
        """The name in the graph of a parameter that belongs to its layer (or is tied)."""
        if p.activation or p.shape != declared.shape:
            raise LayerwiseError(
                f"layer {layer!r}: {declared.name} needs shape {declared.shape}, but {p.name!r} has {p.shape}"
            )
        c = self.constants[p.name]
        if p.role == "parameter":
            self.uses[c.root].append(Use(declared.shape, declared.trainable))
        if self.sharing.get(c.root) == "tied":
            return c.root
        name = base = f"{p.name}.T" if p.transposed else p.name
        count = 1
        while name in self.stored and self.sharing.get(c.root) == "apart":
            count += 1
            name = f"{base}:{count}"
        self.stored.setdefault(name, PlacedValue(c, declared.shape, c.transposed != p.transposed))
        return name

    def _constant(self, x: Operand) -> str:
        layer, c = super()._constant(x), self.constants[x.name]
        self.stored[layer] = PlacedValue(c, x.shape, c.transposed != x.transposed)
        return layer

    def _tied(self, x: Operand) -> str:
        c, stored = self.constants[x.name], x.shape[::-1] if x.transposed else x.shape
        self.uses[c.root].append(Use(stored, trainable=True))
        name = c.root if self.sharing.get(c.root) == "tied" else c.name
        return self._stored(c, name, stored)

    def _stored(self, c: FoldedConstant, name: str, shape: tuple[int, ...]) -> str:
        """The layer for a parameter of the file."""
        if name not in self.sources:
            spec = TensorSpec(shape, (None,) * len(shape), c.dtype.name)
            self.sources[name] = layer = self.builder.tied(name, as_tied(spec))
            self.stored[layer] = PlacedValue(c, shape, c.transposed)
        return self.sources[name]
