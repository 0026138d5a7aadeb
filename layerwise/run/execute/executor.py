"""Executor: a plan's layers in order, with the redistributions between, as one graph of autograd's.

Every rank goes through all layers, also those that it has no part of: one order of communication, on all ranks. What
communicates takes the order token along (see `run.execute.autograd`), so the backward pass keeps that order, reversed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd import profiler
from torch.utils import checkpoint

from layerwise.chrome import Category
from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.run.execute.autograd import moved, ordered
from layerwise.run.schedule.layers import Schedule, ScheduledEdge, ScheduledLayer
from layerwise.run.trace import Trace

_NOTHING: AbstractContextManager[object] = nullcontext()


@dataclass(slots=True)
class Pass:
    """A forward pass."""

    parameters: Mapping[str, Any]  # this rank's boxes by name, buffers among them
    training: bool
    seed: int  # of this step's random numbers
    number: int  # the step's, for error messages
    token: Tensor  # the order token; it requires a gradient where there may be a backward pass

    @property
    def differentiate(self) -> bool:
        """Whether a backward pass may follow."""
        return self.token.requires_grad


class Executor:
    """Runs one rank's schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.comm, self.options = schedule, schedule.comm, schedule.options
        self.trace: Trace | None = None
        self._likes: dict[torch.dtype, Tensor] = {}

    def forward(self, run: Pass, fed: Mapping[str, Tensor]) -> list[Tensor | None]:
        """This rank's boxes of the outputs, from those of the inputs (constants are in `fed`)."""
        values = dict[str, Tensor | None]()
        types = dict[str, torch.dtype]()  # of what each layer makes
        outputs: list[Tensor | None] = []
        for i, scheduled in enumerate(self.schedule.layers):
            name, role = scheduled.layer.name, scheduled.layer.role
            self.comm.at(run.number, name)
            if not (run.training or scheduled.returned):  # nothing is remembered in evaluation
                self._drop(values, scheduled, i)
                continue
            received = [self._redistribute(run, edge, values, types, role) for edge in scheduled.edges]
            if role is Role.SINK:
                outputs = received
                break
            if role is Role.TIED:
                values[name] = run.parameters.get(name)
            elif role is not Role.COMPUTE:
                values[name] = fed.get(name)
            else:
                values[name] = None if scheduled.work is None else self._layer(run, scheduled, received)
            types[name] = getattr(values[name], "dtype", scheduled.dtype or torch.int64)
            received = []
            self._drop(values, scheduled, i)
        return outputs

    def _drop(self, values: dict[str, Tensor | None], scheduled: ScheduledLayer, number: int) -> None:
        """Lets go of what no later layer uses."""
        for name in (scheduled.layer.name, *(edge.source for edge in scheduled.edges)):
            if self.schedule.last_use.get(name, number) == number:
                values.pop(name, None)

    def _redistribute(
        self,
        run: Pass,
        edge: ScheduledEdge,
        values: Mapping[str, Tensor | None],
        types: Mapping[str, torch.dtype],
        user: Role,
    ) -> Tensor | None:
        """What this rank needs of a layer's output for another one."""
        x, dtype, way = values[edge.source], types[edge.source], edge.redistribution
        whole = user is Role.SINK and self.schedule.free  # every rank has all of it, and computes the same of it
        if not (edge.travels or whole):
            return way.kept(x, self._like(dtype))
        like = self._like(dtype)

        def there(x: Tensor | None) -> Tensor | None:
            with self._span(edge.what, "transfers"):
                return way.forward(x, like)

        def back(gradient: Tensor | None) -> Tensor | None:
            self.comm.at(run.number, f"{edge.what} (backward)")
            with self._span(f"{edge.what} (backward)", "transfers"):
                return way.adjoint(gradient, like)

        def own(gradient: Tensor | None) -> Tensor | None:
            """Nothing is added up where all ranks have the same gradient."""
            box = way.transfer.own
            return None if box is None or gradient is None else gradient[box.slices()]

        if not (run.differentiate and edge.backward):
            with torch.no_grad():
                return there(x)
        alike = whole and not self.schedule.whole_classes
        run.token, result = moved(run.token, x, there, own if alike else back)
        return result

    def _layer(self, run: Pass, scheduled: ScheduledLayer, received: Sequence[Tensor | None]) -> Tensor:
        """The rank's box of a layer's output."""
        assert scheduled.work is not None
        layer, count = scheduled.layer, len(scheduled.layer.specs)
        tied = iter(received[count:])
        given = [next(tied) if name is None else run.parameters[name] for name in scheduled.parameters]
        inputs = list(received[:count])
        if not (run.differentiate and scheduled.backward):
            with torch.no_grad(), self._span(layer.name, "compute"):
                return self._compute(run, scheduled, inputs, given)
        communicates = scheduled.work.communicates
        if self.trace is not None:
            begun: list[int] = []
            self._end_span_behind(run, inputs, given, begun)
        elif communicates:
            _wait_for_one(run, inputs, given)
        with self._span(layer.name, "compute"):
            if self.options.recompute:
                out = self._recomputed(run, scheduled, inputs, given)
            else:
                out = self._compute(run, scheduled, inputs, given)
        if self.trace is not None:
            run.token, out = ordered(run.token, out, at_backward=partial(self._begin_span, layer.name, run, begun))
        elif communicates:
            run.token, out = ordered(run.token, out)
        return out

    def _compute(
        self, run: Pass, scheduled: ScheduledLayer, inputs: Sequence[Tensor | None], given: Sequence[Tensor | None]
    ) -> Tensor:
        assert scheduled.work is not None
        try:
            with self._autocast():
                out = scheduled.work.run(self.comm, _all(inputs), _all(given), training=run.training, seed=run.seed)
                return out if scheduled.dtype is None or out.dtype == scheduled.dtype else out.to(scheduled.dtype)
        except LayerwiseError as error:
            raise type(error)(f"layer {scheduled.layer.name!r}: {error}") from None
        except ValueError as error:  # PyTorch's own, such as batch norm of one value a channel
            raise LayerwiseError(f"layer {scheduled.layer.name!r}: {error}") from error

    def _autocast(self) -> AbstractContextManager[object]:
        """Where kernels run: within the run's torch.autocast, which may be there already."""
        kind, dtype = self.options.device.type, self.options.autocast
        if dtype is None or (torch.is_autocast_enabled(kind) and torch.get_autocast_dtype(kind) == dtype):
            return _NOTHING
        return torch.autocast(kind, dtype)

    def _recomputed(
        self, run: Pass, scheduled: ScheduledLayer, inputs: Sequence[Tensor | None], given: Sequence[Tensor | None]
    ) -> Tensor:
        """Computed here, and once more in the backward pass, instead of keeping what that needs."""
        times = 0

        def compute() -> Tensor:
            nonlocal times
            times += 1
            held = given
            if times > 1:  # running statistics have moved already
                held = [p if p is None or p.requires_grad else p.clone() for p in given]
            return self._compute(run, scheduled, inputs, held)

        # All of it again: ranks communicate in it, and count what they send.
        with checkpoint.set_checkpoint_early_stop(False):
            out: Tensor = checkpoint.checkpoint(
                compute, use_reentrant=False, preserve_rng_state=False, determinism_check="none"
            )
        return out

    def _end_span_behind(
        self, run: Pass, inputs: list[Tensor | None], given: list[Tensor | None], begun: list[int]
    ) -> None:
        """In a trace a layer's backward pass ends when all its gradients are made."""

        def end() -> None:
            if self.trace is not None and begun:
                self.trace.end(begun.pop())

        tensors = (*inputs, *given)
        which = {i: x for i, x in enumerate(tensors) if x is not None and x.requires_grad}
        run.token, *marked = ordered(run.token, *which.values(), at_backward=end)
        for i, x in zip(which, marked, strict=True):
            if i < len(inputs):
                inputs[i] = x
            else:
                given[i - len(inputs)] = x

    def _begin_span(self, name: str, run: Pass, begun: list[int]) -> None:
        self.comm.at(run.number, f"{name} (backward)")
        if self.trace is not None:
            begun.append(self.trace.begin(f"{name} (backward)", "compute"))

    def _span(self, name: str, category: Category) -> AbstractContextManager[object]:
        if self.trace is not None:
            return self.trace.span(name, category)
        return torch.profiler.record_function(name) if profiler._is_profiler_enabled else _NOTHING

    def _like(self, dtype: torch.dtype) -> Tensor:
        """An empty tensor of that type on this rank's device."""
        if dtype not in self._likes:
            self._likes[dtype] = torch.empty(0, dtype=dtype, device=self.options.device)
        return self._likes[dtype]


def _wait_for_one(run: Pass, inputs: list[Tensor | None], given: list[Tensor | None]) -> None:
    """The token waits, in the backward pass, for what a layer computes last."""
    for tensors in (inputs, given):
        for i, x in enumerate(tensors):
            if x is not None and x.requires_grad:
                run.token, tensors[i] = ordered(run.token, x)
                return


def _all(tensors: Sequence[Tensor | None]) -> list[Tensor]:
    """A rank that computes a layer has all that it needs for it."""
    given = [x for x in tensors if x is not None]
    assert len(given) == len(tensors)
    return given
