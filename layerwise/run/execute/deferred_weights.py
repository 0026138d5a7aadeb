"""Deferred weights: a convolution's gradient of its weights is made after that of its input is sent.

Autograd makes both in one call, and what other ranks wait for would leave after it. Here the call is made twice, each
time for a part of the result: the numbers are the same, and no kernel is added. In between is the exchange.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

Settings = tuple[Sequence[int], Sequence[int], Sequence[int], bool, Sequence[int], int]  # as aten::convolution has them


class DeferredWeights:
    """One convolution of a forward pass, the gradient of whose weights is made later in each backward pass.

    span: what it is made in.
    """

    def __init__(self, dtype: torch.dtype, span: Callable[[], AbstractContextManager[object]]) -> None:
        self._dtype, self._span = dtype, span
        self._deferred: tuple[Tensor, Tensor, Tensor, Settings] | None = None

    def convolve(
        self,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        stride: Sequence[int],
        padding: Sequence[int],
        dilation: Sequence[int],
        groups: int,
    ) -> Tensor:
        """Returns what conv1d to conv3d do. Back: gradients of x and the bias; `make` makes that of the weight."""
        kind = x.device.type
        if torch.is_autocast_enabled(kind) and x.dtype != torch.float64:
            dtype = torch.get_autocast_dtype(kind)
            x, weight, bias = x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)
        settings = stride, padding, dilation, False, [0] * len(stride), groups
        out: Tensor = _Convolution.apply(x, weight, bias, settings, self)  # type: ignore[no-untyped-call]
        return out

    def defer(self, gradient: Tensor, x: Tensor, weight: Tensor, settings: Settings) -> None:
        """Remembers what `make` needs, which is called later in the same backward pass."""
        if not torch.is_grad_enabled():  # else it is differentiated once more, and needs to know what x was made of
            x, weight = x.detach(), weight.detach()
        self._deferred = gradient, x, weight, settings

    def make(self) -> Tensor | None:
        """Returns the gradient of the weights; None where the backward pass has not come by the convolution."""
        deferred, self._deferred = self._deferred, None
        if deferred is None:
            return None
        gradient, x, weight, settings = deferred
        with self._span():
            of_weight: Tensor = _backward(gradient, x, weight, None, settings, [False, True, False])[1]
            return of_weight.to(self._dtype)


def defer_weights(token: Tensor, weight: Tensor, deferred: DeferredWeights) -> tuple[Tensor, Tensor]:
    """Returns the order token and the weight. Back: its gradient is made when the token comes by."""
    result: tuple[Tensor, Tensor] = _Deferred.apply(token, weight, deferred)  # type: ignore[no-untyped-call]
    return result


class _Deferred(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, token: Tensor, weight: Tensor, deferred: DeferredWeights) -> tuple[Tensor, Tensor]:
        ctx.deferred = deferred
        ctx.set_materialize_grads(False)
        return token.view_as(token), weight.view_as(weight)

    @staticmethod
    def backward(ctx: Any, token: Tensor | None, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if token is None:
            token = torch.zeros(())
        of_weight = ctx.deferred.make()
        if gradient is not None:  # in the backward pass of a backward pass the weight is used there, too
            of_weight = gradient if of_weight is None else of_weight + gradient
        return token, of_weight, None


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, settings: Settings, deferred: DeferredWeights
    ) -> Tensor:
        ctx.settings, ctx.deferred, ctx.bias = settings, deferred, None if bias is None else list(bias.shape)
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight)
        return torch.convolution(x, weight, bias, *settings)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        if gradient is None:
            return (None,) * 5
        x, weight = ctx.saved_tensors
        ctx.deferred.defer(gradient, x, weight, ctx.settings)
        mask = [ctx.needs_input_grad[0], False, ctx.needs_input_grad[2]]
        of_x, _, of_bias = _backward(gradient, x, weight, ctx.bias, ctx.settings, mask)
        return of_x, None, of_bias, None, None


def _backward(
    gradient: Tensor, x: Tensor, weight: Tensor, bias: Sequence[int] | None, settings: Settings, mask: Sequence[bool]
) -> Sequence[Any]:
    """Returns the gradients of x, weight and bias, as far as `mask` wants them."""
    gradients: Sequence[Any] = torch.ops.aten.convolution_backward(gradient, x, weight, bias, *settings, mask)
    return gradients
