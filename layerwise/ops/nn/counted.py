"""A mean over some of many: what counts lies on several devices, so its number is an all-reduce.

PyTorch's cross entropy leaves out the targets of `ignore_index` and divides by the number of the others:
https://pytorch.org/docs/stable/generated/torch.nn.CrossEntropyLoss.html
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor

AllReduce = Callable[["Tensor"], "Tensor"]


def counted_mean(summed: Tensor, counted: Tensor, samples: int, all_reduce: AllReduce | None) -> Tensor:
    """(n,): of each sample its `summed` losses times samples / total; the mean of all these is the mean of what counts.

    summed: float32 at least, as 16 bits cannot count the positions of an image. counted: how many count here, a number;
    all_reduce adds it up over the devices that have the other samples. The sum of nothing has no mean: not a number,
    as in PyTorch.
    """
    count = counted.to(summed.dtype).reshape(1)
    if all_reduce is None:
        return summed / (count / samples)
    result: Tensor = _function().apply(summed, count, samples, all_reduce)
    return result


@cache
def _function() -> Any:
    """The autograd function. Made here, as this module must be imported without torch."""
    import torch
    from torch.autograd.function import once_differentiable

    class CountedMean(torch.autograd.Function):
        """The backward pass adds up the number again: plans count statistics once in each direction."""

        @staticmethod
        def forward(ctx: Any, summed: Tensor, count: Tensor, samples: int, all_reduce: AllReduce) -> Tensor:
            ctx.save_for_backward(count)
            ctx.samples, ctx.all_reduce = samples, all_reduce
            return summed / (all_reduce(count.clone()) / samples)

        @staticmethod
        @once_differentiable
        def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
            (count,) = ctx.saved_tensors
            return gradient / (ctx.all_reduce(count.clone()) / ctx.samples), None, None, None

    return CountedMean
