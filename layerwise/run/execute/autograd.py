"""The network as one function of autograd, so that every rank goes through all of its backward pass; and its loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.ops.loss import Loss
from layerwise.run.execute.executor import Executor, Pass
from layerwise.run.execute.reducer import Gradients


@dataclass(frozen=True, slots=True)
class Call:
    """One call of the network."""

    executor: Executor
    run: Pass
    fed: Mapping[str, Tensor]
    factors: Sequence[float]  # what the gradient of each output is multiplied by
    gradients: Callable[[], Gradients]  # begins a backward pass

    def outputs(self) -> tuple[Tensor, ...]:
        """This rank's boxes of them; empty tensors where it has none."""
        anchor = torch.zeros((), device=self.executor.options.device, requires_grad=self.run.differentiate)
        made: tuple[Tensor, ...] = _Function.apply(anchor, self)  # type: ignore[no-untyped-call]
        return made


class _Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call) -> tuple[Tensor, ...]:
        outputs = call.executor.forward(call.run, call.fed)
        ctx.call, ctx.empty = call, [out is None for out in outputs]
        none = anchor.new_zeros(0, dtype=call.executor.options.dtype)
        made = tuple(none.clone() if out is None else out.clone() for out in outputs)
        ctx.mark_non_differentiable(*(out for out in made if not out.is_floating_point()))
        return made

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[None, None]:
        if ctx.call is None:
            raise LayerwiseError("backward through the same forward pass twice is not supported")
        call: Call = ctx.call
        scaled = [
            None if empty else g if factor == 1 else g * factor
            for g, empty, factor in zip(gradients, ctx.empty, call.factors, strict=True)
        ]
        into = call.gradients()
        call.executor.backward(call.run, scaled, into)
        with torch.no_grad():
            into.finish()
        ctx.call = None
        return None, None


def factors(graph: LayerGraph, part: float) -> list[float]:
    """What makes gradients those of the mean over the global batch, where a rank's loss is the mean over its `part`."""
    ops = [graph[name].main for name in graph.layers[-1].inputs]
    return [1.0 if isinstance(op, Loss) and op.reduction == "sum" else part for op in ops]


def sum_of_losses(mine: Tensor, comm: Comm) -> Tensor:
    """All ranks' losses added up, on every rank."""
    total: Tensor = _SumOfLosses.apply(mine, comm)  # type: ignore[no-untyped-call]
    return total


class _SumOfLosses(torch.autograd.Function):
    """Back: every rank has the same gradient already."""

    @staticmethod
    def forward(ctx: Any, mine: Tensor, comm: Comm) -> Tensor:
        total: Tensor = mine.detach().clone().reshape(1)
        if comm.size > 1:
            comm.all_reduce(total, tuple(range(comm.size)), "io", "the loss").wait()
        summed: Tensor = total.reshape(())
        return summed

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient, None
