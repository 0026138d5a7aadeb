"""Reductions over whole dimensions. https://pytorch.org/docs/stable/torch.html#reduction-ops"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import TYPE_CHECKING, ClassVar, Literal

from layerwise.geometry import AxisMap, identity, whole
from layerwise.ops.base import Counts, Extents, Kept, Local, Maps, Op
from layerwise.ops.specs import dim_index, only
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Reduce(Op):
    """One number for all positions of `dims`. FLOPs: one an input element, two for the norm.

    "argmax", of one dimension, is the position of the (first) largest element.
    """

    kind: ClassVar[str] = "reduce"
    mode: Literal["mean", "sum", "max", "min", "prod", "norm2", "argmax"]
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
        # What is left of a dimension keeps its label (an upsampling may follow global pooling), but is no sample.
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

    def kept(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Kept:
        linear = self.mode in ("mean", "sum")
        return Kept(inputs=not linear, output=not linear)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """Of the input's type (integers do not become longer ones), but sums of booleans are integers."""
        import torch

        (x,) = inputs
        if not self.dims:
            return x
        kept = None if x.is_floating_point() or x.dtype == torch.bool else x.dtype
        match self.mode:
            case "norm2":
                norm: Tensor = torch.linalg.vector_norm(x, 2, self.dims, self.keepdim)
                return norm
            case "prod":
                for dim in sorted(self._gone(local.specs[0]), reverse=True):
                    x = torch.prod(x, dim, self.keepdim, dtype=kept)
                return x
            case "sum":
                return torch.sum(x, self.dims, self.keepdim, dtype=kept)
            case "mean":
                return torch.mean(x, self.dims, self.keepdim)
            case "max":
                return torch.amax(x, self.dims, self.keepdim)
            case "min":
                return torch.amin(x, self.dims, self.keepdim)
            case "argmax":
                (dim,) = self.dims
                return torch.argmax(x, dim, self.keepdim)

    def _gone(self, x: TensorSpec) -> frozenset[int]:
        return frozenset(dim_index(d, x) for d in self.dims)
