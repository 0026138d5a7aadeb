"""Linear layers and matrix products. https://pytorch.org/docs/stable/generated/torch.nn.Linear.html"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import lcm
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity
from layerwise.ops.base import Op
from layerwise.ops.facts import Dim, Extents, Gemm, Local, Maps, Parameter, Saved
from layerwise.ops.specs import broadcast, merge_labels, only
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """x @ weight.T + bias over the last dimension of (..., in); weight (out_features, in). FLOPs 2·rows·in·out.

    `transposed`: the model stores (in, out_features), as x @ weight does and ONNX.
    """

    kind: ClassVar[str] = "linear"
    saves: ClassVar[Saved] = Saved(output=False)
    weights: ClassVar[bool] = True
    out_features: int
    bias: bool = True
    transposed: bool = False

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if not x.shape:
            raise LayerwiseError("a linear layer needs an input of at least one dimension, not a scalar")
        leading = x.dims[:-1]
        return TensorSpec(
            (*x.shape[:-1], self.out_features),
            (*leading, None if "c" in leading else "c"),
            x.dtype,
            (*x.units[:-1], 1),
        )

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        (x,) = inputs
        rows = tuple(identity(extent, i) for i, extent in enumerate(x.shape[:-1]))
        return ((*rows, identity(x.shape[-1], len(out.shape))),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        depth, column = inputs[0].shape[-1], len(out.shape) - 1
        columns = identity(self.out_features, column)
        shape, maps = (self.out_features, depth), (columns, identity(depth, column + 1))
        if self.transposed:
            shape, maps = shape[::-1], maps[::-1]
        scale = depth**-0.5
        weight = Parameter("weight", shape, maps, initial="uniform", scale=scale)
        bias = Parameter("bias", (self.out_features,), (columns,), epilogue=True, initial="uniform", scale=scale)
        return (weight, bias) if self.bias else (weight,)

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        (x,) = inputs
        return (Dim("k", x.shape[-1], x.units[-1]),)

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        e = extents.astype(np.float64)
        return (Gemm(e[..., :-2].prod(-1), e[..., -2], e[..., -1], np.ones_like(e[..., -1])),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        weight = parameters["weight"]
        return F.linear(inputs[0], weight.t() if self.transposed else weight, parameters.get("bias"))

    def finish(self, total: Tensor, parameters: Mapping[str, Tensor]) -> Tensor:
        return total + parameters["bias"].to(total.dtype) if self.bias else total


@dataclass(frozen=True, slots=True)
class MatMul(Op):
    """The product of two activations, (..., m, k) @ (..., k, p), leading dimensions broadcast by numpy's rule.

    A one-dimensional operand is a row (left) or a column (right), and its dimension is not in the output. The columns
    are labelled as those of the right operand, or as new channels. FLOPs 2·m·k·p a product.
    """

    kind: ClassVar[str] = "matmul"
    saves: ClassVar[Saved] = Saved(output=False)

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        a, b = inputs
        if not a.shape or not b.shape or a.shape[-1] != b.shape[_depth(b)]:
            raise LayerwiseError(f"{a.describe()} @ {b.describe()} does not fit: the inner dimensions differ")
        stacks = only(a, range(len(a.shape) - 2)), only(b, range(len(b.shape) - 2))
        try:
            shape = np.broadcast_shapes(stacks[0].shape, stacks[1].shape)
        except ValueError:
            raise LayerwiseError(f"{a.describe()} @ {b.describe()}: the leading dimensions do not broadcast") from None
        stack = merge_labels(shape, stacks, a.dtype)
        dims, units = list(stack.dims), list(stack.units)
        if len(a.shape) > 1:
            shape = (*shape, a.shape[-2])
            if a.dims[-2] in dims:
                dims[dims.index(a.dims[-2])] = None
            dims.append(a.dims[-2])
            units.append(a.units[-2])
        if len(b.shape) > 1:
            shape = (*shape, b.shape[-1])
            label = b.dims[-1] or ("c" if b.units[-1] < b.shape[-1] else None)
            dims.append(None if label in dims else label)
            units.append(b.units[-1])
        return TensorSpec(shape, tuple(dims), a.dtype, tuple(units))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        a, b = inputs
        columns = len(b.shape) > 1
        rank = len(out.shape) - columns - (len(a.shape) > 1)
        stack = only(out, range(rank))  # the leading dimensions
        depth = len(out.shape)
        left: list[AxisMap] = [identity(a.shape[-1], depth)]
        if len(a.shape) > 1:
            left = [*broadcast(a.shape[:-2], stack), identity(a.shape[-2], rank), *left]
        right: list[AxisMap] = [identity(b.shape[_depth(b)], depth)]
        if columns:
            right = [*broadcast(b.shape[:-2], stack), *right, identity(b.shape[-1], depth - 1)]
        return tuple(left), tuple(right)

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        a, b = inputs
        return (Dim("k", a.shape[-1], lcm(a.units[-1], b.units[_depth(b)])),)

    def gemms(self, inputs: Sequence[TensorSpec], extents: Extents) -> tuple[Gemm, ...]:
        """One product for each index of the leading dimensions; a right operand without those is one wide product."""
        a, b = inputs
        e = extents.astype(np.float64)
        ones = np.ones_like(e[..., -1])
        columns = e[..., -2] if len(b.shape) > 1 else ones
        upper = e[..., : -1 - (len(b.shape) > 1)]
        if len(b.shape) <= 2:
            return (Gemm(upper.prod(-1), columns, e[..., -1], ones),)
        rows, stack = (upper[..., -1], upper[..., :-1]) if len(a.shape) > 1 else (ones, upper)
        return (Gemm(rows, columns, e[..., -1], stack.prod(-1)),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        return torch.matmul(*inputs)


def _depth(b: TensorSpec) -> int:
    """The dimension of the right operand that is contracted."""
    return -2 if len(b.shape) > 1 else -1
