"""Modules that compute differently in a call of the model: global batch norms and positional dropouts.

A replacement is set on its module as the instance's `forward`. So the module keeps its class, parameters, hooks and
names, and the state dict does not change. A copy or a pickle of the module alone is plain PyTorch again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.nn.statistics import normalised, update
from layerwise.ops.random import Seed, drop
from layerwise.run.data_parallel.calls import Calls, ModelCall
from layerwise.run.data_parallel.replacements import Draws, Replacements
from layerwise.run.schedule.work import summing

M = TypeVar("M", bound=nn.Module)


class Replacement(Generic[M]):
    """A `forward` that replaces a module's own within a call of the model, in training."""

    def __init__(self, module: M, calls: Calls) -> None:
        self.module, self.calls = module, calls
        self._uncompiled = torch.compiler.disable(self._run)  # type: ignore[no-untyped-call]

    def place(self) -> None:
        """Sets this as the module's `forward`."""
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        """Restores the module's own `forward`."""
        if self.module.__dict__.get("forward") is self:
            del self.module.__dict__["forward"]

    @property
    def active(self) -> bool:
        """True if the module computes differently now."""
        return self.module.training

    def __call__(self, x: Tensor) -> Tensor:
        if not self.active:
            result: Tensor = type(self.module).forward(self.module, x)
            return result
        out: Tensor = self._uncompiled(x)
        return out

    def _run(self, x: Tensor) -> Tensor:
        call = self.calls.now()
        if call is None:
            result: Tensor = type(self.module).forward(self.module, x)
            return result
        return self.compute(x, call)

    def compute(self, x: Tensor, call: ModelCall) -> Tensor:
        """Returns the module's output for this rank's part of its input."""
        raise NotImplementedError

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., Any]:
        forward: Callable[..., Any] = memo[id(self.module)].forward  # the class's forward, as the copy has no other yet
        return forward

    def __reduce__(self) -> tuple[Any, ...]:
        return getattr, (self.module, "forward")


class PositionalDropout(Replacement[nn.modules.dropout._DropoutNd]):
    """A dropout that draws like a plan's layers: by the seed and an element's position in the global batch."""

    def __init__(self, module: nn.modules.dropout._DropoutNd, calls: Calls, draws: Draws) -> None:
        super().__init__(module, calls)
        self.draws, self.channels = draws, not isinstance(module, nn.Dropout)
        self.place_of_seed = calls.draw(draws)

    def __call__(self, x: Tensor) -> Tensor:
        call, seeds = self.calls.forward, self.calls.seeds
        if not (torch.compiler.is_compiling() and self.active) or call is None or seeds is None:
            return super().__call__(x)
        return self._dropped(x, call, seeds[self.place_of_seed])

    def compute(self, x: Tensor, call: ModelCall) -> Tensor:
        """Drops elements, or channels of samples."""
        return self._dropped(x, call, self.draws.seed(call.seed))

    def _dropped(self, x: Tensor, call: ModelCall, seed: Seed) -> Tensor:
        shape = list(x.shape)
        first = [0] * len(shape)
        if self.draws.samples is not None:
            rows = _rows_a_sample(x, self.draws.samples, call)
            first[self.draws.samples], shape[self.draws.samples] = call.first * rows, call.total * rows
        rank = min(2, x.dim()) if self.channels else x.dim()
        last = [a + n for a, n in zip(first, x.shape, strict=True)]
        dropped = drop(x, self.module.p, seed, Box(tuple(first[:rank]), tuple(last[:rank])), shape[:rank])
        return x.copy_(dropped) if self.module.inplace else dropped


class GlobalBatchNorm(Replacement[nn.modules.batchnorm._BatchNorm]):
    """A batch norm that normalises by the statistics of all ranks' samples."""

    def __init__(
        self, module: nn.modules.batchnorm._BatchNorm, calls: Calls, all_reduce: Callable[[Tensor], Tensor]
    ) -> None:
        """all_reduce: sums over all ranks, whose samples must be of one size."""
        super().__init__(module, calls)
        self.all_reduce = all_reduce

    @property
    def active(self) -> bool:
        return self.module.training or self.module.running_mean is None

    def compute(self, x: Tensor, call: ModelCall) -> Tensor:
        """Normalises like `layerwise.ops.nn.norm.BatchNorm`, and updates its buffers like torch.nn.BatchNorm2d."""
        module = self.module
        module._check_input_dim(x)  # type: ignore[no-untyped-call]
        count = _rows_a_sample(x, 0, call) * call.total * (x.numel() // (x.shape[0] * x.shape[1]))
        y, *_ = normalised(
            x,
            module.weight,
            module.bias,
            count=count,
            eps=module.eps,
            all_reduce=self.all_reduce,
            shift=module.running_mean,
            known=partial(self._remember, count),
        )
        return y

    def _remember(self, count: int, *moments: Tensor) -> None:
        """Updates the running statistics."""
        module, mean, var = self.module, self.module.running_mean, self.module.running_var
        if mean is None or var is None:
            return
        if module.num_batches_tracked is not None:
            module.num_batches_tracked.add_(1)
        momentum = module.momentum
        if momentum is None:  # the mean over all batches so far, as update_bn uses it
            assert module.num_batches_tracked is not None
            momentum = 1 / float(module.num_batches_tracked)
        update((mean, var), *moments, count=count, momentum=momentum)


def replaced_modules(module: nn.Module, replaced: Replacements, calls: Calls, comm: Comm) -> Iterator[Replacement[Any]]:
    """Yields the replacements for the user's modules."""
    for path, draws in replaced.dropouts.items():
        dropout = module.get_submodule(path)
        assert isinstance(dropout, nn.modules.dropout._DropoutNd)
        yield PositionalDropout(dropout, calls, draws)
    for path, layer in replaced.batch_norms.items():
        norm = module.get_submodule(path)
        assert isinstance(norm, nn.modules.batchnorm._BatchNorm)
        all_reduce = summing(comm, tuple(range(comm.size)), layer)
        assert all_reduce is not None
        yield GlobalBatchNorm(norm, calls, all_reduce)


def _rows_a_sample(x: Tensor, dim: int, call: ModelCall) -> int:
    """Returns the number of rows of x for each of this rank's samples."""
    rows, left = divmod(x.shape[dim], call.samples)
    if left:
        raise LayerwiseError(
            f"a tensor of shape {tuple(x.shape)} does not have the {call.samples} samples along dimension {dim}, so "
            "layerwise cannot tell which samples of the global batch its rows belong to"
        )
    return rows
