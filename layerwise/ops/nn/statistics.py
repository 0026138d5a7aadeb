"""Normalization by statistics that several devices sum: one all-reduce forward, one backward, two numbers a channel.

Forward: sums of x - shift and of its square, in float64, as the variance is their small difference. Backward, with the
normalized x̂ and N elements a channel: dx = weight·rstd·(dy - Σdy/N - x̂·Σ(dy·x̂)/N): Ioffe and Szegedy 2015, section
3.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from layerwise.ops.facts import AllReduce

if TYPE_CHECKING:
    from torch import Tensor


def normalised(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    *,
    count: int,
    eps: float,
    all_reduce: AllReduce,
    shift: Tensor | None = None,
    known: Callable[[Tensor, Tensor], None] | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, mean, variance): x of shape (n, c, ...) normalized over all but c, and the statistics, each of shape (c,).

    The statistics cover all devices' x, with `count` elements a channel; the variance is biased. `shift` (c,), equal on
    all devices, should be near the mean: it saves the variance from cancellation, as do the sums in float64. The sums
    of the backward pass are sent in x's type, or float32 for 16 bits. `known` is called with the statistics, even if
    activation checkpointing ends a recomputation as soon as all saved tensors are there.
    """
    result: tuple[Tensor, Tensor, Tensor] = _function().apply(x, weight, bias, count, eps, all_reduce, shift, known)
    return result


def update(running: tuple[Tensor, Tensor], mean: Tensor, variance: Tensor, *, count: int, momentum: float) -> None:
    """Moves the running mean and (unbiased) variance towards the batch's, in place."""
    import torch

    unbiased = variance * (count / (count - 1))
    with torch.no_grad():
        for old, new in zip(running, (mean, unbiased), strict=True):
            old.mul_(1 - momentum).add_(new.to(old.dtype), alpha=momentum)


