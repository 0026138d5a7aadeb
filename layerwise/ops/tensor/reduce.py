"""Reductions over whole dimensions, and over parts of them. https://pytorch.org/docs/stable/torch.html#reduction-ops"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity, scaled, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Counts, Extents, Local, Maps, Saved
from layerwise.ops.specs import dim_index, only
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

PartialMode = Literal["mean", "sum", "prod", "norm2"]
Mode = PartialMode | Literal["max", "min"]


@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """A reduction over all positions of `dims`. FLOPs: one for each input element, two for the norm.

    "argmax", of one dimension, is the position of the (first) largest element.
    """

    kind: ClassVar[str] = "reduce"
    mode: Mode | Literal["argmax"]
    dims: tuple[int, ...]
    keepdim: bool = False

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        gone = self._gone(x)
        if self.mode == "argmax" or (x.dtype == "bool" and self.mode in ("sum", "prod")):
            x = replace(x, dtype="int64")
        rank = range(len(x.shape))
        if not self.keepdim:
            return only(x, [i for i in rank if i not in gone])
        # A reduced dimension keeps its label (an upsampling may follow global pooling), but is not samples.
        shape, units = (tuple(1 if i in gone else row[i] for i in rank) for row in (x.shape, x.units))
        dims = tuple(None if i in gone and label == "n" else label for i, label in enumerate(x.dims))
        return TensorSpec(shape, dims, x.dtype, units)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        gone = self._gone(x)
        maps: list[AxisMap] = []
        source = 0
        for i, extent in enumerate(x.shape):
            maps.append(whole(extent) if i in gone else identity(extent, source))
            source += self.keepdim or i not in gone
        return (tuple(maps),)

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        (x,) = inputs
        reduced = prod(x.shape[i] for i in self._gone(x))
        return Op.flops(self, inputs, extents) * (reduced * (2 if self.mode == "norm2" else 1))

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        linear = self.mode in ("mean", "sum")
        return Saved(inputs=not linear, output=not linear)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        (x,) = inputs
        if not self.dims:
            return x
        if self.mode == "argmax":
            return torch.argmax(x, self.dims[0], self.keepdim)
        return _reduced(self.mode, x, tuple(self._gone(local.specs[0])), self.keepdim)

    def _gone(self, x: TensorSpec) -> frozenset[int]:
        return frozenset(dim_index(d, x) for d in self.dims)


@dataclass(frozen=True, slots=True)
class PartialReduce(Op):
    """A reduction of each of `dims` in equal `parts`, to one number for each part.

    It can be split between two parts of what it reduces. A Reduce of its small result does the rest: the sum of sums,
    the mean of means. So devices reduce what they have, in an order that no plan changes. There is no maximum of
    maxima: equal elements share the gradient, which parts would share differently. FLOPs: those of a Reduce.
    """

    kind: ClassVar[str] = "partial_reduce"
    mode: PartialMode
    dims: tuple[int, ...]
    parts: tuple[int, ...]  # one number for each of `dims`, which divides its extent

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        made = in_parts(x, self._parts(x))
        return replace(made, dtype="int64") if x.dtype == "bool" and self.mode in ("sum", "prod") else made

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        parts = self._parts(x)
        return (
            tuple(
                scaled(parts[i], extent, i, scale=extent // parts[i]) if i in parts else identity(extent, i)
                for i, extent in enumerate(x.shape)
            ),
        )

    def flops(self, inputs: Sequence[TensorSpec], extents: Extents) -> Counts:
        (x,) = inputs
        each = prod(x.shape[i] // count for i, count in self._parts(x).items())
        return Op.flops(self, inputs, extents) * (each * (2 if self.mode == "norm2" else 1))

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        linear = self.mode in ("mean", "sum")
        return Saved(inputs=not linear, output=not linear)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        (x,), (spec,) = inputs, local.specs
        view, inner = divided(x, spec.shape, self._parts(spec))
        return _reduced(self.mode, view, inner, False)

    def _parts(self, x: TensorSpec) -> dict[int, int]:
        return {dim_index(d, x): count for d, count in zip(self.dims, self.parts, strict=True)}


def in_parts(x: TensorSpec, parts: Mapping[int, int]) -> TensorSpec:
    """The spec with a number for each part; dimension i has parts[i]."""
    for i, count in parts.items():
        if x.shape[i] % count:
            raise LayerwiseError(f"dimension {i} of {x.describe()} cannot be divided into {count} equal parts")
    rank = range(len(x.shape))
    return TensorSpec(
        tuple(parts.get(i, x.shape[i]) for i in rank),
        tuple(None if i in parts and x.units[i] > 1 else x.dims[i] for i in rank),
        x.dtype,
        tuple(1 if i in parts else x.units[i] for i in rank),
    )


def divided(x: Tensor, shape: Sequence[int], parts: Mapping[int, int]) -> tuple[Tensor, tuple[int, ...]]:
    """A box of a tensor of this shape with each dimension i in parts split in two, and the indices of the second ones.

    It is a view, whatever x's memory layout.
    """
    sizes: list[int] = []
    inner: list[int] = []
    for i, extent in enumerate(x.shape):
        if i not in parts:
            sizes.append(extent)
            continue
        each = shape[i] // parts[i]
        sizes += [extent // each, each]
        inner.append(len(sizes) - 1)
    return x.view(sizes), tuple(inner)


def _reduced(mode: Mode, x: Tensor, dims: tuple[int, ...], keepdim: bool) -> Tensor:
    """The reduction in x's type (integers stay as wide), but sums of booleans are integers."""
    import torch

    kept = None if x.is_floating_point() or x.dtype == torch.bool else x.dtype
    match mode:
        case "norm2":
            norm: Tensor = torch.linalg.vector_norm(x, 2, dims, keepdim)
            return norm
        case "prod":
            for dim in sorted(dims, reverse=True):
                x = torch.prod(x, dim, keepdim, dtype=kept)
            return x
        case "sum":
            return torch.sum(x, dims, keepdim, dtype=kept)
        case "mean":
            return torch.mean(x, dims, keepdim)
        case "max":
            return torch.amax(x, dims, keepdim)
        case "min":
            return torch.amin(x, dims, keepdim)
