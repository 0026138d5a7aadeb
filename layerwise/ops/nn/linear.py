"""Linear layers, matrix products and table lookups. https://pytorch.org/docs/stable/nn.html#linear-layers"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import lcm
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import AxisMap, identity
from layerwise.ops.base import Op
from layerwise.ops.facts import Dim, Extents, Gemm, Local, Maps, Parameter, Saved
from layerwise.ops.specs import broadcast, check_positions, merge_labels, only, same
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Linear(Op):
    """x @ weight.T + bias over the last dimension of (..., in); weight (out_features, in). FLOPs: 2·rows·in·out.

    `transposed`: the model stores (in, out_features), as x @ weight and ONNX do.
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
    """The product of two activations, (..., m, k) @ (..., k, p), with leading dimensions broadcast by numpy's rule.

    A one-dimensional operand is a row (left) or a column (right), and its dimension is not in the output. The columns
    have the right operand's label, or that of new channels. FLOPs: 2·m·k·p a product.
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
        """One product for each index of the leading dimensions; if the right operand has none, one wide product."""
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
    """The right operand's contracted dimension."""
    return -2 if len(b.shape) > 1 else -1


@dataclass(frozen=True, slots=True)
class Embedding(Op):
    """Rows of weight (count, width) by integer ids: (n, s) -> (n, s, c).

    The reduction k is the vocabulary: a device with a part of the rows adds zeros for all other ids. No FLOPs, as a
    lookup is bound by memory. The row of the id `padding` gets no gradient. `wraps`: negative ids count from the end.
    """

    kind: ClassVar[str] = "embedding"
    saves: ClassVar[Saved] = Saved(output=False)
    arithmetic: ClassVar[bool] = False
    added: ClassVar[frozenset[str]] = frozenset({"wraps"})
    weights: ClassVar[bool] = True
    ids: ClassVar[bool] = True
    count: int
    width: int
    dtype: str = "float32"
    padding: int | None = None
    wraps: bool = False

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (ids,) = inputs
        if ids.differentiable:
            raise LayerwiseError(f"an embedding needs integer ids, not {ids.dtype}")
        label = None if "c" in ids.dims else "c"
        return TensorSpec((*ids.shape, self.width), (*ids.dims, label), self.dtype, (*ids.units, 1))

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return (same(inputs[0]),)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        rank = len(out.shape)
        maps = (identity(self.count, rank), identity(self.width, rank - 1))
        return (Parameter("weight", (self.count, self.width), maps, initial="normal", scale=1.0),)

    def reductions(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Dim, ...]:
        return (Dim("k", self.count),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        (ids,), weight = inputs, parameters["weight"]
        if self.wraps:
            ids = ids.where(ids >= 0, ids + self.count)
        if weight.shape[0] == self.count:
            return F.embedding(ids, weight, self.padding)
        check_positions(ids, self.count)
        rows, first = ids - local.cell.lo[-1], local.cell.lo[-1]
        elsewhere = (rows < 0) | (rows >= weight.shape[0])
        here = self.padding is not None and first <= self.padding < first + weight.shape[0]
        padding = self.padding - first if here and self.padding is not None else None
        looked_up = F.embedding(rows.masked_fill(elsewhere, 0), weight, padding)
        return looked_up.masked_fill(elsewhere.unsqueeze(-1), 0.0)


@dataclass(frozen=True, slots=True)
class Learned(Op):
    """A parameter of shape `parameter`, expanded to `shape`, whose dimension 0 is the samples; it has no inputs.

    Every device with samples holds the parameter, like a bias: only its gradient is summed. No FLOPs.
    """

    kind: ClassVar[str] = "learned"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)
    arithmetic: ClassVar[bool] = False
    parameter: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str = "float32"

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        inner = (*(None,) * (len(self.shape) - 2), "c")[: len(self.shape) - 1]
        return TensorSpec(self.shape, ("n", *inner), self.dtype)

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return ()

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        return (Parameter("value", self.parameter, broadcast(self.parameter, out)),)

    def at_batch(self, old: int, new: int) -> Op:
        return replace(self, shape=(new, *self.shape[1:]))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        return parameters["value"].expand(local.out.shape)
