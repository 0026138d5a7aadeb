"""Element-wise functions in a row of either table."""

from __future__ import annotations

from layerwise.importers.registry import Build, Built, Call, Result, Tensor
from layerwise.ops.tensor.pointwise import Unary


def unary(fn: str, *numbers: str) -> Build:
    """The row of a function of one tensor; `numbers` are the names of its arguments."""
    return lambda call: Built(Unary(fn, tuple(call.number(n) for n in numbers)), (call.tensors[0],))


def scaled(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    return x if factor == 1 else Built(Unary("mul_scalar", (float(factor),)), (x,))


def gelu(call: Call) -> Result:
    return Built(Unary("gelu_tanh" if call.get("approximate") == "tanh" else "gelu"), (call.tensors[0],))
