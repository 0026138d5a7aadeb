"""Accumulate: gradients travel every k-th backward pass only; the loop's optimizer then steps every k-th time.

Between, parameters have no gradient (`.grad` is None), and torch's optimizers leave such parameters as they are: so the
user's loop stays as it is. The k-th step is that of a batch k times as large.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import AS_WRITTEN
from layerwise.run.parallel import ParallelModule
from layerwise.run.trace import now_s

SHARE = 0.1  # of a step's time that communication may take with sync_every="auto"
MOST = 64  # steps between synchronisations that "auto" goes to


class Accumulate:
    """The state between two synchronisations of a module. every: backward passes from one to the next."""

    def __init__(self, module: ParallelModule, every: int) -> None:
        dims = {dim for config in module.plan.strategy.values() for dim, _ in config.degrees}
        if dims - {"n"}:
            raise LayerwiseError(
                f"sync_every={every} is for data parallelism, but the plan splits {', '.join(sorted(dims - {'n'}))}, "
                f"too: {AS_WRITTEN}, or leave ParallelOptions' sync_every out"
            )
        self.module, self.every, self.done = module, every, 0
        self._kept: dict[nn.Parameter, Tensor] = {}
        self._within: AbstractContextManager[None] | None = None
        self._running = False
        module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return outputs
        return pytree.tree_map_only(Tensor, self._mark, outputs)

    def _mark(self, x: Tensor) -> Tensor:
        marked: Tensor = _MarkedOutput.apply(x, self) if x.requires_grad else x  # type: ignore[no-untyped-call]
        return marked

    def begin(self) -> None:
        """Begins a backward pass, before the module's own."""
        if self._running:
            return
        self._running = True
        if self.done + 1 < self.every:
            self._within = self.module.no_sync()
            self._within.__enter__()
        for parameter, gradient in self._kept.items():
            parameter.grad = gradient
        self.module.begin()  # its end comes before this one's
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._running = False
        self.done = (self.done + 1) % self.every
        if self._within is not None:
            self._within.__exit__(None, None, None)
            self._within = None
            self._kept = {p: p.grad for p in self.module.parameters() if p.grad is not None}
            for parameter in self._kept:
                parameter.grad = None
            return
        self._kept = {}
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.every


class _MarkedOutput(torch.autograd.Function):
    """An output as it is; its backward comes before the module's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, state: Accumulate) -> Tensor:
        ctx.state = state
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.state.begin()
        return gradient, None


def auto(module: ParallelModule, compute_s: float) -> tuple[int, str]:
    """The smallest number of steps for which synchronisation is below `SHARE` of the time, and a line that says so.

    The sum of all gradients over all ranks is measured, here and now; `compute_s` is a step's forward and backward
    pass. Every rank calls it; rank 0's answer holds.
    """
    comm, everyone = module.comm, tuple(range(module.comm.size))
    size = sum(p.numel() for p in module.parameters() if p.requires_grad)
    buffer = torch.zeros(size, dtype=module.options.dtype, device=module.device)
    seconds = []
    for _ in range(4):  # the first connects
        comm.barrier()
        started = now_s(module.device)
        comm.all_reduce(buffer, everyone, "io", "measuring synchronisation").wait()
        seconds.append(now_s(module.device) - started)
    sync_s = median(seconds[1:])
    every = next((k for k in range(1, MOST) if sync_s <= SHARE * (k * compute_s + sync_s)), MOST)
    every = int(comm.broadcast_text(str(every)))
    batch = module.plan.batch
    grows = f". The effective batch grows from {batch:,} to {every * batch:,}" if every > 1 else ""
    return every, (
        f"sync_every={every}: adding up gradients takes {1e3 * sync_s:.3g} ms, the computation of a step "
        f"{1e3 * compute_s:.3g} ms; {SHARE:.0%} may be communication{grows}"
    )
