"""The element-wise functions that `pointwise` names, as PyTorch computes them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from math import isinf
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


def unary(fn: str, arguments: Sequence[float], x: Tensor) -> Tensor:
    """fn(x, *arguments). `x_scalar` is fn(x, number), `rx_scalar` fn(number, x)."""
    import torch
    import torch.nn.functional as F

    numbers = [_like(a, x) for a in arguments]
    if fn.endswith("_scalar"):
        return _with_scalar(fn.removesuffix("_scalar"), x, numbers[0])
    match fn:
        case "identity":
            return x
        case "detach":
            detached: Tensor = _detached().apply(x)
            return detached
        case "gelu_tanh":
            return F.gelu(x, approximate="tanh")
        case "clamp":
            low, high = (None if isinf(a) else a for a in numbers)
            return x if low is None and high is None else torch.clamp(x, low, high)
    return _named(fn)(x, *numbers)


def binary(fn: str, arguments: Sequence[float], x: Tensor, y: Tensor) -> Tensor:
    """fn(x, y, *arguments)."""
    import torch

    match fn:
        case "add" | "sub" if arguments:
            alpha = arguments[0] if x.is_floating_point() or y.is_floating_point() else _like(arguments[0], x)
            return _named(fn)(x, y, alpha=alpha)
        case "masked_fill":
            return x.masked_fill(y if y.dtype == torch.bool else y != 0, _like(arguments[0], x))
        case "prelu":  # torch's prelu does not broadcast slopes
            return torch.where(x > 0, x, x * y)
    return _named(fn)(x, y)


@cache
def _detached() -> Any:
    """An autograd function that passes zeros back, created here because torch may not be imported yet."""
    import torch

    class Detached(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.view_as(x)

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Tensor:
            return torch.zeros_like(gradient)

    return Detached


def _with_scalar(fn: str, x: Tensor, number: float) -> Tensor:
    import torch

    match fn:
        case "maximum" | "minimum" | "rdiv":  # tensors only; one without dimensions leaves x its type
            integral = isinstance(number, int)
            dtype = x.dtype if x.is_floating_point() else torch.int64 if integral else torch.get_default_dtype()
            other = torch.full((), number, device=x.device, dtype=dtype)
            return torch.div(other, x) if fn == "rdiv" else _named(fn)(x, other)
        case "rsub":
            return torch.rsub(x, number)
        case "rpow":
            return torch.pow(number, x)
    return _named(fn)(x, number)


def _like(number: float, x: Tensor) -> float:
    """The number as an integer, if x has integers and it is one."""
    return int(number) if not x.is_floating_point() and number % 1 == 0 else number


def _named(fn: str) -> Callable[..., Tensor]:
    """PyTorch's function of that name."""
    import torch
    import torch.nn.functional as F

    if fn == "floor_divide":  # the same, but with a gradient of zeros
        return partial(torch.div, rounding_mode="floor")
    function: Callable[..., Tensor] = getattr(torch, fn, None) or getattr(F, fn)
    return function
