"""Executor: a plan's layers forward in order, backward in reverse order, with the redistributions between.

Every rank goes through all layers, also those that it has no part of: one order of communication, on all ranks. The
backward pass is not left to autograd, which knows only what a rank has itself: each layer's kernels are differentiated
by themselves, from the boxes that it was given to the box that it made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from layerwise.chrome import Category
from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.run.execute.reducer import Gradients
from layerwise.run.schedule.layers import Edge, Schedule, ScheduledLayer
from layerwise.run.trace import Trace


@dataclass(slots=True)
class Saved:
    """What the backward pass needs of one layer."""

    leaves: list[Tensor]
    out: Tensor | None  # None where it is computed once more


@dataclass(slots=True)
class Pass:
    """A forward pass, and the backward pass that may follow."""

    parameters: Mapping[str, Any]  # this rank's boxes by name, buffers among them
    training: bool
    seed: int  # of this step's random numbers
    number: int  # the step's, for error messages
    differentiate: bool
    saved: dict[str, Saved] = field(default_factory=dict)
    like: dict[str, Tensor] = field(default_factory=dict)  # an empty tensor of each output's type


class Executor:
    """Runs one rank's schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.comm, self.options = schedule, schedule.comm, schedule.options
        self.trace: Trace | None = None

    def forward(self, run: Pass, fed: Mapping[str, Tensor]) -> list[Tensor | None]:
        """This rank's boxes of the outputs, from those of the inputs (constants are in `fed`)."""
        values: dict[str, Tensor | None] = {}
        outputs: list[Tensor | None] = []
        for i, scheduled in enumerate(self.schedule.layers):
            name, role = scheduled.layer.name, scheduled.layer.role
            self.comm.at(run.number, name)
            if not (run.training or scheduled.returned):  # nothing is remembered in evaluation
                self._drop(values, scheduled, i)
                continue
            received = []
            for edge in scheduled.edges:
                with self._span(edge.what, "transfers", edge.travels):
                    received.append(edge.redistribution.forward(values[edge.source], run.like[edge.source]))
            if role is Role.SINK:
                outputs = received
            elif role is Role.TIED:
                values[name] = run.parameters[name].detach() if name in run.parameters else None
            elif role is not Role.COMPUTE:
                values[name] = fed.get(name)
            else:
                values[name] = None if scheduled.work is None else self._layer(run, scheduled, received)
            if role is not Role.SINK:
                value = values[name]
                dtype = scheduled.dtype if value is None else value.dtype
                run.like[name] = torch.empty(0, dtype=dtype or torch.int64, device=self.options.device)
            self._drop(values, scheduled, i)
        return outputs

    def _layer(self, run: Pass, scheduled: ScheduledLayer, received: Sequence[Tensor | None]) -> Tensor:
        """The rank's box of a layer's output; what its backward pass needs is saved."""
        name, differentiate = scheduled.layer.name, run.differentiate and scheduled.backward
        leaves = _leaves(scheduled, received, differentiate)
        with self._span(name, "compute"):
            out = self._compute(run, scheduled, leaves, differentiate=differentiate and not self.options.recompute)
        if differentiate:
            run.saved[name] = Saved(leaves, None if self.options.recompute else out)
        return out.detach()

    def _drop(self, values: dict[str, Tensor | None], scheduled: ScheduledLayer, number: int) -> None:
        """Frees what no later layer uses."""
        for name in (scheduled.layer.name, *(edge.source for edge in scheduled.edges)):
            if self.schedule.last_use.get(name, number) == number:
                values.pop(name, None)

    def backward(self, run: Pass, gradients: Sequence[Tensor | None], into: Gradients) -> None:
        """The gradients of this rank's parameters, handed to `into` as they are made, from those of the outputs."""
        grads: dict[str, Tensor] = {}
        for scheduled in reversed(self.schedule.layers):
            name, role = scheduled.layer.name, scheduled.layer.role
            self.comm.at(run.number, f"{name} (backward)")
            if role is Role.SINK:
                inward: list[Tensor | None] = list(gradients)
            elif role is Role.TIED:
                if name in run.parameters:
                    total = grads.pop(name, None)
                    into.add(name, torch.zeros_like(run.parameters[name]) if total is None else total)
                continue
            elif not scheduled.backward:
                continue
            elif scheduled.work is None:
                inward = [None] * len(scheduled.edges)
            else:
                with self._span(f"{name} (backward)", "compute"):
                    inward = self._layer_backward(run, scheduled, grads.pop(name, None), into)
            for edge, gradient in zip(scheduled.edges, inward, strict=True):
                if edge.backward:
                    back = self._edge_backward(edge, gradient, run.like[edge.source], at_sink=role is Role.SINK)
                    if back is not None:
                        grads[edge.source] = grads[edge.source] + back if edge.source in grads else back

    def _edge_backward(self, edge: Edge, gradient: Tensor | None, like: Tensor, *, at_sink: bool) -> Tensor | None:
        """With io free every rank has the whole output and computes the same loss of it: nothing is added up."""
        if not (at_sink and self.schedule.free):
            with self._span(f"{edge.what} (backward)", "transfers", edge.travels):
                return edge.redistribution.adjoint(gradient, like)
        if self.schedule.whole_classes:
            return edge.redistribution.adjoint(gradient, like)
        own = edge.redistribution.transfer.own
        return None if own is None or gradient is None else gradient[own.slices()]

    def _compute(
        self,
        run: Pass,
        scheduled: ScheduledLayer,
        leaves: Sequence[Tensor],
        *,
        differentiate: bool,
        again: bool = False,
    ) -> Tensor:
        """again: for the second time, in the backward pass."""
        assert scheduled.work is not None
        count = len(scheduled.layer.specs)
        tied = iter(leaves[count:])
        given = [next(tied) if name is None else run.parameters[name] for name in scheduled.parameters]
        if again:  # running statistics have moved already
            given = [p if p.requires_grad else p.clone() for p in given]
        mixed: AbstractContextManager[object] = nullcontext()
        if self.options.autocast is not None:
            mixed = torch.autocast(self.options.device.type, self.options.autocast)
        try:
            with torch.set_grad_enabled(differentiate), mixed:
                out = scheduled.work.run(self.comm, leaves[:count], given, training=run.training, seed=run.seed)
                return out if scheduled.dtype is None else out.to(scheduled.dtype)
        except LayerwiseError as error:
            raise type(error)(f"layer {scheduled.layer.name!r}: {error}") from None
        except ValueError as error:  # PyTorch's own, such as batch norm of one value a channel
            raise LayerwiseError(f"layer {scheduled.layer.name!r}: {error}") from error

    def _layer_backward(
        self, run: Pass, scheduled: ScheduledLayer, gradient: Tensor | None, into: Gradients
    ) -> list[Tensor | None]:
        """The gradients of a layer's inputs; those of its parameters go to `into`."""
        saved = run.saved.pop(scheduled.layer.name)
        leaves, out = saved.leaves, saved.out
        if out is None:
            leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
            out = self._compute(run, scheduled, leaves, differentiate=True, again=True)
        parameters = run.parameters
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        names = [name for name in scheduled.parameters if name is not None and parameters[name].requires_grad]
        targets = [*(leaves[i] for i in wanted), *(parameters[name] for name in names)]
        if not targets:  # all that it has was frozen after loading
            return [None] * len(leaves)
        if gradient is None:
            gradient = torch.zeros_like(out)
        made = torch.autograd.grad(out, targets, gradient, allow_unused=True)
        result: list[Tensor | None] = [None] * len(leaves)
        for i, g in zip(wanted, made, strict=False):
            result[i] = torch.zeros_like(leaves[i]) if g is None else g
        for name, g in zip(names, made[len(wanted) :], strict=True):
            into.add(name, torch.zeros_like(parameters[name]) if g is None else g)
        return result

    def _span(self, name: str, category: Category, wanted: bool = True) -> AbstractContextManager[object]:
        return self.trace.span(name, category) if self.trace is not None and wanted else nullcontext()


def _leaves(scheduled: ScheduledLayer, received: Sequence[Tensor | None], differentiate: bool) -> list[Tensor]:
    leaves = []
    for edge, value in zip(scheduled.edges, received, strict=True):
        assert value is not None, f"{edge.what}: nothing arrived"
        leaf = value.detach()
        leaves.append(leaf.requires_grad_() if differentiate and edge.backward else leaf)
    return leaves