class Samples:
    """Sums of every channel of some `samples` of a batch, sent to all devices, so that each has the full batch's.

    An `AllReduce` of (2, samples · channels), for `normalised`. all_reduce: over the devices that share the channels.
    """

    def __init__(self, all_reduce: AllReduce, batch: int, samples: slice) -> None:
        self.all_reduce, self.batch, self.samples = all_reduce, batch, samples
        self.whole: Tensor | None = None  # (2, batch, channels), from the first call

    def __call__(self, sums: Tensor) -> Tensor:
        own = sums.view(2, self.samples.stop - self.samples.start, -1)
        whole = sums.new_zeros(2, self.batch, own.shape[2])
        whole[:, self.samples] = own
        whole = self.all_reduce(whole)
        self.whole = whole if self.whole is None else self.whole
        return whole[:, self.samples].reshape(2, -1)

    def averages(self, shift: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Mean and biased variance of each channel, averaged over the batch: (channels,); `count` elements a sample."""
        assert self.whole is not None
        mean, square = self.whole / count
        variance = (square - mean.square()).clamp_(min=0)
        return mean.mean(0) + shift, variance.mean(0)


def moments(x: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and biased variance of every channel of x (n, c, ...), at least in float32."""
    import torch

    exact = torch.promote_types(x.dtype, torch.float32)
    # Running statistics, which nobody reads, select the type of the results.
    unused = [torch.zeros(x.shape[1], dtype=exact, device=x.device) for _ in range(2)]
    mean, variance = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
    return mean, variance


@cache
def _function() -> Any:
    """The autograd function, created here because this module must be importable without torch."""
    import torch
    import torch.nn.functional as F

    class Summed(torch.autograd.Function):
        """The sum over devices; backward sums the gradients."""

        @staticmethod
        def forward(ctx: Any, x: Tensor, all_reduce: AllReduce) -> Tensor:
            ctx.all_reduce = all_reduce
            return all_reduce(x.clone())

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
            return Summed.apply(gradient, ctx.all_reduce), None  # type: ignore[no-untyped-call]

    def differentiable(x: Tensor, weight: Tensor | None, bias: Tensor | None, shift: Tensor, ctx: Any) -> Tensor:
        """The statistics by operators that can be differentiated any number of times: for gradients of gradients."""
        rest, shape = (0, *range(2, x.dim())), (1, -1, *(1,) * (x.dim() - 2))
        exact = x.to(shift.dtype) - shift.view(shape)
        sums = Summed.apply(torch.stack([exact.sum(rest), exact.square().sum(rest)]), ctx.all_reduce)  # type: ignore[no-untyped-call]
        mean, square = sums / ctx.count
        y = (exact - mean.view(shape)) * (square - mean.square() + ctx.eps).rsqrt().view(shape)
        y = y if weight is None else y * weight.view(shape)
        made: Tensor = (y if bias is None else y + bias.view(shape)).to(x.dtype)
        return made

    class Normalised(torch.autograd.Function):
        @staticmethod
        def forward(
            ctx: Any,
            x: Tensor,
            weight: Tensor | None,
            bias: Tensor | None,
            count: int,
            eps: float,
            all_reduce: AllReduce,
            shift: Tensor | None,
            known: Callable[[Tensor, Tensor], None] | None,
        ) -> tuple[Tensor, Tensor, Tensor]:
            mean, variance = moments(x)
            exact, mean, variance = mean.dtype, mean.double(), variance.double()
            if shift is not None:
                mean = mean - shift
            sums = torch.stack([mean, variance + mean.square()]).mul_(x.numel() // x.shape[1])
            mean, square = all_reduce(sums) / count
            variance = (square - mean.square()).clamp_(min=0)
            if shift is not None:
                mean = mean + shift
            mean, variance = mean.to(exact), variance.to(exact)
            if known is not None:
                known(mean, variance)
            given = weight, bias
            weight, bias = (t if t is None else t.to(mean.dtype) for t in (weight, bias))
            ctx.save_for_backward(x, weight, mean, variance, *given)
            ctx.count, ctx.eps, ctx.all_reduce = count, eps, all_reduce
            ctx.mark_non_differentiable(mean, variance)
            return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps), mean, variance

        @staticmethod
        def backward(ctx: Any, dy: Tensor, *_: Tensor) -> tuple[Tensor | None, ...]:
            x, weight, mean, variance, *given = ctx.saved_tensors
            if torch.is_grad_enabled():  # it is to be differentiated again
                wanted = [t for t, needed in zip((x, *given), ctx.needs_input_grad, strict=False) if needed]
                y = differentiable(x, given[0], given[1], mean, ctx)
                made = iter(torch.autograd.grad(y, wanted, dy, create_graph=True))
                return *(next(made) if needed else None for needed in ctx.needs_input_grad[:3]), *(None,) * 5
            # Native reductions do not depend on `weight`, and leave out the gradient of fixed statistics. CUDA's need a
            # weight, and tensors in place of statistics that a training forward pass would have saved.
            scale, unsaved = torch.ones_like(mean) if weight is None else weight, mean.new_empty(0)
            _, dweight, dbias = torch.ops.aten.native_batch_norm_backward(
                dy, x, scale, mean, variance, unsaved, unsaved, False, ctx.eps, [False, True, True]
            )
            grads = (None, None) if weight is None else (dweight, dbias)
            if not ctx.needs_input_grad[0]:  # the same on all devices, as the plan expects
                return None, *grads, *(None,) * 5
            sums = ctx.all_reduce(torch.stack([dbias, dweight]))
            rstd = (variance + ctx.eps).rsqrt_()
            slope = rstd if weight is None else rstd * weight
            along, across = slope * sums / ctx.count
            shape = (1, -1, *(1,) * (x.dim() - 2))
            slope, along, across = (t.view(shape) for t in (slope, across * rstd * mean - along, -across * rstd))
            dx = torch.addcmul(along, x, across).addcmul_(dy, slope).to(x.dtype)
            return dx, *grads, *(None,) * 5

    return Normalised
