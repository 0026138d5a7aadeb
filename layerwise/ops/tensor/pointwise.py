"""Element-wise operators: an output element depends on the same position of every input, with numpy's broadcasting.

FLOPs: one an output element, whatever the function, as memory is the bound. A function that is not in the tables below
is planned like any other; its output's type is then assumed to be its input's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box, identity, whole
from layerwise.ops.base import Op
from layerwise.ops.facts import Extents, Local, Maps, Parameter, Saved
from layerwise.ops.random import drop
from layerwise.ops.specs import broadcast, merge_labels
from layerwise.ops.tensor.functions import binary, unary
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


# Names as in torch or torch.nn.functional; `x_scalar` is torch.x(input, a), `rx_scalar` torch.x(a, input). Comments
# list `arguments`.
REAL = frozenset({  # floating-point results, even for integers
    "acos", "acosh", "asin", "asinh", "atan", "atanh", "cos", "cosh", "sin", "sinh", "tan", "tanh",
    "exp", "exp2", "expm1", "log", "log10", "log1p", "log2", "sqrt", "rsqrt", "reciprocal", "sigmoid",
    "erf", "erfc", "erfinv", "lgamma", "digamma",
    "gelu", "gelu_tanh",  # exact, and approximate="tanh"
    "hardsigmoid", "hardswish", "logsigmoid", "mish", "selu", "silu", "softsign", "tanhshrink",
    "celu", "elu",  # alpha
    "leaky_relu",  # negative slope
    "hardshrink", "softshrink",  # lambda
    "logit",  # eps, optional
    "softplus",  # beta, threshold
    "div_scalar", "rdiv_scalar",
})  # fmt: skip
KEEPING = frozenset({  # results of the input's type
    "identity", "detach", "abs", "ceil", "floor", "frac", "neg", "round", "sign", "square", "trunc", "relu", "relu6",
    "clamp", "hardtanh",  # low, high (maybe infinite)
    "threshold",  # threshold, value
    "add_scalar", "sub_scalar", "rsub_scalar", "mul_scalar", "pow_scalar", "rpow_scalar",
    "floor_divide_scalar", "fmod_scalar", "remainder_scalar", "maximum_scalar", "minimum_scalar",
    "bitwise_not",
})  # fmt: skip
TESTING = frozenset({  # boolean results
    "isfinite", "isinf", "isnan", "logical_not",
    "eq_scalar", "ne_scalar", "lt_scalar", "le_scalar", "gt_scalar", "ge_scalar",
})  # fmt: skip
BINARY = frozenset({  # results of the common type of both operands
    "add", "sub",  # alpha, optional: x + alpha*y
    "mul", "floor_divide", "fmod", "remainder", "pow", "maximum", "minimum", "bitwise_and", "bitwise_or", "bitwise_xor",
    "prelu",  # x where positive, else x*y
    "masked_fill",  # value: it where y is true, else x
})  # fmt: skip
# What the backward pass reads instead of the inputs: the result, or nothing. pytorch/tools/autograd/derivatives.yaml
RESULT = frozenset({
    "relu", "sigmoid", "tanh", "tan", "exp", "exp2", "expm1", "sqrt", "rsqrt", "reciprocal", "rpow_scalar",
})  # fmt: skip
NOTHING = TESTING | {
    "identity", "detach", "neg", "ceil", "floor", "round", "trunc", "sign", "frac", "bitwise_not",
    "add_scalar", "sub_scalar", "rsub_scalar", "mul_scalar", "div_scalar", "floor_divide_scalar",
}  # fmt: skip
BINARY_REAL = frozenset({"atan2", "copysign", "div", "hypot", "logaddexp"})
BINARY_TESTING = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "logical_and", "logical_or", "logical_xor"})

# https://pytorch.org/docs/stable/tensor_attributes.html#type-promotion-doc
_ORDER = ("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64",
          "complex64", "complex128")  # fmt: skip
_DEFAULT = "float32"  # what integers become


def promoted(first: str, *others: str) -> str:
    """The common element type of several tensors."""
    result = first
    for other in others:
        if {result, other} == {"complex64", "float64"}:
            result = "complex128"
        elif {result, other} in ({"float16", "bfloat16"}, {"uint8", "int8"}):
            result = "float32" if "float16" in (result, other) else "int16"
        else:
            result = max(result, other, key=_ORDER.index)
    return result


def _real(dtype: str) -> str:
    return dtype if "float" in dtype or "complex" in dtype else _DEFAULT


class _Pointwise(Op):
    """Every output element needs each input's element at its own index; inputs broadcast by numpy's rule."""

    pointwise: ClassVar[bool] = True

    def needs(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Maps, ...]:
        return tuple(broadcast(x, out) for x in inputs)


@dataclass(frozen=True, slots=True)
class Unary(_Pointwise):
    """A function of one tensor and Python numbers (`arguments`)."""

    kind: ClassVar[str] = "unary"
    elementwise = True
    fn: str
    arguments: tuple[float, ...] = ()

    @property
    def detaches(self) -> bool:
        return self.fn == "detach"

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        dtype = x.dtype
        if self.fn in TESTING:
            dtype = "bool"
        elif self.fn == "abs" and "complex" in dtype:
            dtype = "float64" if dtype == "complex128" else "float32"
        elif self.fn in REAL or any(a != int(a) for a in self.arguments if np.isfinite(a)):
            dtype = _real(dtype)
        elif self.arguments:
            dtype = "int64" if dtype == "bool" else dtype
        return TensorSpec(x.shape, x.dims, dtype, x.units)

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        return Saved(inputs=self.fn not in RESULT | NOTHING, output=self.fn in RESULT)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        _check_known("function", self.fn, REAL | KEEPING | TESTING)
        return unary(self.fn, self.arguments, inputs[0])


@dataclass(frozen=True, slots=True)
class Prelu(_Pointwise):
    """x where positive, else weight*x; `count` weights: one, or one a channel (dimension 1).

    https://pytorch.org/docs/stable/generated/torch.nn.PReLU.html
    """

    kind: ClassVar[str] = "prelu"
    saves: ClassVar[Saved] = Saved(output=False)
    count: int = 1

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        if self.count != 1 and (len(x.shape) < 2 or x.shape[1] != self.count):
            raise LayerwiseError(f"{self.count} slopes do not fit the channels of {x.describe()}")
        return x

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        maps = (whole(1) if self.count == 1 else identity(self.count, 1),)
        return (Parameter("weight", (self.count,), maps, epilogue=True, scale=0.25),)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch.nn.functional as F

        return F.prelu(inputs[0], parameters["weight"])


@dataclass(frozen=True, slots=True)
class Binary(_Pointwise):
    """fn(x, y) of two tensors, or of one and the parameter "operand" of shape `parameter` (swapped: fn(operand, x)).

    If not `trainable`: a buffer or a constant. `stored`: the shape of the model's own tensor, if it differs in
    dimensions of size 1: (c,) for (c, 1, 1).
    """

    kind: ClassVar[str] = "binary"
    fn: str
    parameter: tuple[int, ...] | None = None
    swapped: bool = False
    trainable: bool = True
    arguments: tuple[float, ...] = ()
    stored: tuple[int, ...] | None = None

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        assert len(inputs) == (2 if self.parameter is None else 1), f"{self} of {len(inputs)} inputs"
        dtype = promoted(*(x.dtype for x in inputs))
        if self.fn == "masked_fill":
            dtype = inputs[0].dtype
        elif self.fn in BINARY_TESTING:
            dtype = "bool"
        elif self.fn in BINARY_REAL or (self.parameter is not None and self.trainable):
            dtype = _real(dtype)
        return _broadcast(inputs, () if self.parameter is None else (self.parameter,), dtype)

    def parameters(self, inputs: Sequence[TensorSpec], out: TensorSpec) -> tuple[Parameter, ...]:
        if self.parameter is None:
            return ()
        maps = broadcast(self.parameter, out)
        if self.stored is not None:
            long = iter([m for m, extent in zip(maps, self.parameter, strict=True) if extent > 1])
            maps = tuple(next(long) if extent > 1 else whole(1) for extent in self.stored)
        return (
            Parameter(
                "operand", self.parameter if self.stored is None else self.stored, maps, self.trainable, epilogue=True
            ),
        )

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        linear, alike = self.fn in ("add", "sub"), all(x.shape == inputs[0].shape for x in inputs)
        through = self.fn == "add" and alike and not self.arguments
        tests = linear or self.fn in BINARY_TESTING or self.fn == "masked_fill"
        return Saved(inputs=not tests, output=self.fn in ("pow", "atan2", "hypot"), through=through)

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        _check_known("function of two tensors", self.fn, BINARY | BINARY_REAL | BINARY_TESTING)
        x, y = inputs if self.parameter is None else (inputs[0], parameters["operand"])
        if self.stored is not None and self.parameter is not None:
            long = iter([here for here, extent in zip(y.shape, self.stored, strict=True) if extent > 1])
            y = y.reshape([next(long) if extent > 1 else 1 for extent in self.parameter])
        return binary(self.fn, self.arguments, *((y, x) if self.swapped else (x, y)))


@dataclass(frozen=True, slots=True)
class Where(_Pointwise):
    """The second input where the first is true, else the third."""

    kind: ClassVar[str] = "where"
    saves: ClassVar[Saved] = Saved(inputs=False, output=False)

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        condition, x, y = inputs
        return _broadcast((x, y, condition), (), promoted(x.dtype, y.dtype))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        condition, x, y = inputs
        return torch.where(condition if condition.dtype == torch.bool else condition != 0, x, y)


@dataclass(frozen=True, slots=True)
class Dropout(_Pointwise):
    """Zero with probability p, else 1/(1-p) times the input; `channels`: one draw for each (n, c); `samples`: for each
    n.

    The draw depends on an element's position in the full tensor, so every partition drops the same elements.
    """

    kind: ClassVar[str] = "dropout"
    draws: ClassVar[bool] = True
    p: float
    channels: bool = False
    samples: bool = False  # stochastic depth

    @property
    def random(self) -> bool:
        return self.p > 0

    @property
    def elementwise(self) -> bool:
        return not (self.channels or self.samples)

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        if not 0 <= self.p <= 1:
            raise LayerwiseError(f"a dropout probability must lie in [0, 1], not {self.p}")
        return inputs[0]

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        """Memory: a saved byte for each draw; while drawing, two 64-bit numbers; then the input times 0 or 1."""
        (x,) = inputs
        if self.p in (0, 1):
            return Saved(inputs=False, output=False, through=self.p == 0)
        extents = (hi - lo).astype(np.float64)
        drawn = (extents[..., :1] if self.samples else extents[..., :2] if self.channels else extents).prod(-1)
        product = extents.prod(-1) * x.item_bytes
        return Saved(
            inputs=False, output=False, extra=drawn, forward=np.maximum(16 * drawn, product), between=product + drawn
        )

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        (x,) = inputs
        if not local.training:
            return x
        rank = 1 if self.samples else min(2, x.dim()) if self.channels else x.dim()
        place = Box(local.out.lo[:rank], local.out.hi[:rank])
        return drop(x, self.p, local.seed, place, local.space.out.shape[:rank])


@dataclass(frozen=True, slots=True)
class Cast(_Pointwise):
    """A cast to another element type. No FLOPs."""

    kind: ClassVar[str] = "cast"
    arithmetic: ClassVar[bool] = False
    elementwise = True
    dtype: str

    def output(self, *inputs: TensorSpec) -> TensorSpec:
        (x,) = inputs
        return TensorSpec(x.shape, x.dims, self.dtype, x.units)

    def unchanged(self, inputs: Sequence[TensorSpec]) -> bool:
        return inputs[0].dtype == self.dtype

    def saved(self, inputs: Sequence[TensorSpec], lo: Extents, hi: Extents) -> Saved:
        return Saved(inputs=False, output=False, through=self.unchanged(inputs))

    def run(self, local: Local, inputs: Sequence[Tensor], parameters: Mapping[str, Tensor]) -> Tensor:
        import torch

        dtype: torch.dtype = getattr(torch, self.dtype)
        return inputs[0].to(dtype)


def _check_known(what: str, fn: str, known: frozenset[str]) -> None:
    if fn not in known:
        raise LayerwiseError(f"layerwise can plan the {what} {fn!r}, but has no kernel to run it")


def _broadcast(inputs: Sequence[TensorSpec], others: tuple[tuple[int, ...], ...], dtype: str) -> TensorSpec:
    """The inputs (and operands whose shape alone is known) broadcast; labels are the inputs'."""
    try:
        shape = np.broadcast_shapes(*(x.shape for x in inputs), *others)
    except ValueError:
        named = [x.describe() for x in inputs] + [str(shape) for shape in others]
        raise LayerwiseError(f"shapes do not broadcast: {' with '.join(named)}") from None
    return merge_labels(shape, inputs, dtype)
