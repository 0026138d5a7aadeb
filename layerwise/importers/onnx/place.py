"""Layers of an imported ONNX graph and where their parameters are: what rows of the table return is added here."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

from layerwise.errors import LayerwiseError
from layerwise.graph.layer import GraphBuilder
from layerwise.importers.onnx.constants import Array, Constant, thin
from layerwise.importers.registry import Built, Operand, Result
from layerwise.ops import ends
from layerwise.ops.base import Parameter, space
from layerwise.ops.view import Permute, Reshape, Select
from layerwise.tensor import TensorSpec

# What becomes of an initializer that several layers use: a node that they share (`tied`; `source` where they see it in
# several shapes), or one of its own for each (`apart`: exporters write equal tensors, such as all-ones, once).
Sharing = Literal["tied", "source", "apart"]


@dataclass(frozen=True, slots=True)
class Held:
    """Where the values of a parameter are, and the shape in which its layer has it."""

    constant: Constant
    shape: tuple[int, ...]
    transposed: bool = False

    def read(self) -> Array:
        """The values."""
        value = self.constant.value.T if self.transposed else self.constant.value
        if value.size != prod(self.shape):  # repeated, which the layer does itself
            value = value[tuple(slice(0, 1) if extent == 1 else slice(None) for extent in self.shape)]
        return value.reshape(self.shape)


@dataclass(frozen=True, slots=True)
class Use:
    """A layer uses a parameter in this shape."""

    shape: tuple[int, ...]
    trainable: bool


def sharing_of(root: Constant, uses: list[Use]) -> Sharing:
    """How layers share a parameter."""
    if sum(use.trainable for use in uses) < 2:
        return "apart"
    if root.small or len(root.shape) == 1:
        values = thin(root.value).ravel()
        if (values == values[0]).all():
            return "apart"
    return "tied" if all(use.shape == root.shape for use in uses) else "source"


class Placer:
    """Adds layers to a GraphBuilder, and keeps what it learns of parameters on the way."""

    def __init__(self, builder: GraphBuilder, sharing: Mapping[str, Sharing]) -> None:
        self.builder = builder
        self.sharing = sharing
        self.constants: dict[str, Constant] = {}
        self.roots: dict[str, Constant] = {}  # parameters that are views of no other
        self.held: dict[str, Held] = {}  # by name in the graph
        self.uses: dict[str, list[Use]] = defaultdict(list)  # by root
        self.unsampled = ""  # the first layer that drops the samples
        self._sources: dict[object, str] = {}  # parameters and constants -> their node
        self._made: dict[int, tuple[Built, Operand]] = {}  # by id; held, so that no other gets the id

    def begin(self) -> None:
        """Another node."""
        self._made.clear()

    def root(self, c: Constant) -> Constant | Operand:
        """A constant that is a view of no other. A shared one is a node of its own from the start."""
        if not c.weight:
            return c
        self.roots.setdefault(c.root, c)
        sharing = self.sharing.get(c.root)
        if sharing in ("tied", "source") and c.name not in self._sources:
            self._tied(c, c.name, c.shape)
        return self.activation(self._sources[c.name]) if sharing == "source" else c

    def activation(self, layer: str) -> Operand:
        """The output of a layer."""
        return Operand("activation", layer, self.builder.spec(layer))

    def place(self, result: Result, name: str) -> Operand:
        """Adds the layers of a row's result; those inside are called `name.kind`."""
        if isinstance(result, Operand):
            return self.activation(self._source(result))
        assert isinstance(result, Built)
        if id(result) in self._made:
            return self._made[id(result)][1]
        op = result.op
        inputs = [
            self._source(self.place(i, f"{name}.{i.op.kind}") if isinstance(i, Built) else i) for i in result.inputs
        ]
        specs = tuple(self.builder.spec(i) for i in inputs)
        if isinstance(op, Select) and specs[0].dims[op.dim] == "n":
            self.unsampled = self.unsampled or name
        try:
            declared = space(op, specs).parameters
        except LayerwiseError as error:
            raise LayerwiseError(f"layer {name!r} ({op.kind}): {error}") from None
        if any(d.trainable for d in declared) and specs and op.kind != "embedding" and not specs[0].differentiable:
            raise LayerwiseError(f"layer {name!r} ({op.kind}) has weights but works on {specs[0].dtype}: cast to float")
        if len(declared) != len(result.parameters):
            given = len(result.parameters)
            raise LayerwiseError(f"layer {name!r} ({op.kind}) takes {len(declared)} parameters, not {given}")
        names = [self._parameter(p, d, name) for p, d in zip(result.parameters, declared, strict=True)]
        made = self.activation(self.builder.add(name, op, inputs, names))
        self._made[id(result)] = result, made
        return made

    def _parameter(self, p: Operand, declared: Parameter, layer: str) -> str:
        """The name in the graph of a parameter that lives in its layer (or is tied)."""
        if p.activation or p.shape != declared.shape:
            raise LayerwiseError(
                f"layer {layer!r}: {declared.name} needs shape {declared.shape}, {p.name!r} has {p.shape}"
            )
        c = self.constants[p.name]
        if p.role == "parameter":
            self.uses[c.root].append(Use(declared.shape, declared.trainable))
        if self.sharing.get(c.root) == "tied":
            return c.root
        name = base = f"{p.name}.T" if p.transposed else p.name
        count = 1
        while name in self.held and self.sharing.get(c.root) == "apart":
            count += 1
            name = f"{base}:{count}"
        self.held.setdefault(name, Held(c, declared.shape, c.transposed != p.transposed))
        return name

    def _source(self, x: Operand) -> str:
        """The layer that gives an operand; parameters and constants become nodes of their own."""
        if x.activation:
            return x.name
        c = self.constants[x.name]
        if x.role == "constant":
            key = (x.name, x.shape, x.transposed)
            if key not in self._sources:
                layer = self.builder.add(x.name, ends.Constant(_labelled(x.spec)), ())
                self._sources[key] = layer
                self.held[layer] = Held(c, x.shape, c.transposed != x.transposed)
            return self._sources[key]
        stored = x.shape[::-1] if x.transposed else x.shape
        self.uses[c.root].append(Use(stored, trainable=True))
        name = c.root if self.sharing.get(c.root) == "tied" else c.name
        if name not in self._sources:
            self._tied(c, name, stored)
        node = self._sources[name]
        if x.transposed:
            return self.builder.add(f"{x.name}.permute", Permute((1, 0)), [node])
        shape = self.builder.spec(node).shape
        return node if x.shape == shape else self.builder.add(f"{x.name}.reshape", Reshape(x.shape), [node])

    def _tied(self, c: Constant, name: str, shape: tuple[int, ...]) -> None:
        spec = TensorSpec(shape, (*(None,) * (len(shape) - 1), "c"), c.dtype.name)
        self._sources[name] = layer = self.builder.tied(name, spec)
        self.held[layer] = Held(c, shape, c.transposed)


def _labelled(spec: TensorSpec) -> TensorSpec:
    """A constant that is a source: positions and token types are sequences."""
    if spec.differentiable or not 1 <= len(spec.shape) <= 2 or spec.dims[-1]:
        return spec
    return replace(spec, dims=(*spec.dims[:-1], "s"))
