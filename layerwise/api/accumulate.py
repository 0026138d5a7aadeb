"""Accumulate: gradients travel every k-th backward pass only; the loop's optimizer then steps every k-th time.

Between, parameters have no gradient (`.grad` is None), and torch's optimizers leave such parameters as they are: so the
user's loop stays as it is. The k-th step is that of a batch k times as large.
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import AS_WRITTEN
from layerwise.run.parallel import ParallelModule, of


class Accumulate:
    """The state between two synchronisations of a module. every: backward passes from one to the next."""

    def __init__(self, module: ParallelModule, every: int) -> None:
        dims = {dim for config in of(module).plan.strategy.values() for dim, _ in config.degrees}
        if dims - {"n"}:
            raise LayerwiseError(
                f"sync_every={every} is for data parallelism, but the plan splits {', '.join(sorted(dims - {'n'}))}, "
                f"too: {AS_WRITTEN}, or leave ParallelOptions' sync_every out"
            )
        self.module, self.every, self.done = module, every, 0
        self._gradients: dict[nn.Parameter, Tensor] = {}
        self._no_sync: AbstractContextManager[None] | None = None
        self._running = False
        module.register_forward_hook(self._forward)

    def _forward(self, module: nn.Module, inputs: Any, outputs: Any) -> Any:
        if not module.training or not torch.is_grad_enabled():
            return outputs
        return pytree.tree_map_only(Tensor, self._mark, outputs)

    def _mark(self, x: Tensor) -> Tensor:
        """Returns an output as it is, whose gradient comes here before it comes to the module."""
        if x.requires_grad:
            x = x.view_as(x)
            x.register_hook(lambda _: self.begin())  # type: ignore[no-untyped-call]
        return x

    def begin(self) -> None:
        """Begins a backward pass, before the module's own."""
        if self._running:
            return
        self._running = True
        if self.done + 1 < self.every:
            self._no_sync = of(self.module).no_sync()
            self._no_sync.__enter__()
        for parameter, gradient in self._gradients.items():
            parameter.grad = gradient
        of(self.module).begin_backward()  # its end comes before this one's
        torch.autograd.Variable._execution_engine.queue_callback(self._end)

    def _end(self) -> None:
        self._running = False
        self.done = (self.done + 1) % self.every
        if self._no_sync is not None:
            self._no_sync.__exit__(None, None, None)
            self._no_sync = None
            self._gradients = {p: p.grad for p in self.module.parameters() if p.grad is not None}
            for parameter in self._gradients:
                parameter.grad = None
            return
        self._gradients = {}
        for parameter in self.module.parameters():
            if parameter.grad is not None:
                parameter.grad /= self.every
