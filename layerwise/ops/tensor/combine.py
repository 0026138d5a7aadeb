"""Concatenation. https://pytorch.org/docs/stable/generated/torch.cat.html"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from math import lcm
from typing import TYPE_CHECKING, ClassVar

from layerwise.errors import LayerwiseError
from layerwise.geometry import identity, window
from layerwise.ops.base import Op
from layerwise.ops.facts import Local, Maps, Saved
from layerwise.ops.specs import POSITIONS, dim_index, merge_labels, only
from layerwise.ops.tensor.pointwise import promoted
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Concat(Op):
    """Any number of inputs one after the other along `dim`. No FLOPs: it copies."""

    kind: ClassVar[str] = "concat"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False, through=True)
    arithmetic: ClassVar[bool] = False
    dim: int

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        if not inputs:
            raise LayerwiseError("a concatenation of nothing")
        dim = dim_index(self.dim, inputs[0])
        rest = [i for i in range(len(inputs[0].shape)) if i != dim]
        if any(
            len(x.shape) != len(inputs[0].shape) or any(x.shape[i] != inputs[0].shape[i] for i in rest) for x in inputs
        ):
            shapes = ", ".join(x.describe() for x in inputs)
            raise LayerwiseError(f"inputs of a concatenation along dimension {dim} differ elsewhere: {shapes}")
        others = merge_labels(
            tuple(inputs[0].shape[i] for i in rest),
            [only(x, rest) for x in inputs],
            promoted(*(x.dtype for x in inputs)),
        )
        dims, units, shape = list(others.dims), list(others.units), list(others.shape)
        label = next((x.dims[dim] for x in inputs if x.dims[dim]), None)
        # Every input is cut at multiples of its own unit, wherever it begins, or read beyond it.
        unit = lcm(*(x.units[dim] for x in inputs))
        if any(x.shape[dim] % unit for x in inputs):
            label, unit = label if label in POSITIONS else None, 1
        if label in dims:
            label, unit = None, 1
        dims.insert(dim, label)
        units.insert(dim, unit)
        shape.insert(dim, sum(x.shape[dim] for x in inputs))
        return TensorSpec(tuple(shape), tuple(dims), others.dtype, tuple(units))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        dim = dim_index(self.dim, out)
        starts = accumulate((x.shape[dim] for x in inputs), initial=0)
        return tuple(
            tuple(
                window(out.shape[dim], extent, dim, first=-start, last=-start) if i == dim else identity(extent, i)
                for i, extent in enumerate(x.shape)
            )
            for x, start in zip(inputs, starts, strict=False)
        )

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        """An input that has no part in the cell is empty."""
        import torch

        return torch.cat(tuple(inputs), self.dim)
