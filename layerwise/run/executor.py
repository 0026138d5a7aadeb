"""Executor: a plan's layers forward in order, backward in reverse order, with the transfers between.

Every rank goes through all layers, also those that it has no part of: one order of communication, on all ranks. The
backward pass is not left to autograd, which knows only what a rank has itself: each layer's kernels are differentiated
by themselves, from the boxes that it was given to the box that it made.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layerwise.chrome import Category
from layerwise.comm.base import Comm, Kind
from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.run.redistribute import adjoint, forward
from layerwise.run.reducer import Gradients
from layerwise.run.schedule import Edge, Schedule, Step
from layerwise.run.trace import Trace


@dataclass(slots=True)
class Saved:
    """What the backward pass needs of one layer. `out` is None where it is computed once more."""

    leaves: list[Tensor]
    out: Tensor | None
    seed: int


@dataclass(slots=True)
class Pass:
    """A forward pass that may still be differentiated."""

    saved: dict[str, Saved] = field(default_factory=dict)
    shapes: dict[str, Tensor] = field(default_factory=dict)  # an empty tensor of each output's type


class Executor:
    """Runs one rank's schedule. recompute: layers are computed once more in the backward pass, to hold less."""

    def __init__(self, schedule: Schedule, comm: Comm, device: torch.device, *, recompute: bool) -> None:
        self.schedule, self.comm, self.device, self.recompute = schedule, comm, device, recompute
        self.trace: Trace | None = None

    def forward(
        self,
        fed: Mapping[str, Tensor],
        parameters: Mapping[str, Tensor],
        *,
        training: bool,
        seed: int,
        differentiate: bool,
        number: int = 0,
    ) -> tuple[list[Tensor | None], Pass]:
        """This rank's boxes of the outputs, from those of the inputs (constants are in `fed`). `number`: the step's."""
        values: dict[str, Tensor | None] = {}
        done = Pass()
        outputs: list[Tensor | None] = []
        for i, step in enumerate(self.schedule.steps):
            name = step.layer.name
            self.comm.at(number, name)
            sink = step.layer.role is Role.SINK
            if not (training or step.returned):  # nothing is remembered in evaluation
                self._let_go(values, step, i)
                continue
            received = []
            for edge in step.edges:
                like = done.shapes[edge.source]
                kind: Kind = "io" if sink and self.schedule.free else "transfers"
                with self._span(edge.what, "transfers", edge.transfer.pattern != "local"):
                    received.append(forward(edge.transfer, self.comm, values[edge.source], like, edge.what, kind))
            if sink:
                outputs = received
            elif step.layer.role is Role.TIED:
                values[name] = parameters[name].detach() if name in parameters else None
            elif step.layer.end:
                values[name] = fed.get(name)
            else:
                values[name] = None
                if step.work is not None:
                    leaves = _leaves(step, received, differentiate and step.backward)
                    with self._span(name, "compute"):
                        out = self._compute(
                            step, leaves, parameters, training, seed, differentiate and not self.recompute
                        )
                    if differentiate and step.backward:
                        done.saved[name] = Saved(leaves, None if self.recompute else out, seed)
                    values[name] = out.detach()
            value = values.get(name)
            if not sink:
                dtype = step.dtype if value is None else value.dtype
                done.shapes[name] = torch.empty(0, dtype=dtype or torch.int64, device=self.device)
            self._let_go(values, step, i)
        return outputs, done

    def _let_go(self, values: dict[str, Tensor | None], step: Step, place: int) -> None:
        """Of what nobody uses after this step."""
        for name in (step.layer.name, *(edge.source for edge in step.edges)):
            if self.schedule.last_use.get(name, place) == place:
                values.pop(name, None)

    def backward(
        self,
        done: Pass,
        gradients: Sequence[Tensor | None],
        parameters: Mapping[str, nn.Parameter],
        into: Gradients,
        *,
        training: bool,
        number: int = 0,
    ) -> None:
        """The gradients of this rank's parameters, handed to `into` as they are made, from those of the outputs."""
        grads: dict[str, Tensor] = {}
        for step in reversed(self.schedule.steps):
            name = step.layer.name
            self.comm.at(number, f"{name} (backward)")
            if step.layer.role is Role.SINK:
                inward: list[Tensor | None] = list(gradients)
            elif step.layer.role is Role.TIED:
                if name in parameters:
                    total = grads.pop(name, None)
                    into.add(name, torch.zeros_like(parameters[name]) if total is None else total)
                continue
            elif not step.backward:
                continue
            elif step.work is None:
                inward = [None] * len(step.edges)
            else:
                saved = done.saved.pop(name)
                out = saved.out
                with self._span(f"{name} (backward)", "compute"):
                    if out is None:
                        saved.leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in saved.leaves]
                        out = self._compute(step, saved.leaves, parameters, training, saved.seed, True, again=True)
                    inward = self._differentiate(step, saved.leaves, out, grads.pop(name, None), parameters, into)
            for edge, gradient in zip(step.edges, inward, strict=True):
                if not edge.backward:
                    continue
                like = done.shapes[edge.source]
                if step.layer.role is Role.SINK and self.schedule.free:
                    back = self._own_share(edge, gradient, like)
                else:
                    with self._span(f"{edge.what} (backward)", "transfers", edge.transfer.pattern != "local"):
                        back = adjoint(edge.transfer, self.comm, gradient, like, f"{edge.what}, backward")
                if back is not None:
                    grads[edge.source] = grads[edge.source] + back if edge.source in grads else back

    def _own_share(self, edge: Edge, gradient: Tensor | None, like: Tensor) -> Tensor | None:
        """With io free every rank has the whole output and computes the same loss of it: nothing is added up."""
        if self.schedule.whole_classes:
            return adjoint(edge.transfer, self.comm, gradient, like, f"{edge.what}, backward", "io")
        if edge.transfer.own is None or gradient is None:
            return None
        return gradient[edge.transfer.own.slices()]

    def _compute(
        self,
        step: Step,
        leaves: Sequence[Tensor],
        parameters: Mapping[str, Tensor],
        training: bool,
        seed: int,
        differentiate: bool,
        *,
        again: bool = False,
    ) -> Tensor:
        assert step.work is not None
        count = len(step.layer.specs)
        tied = iter(leaves[count:])
        given = [next(tied) if name is None else parameters[name] for name in step.parameters]
        if again:  # running statistics have moved already
            given = [p if p.requires_grad else p.clone() for p in given]
        mixed: AbstractContextManager[object] = nullcontext()
        if self.schedule.autocast is not None:
            mixed = torch.autocast(self.device.type, self.schedule.autocast)
        try:
            with torch.set_grad_enabled(differentiate and step.backward), mixed:
                out = step.work.run(self.comm, leaves[:count], given, training=training, seed=seed)
                return out if step.dtype is None else out.to(step.dtype)
        except LayerwiseError as error:
            raise type(error)(f"layer {step.layer.name!r}: {error}") from None
        except ValueError as error:  # PyTorch's own, such as batch norm of one value a channel
            raise LayerwiseError(f"layer {step.layer.name!r}: {error}") from error

    def _differentiate(
        self,
        step: Step,
        leaves: Sequence[Tensor],
        out: Tensor,
        gradient: Tensor | None,
        parameters: Mapping[str, nn.Parameter],
        into: Gradients,
    ) -> list[Tensor | None]:
        wanted = [i for i, leaf in enumerate(leaves) if leaf.requires_grad]
        names = [name for name in step.parameters if name is not None and parameters[name].requires_grad]
        targets = [*(leaves[i] for i in wanted), *(parameters[name] for name in names)]
        if not targets:  # all that it has was frozen after loading
            return [None] * len(leaves)
        if gradient is None:
            gradient = torch.zeros_like(out)
        found = torch.autograd.grad(out, targets, gradient, allow_unused=True)
        result: list[Tensor | None] = [None] * len(leaves)
        for i, g in zip(wanted, found, strict=False):
            result[i] = torch.zeros_like(leaves[i]) if g is None else g
        for name, g in zip(names, found[len(wanted) :], strict=True):
            into.add(name, torch.zeros_like(parameters[name]) if g is None else g)
        return result

    def _span(self, name: str, category: Category, wanted: bool = True) -> AbstractContextManager[object]:
        return self.trace.span(name, category) if self.trace is not None and wanted else nullcontext()


def _leaves(step: Step, received: Sequence[Tensor | None], differentiate: bool) -> list[Tensor]:
    leaves = []
    for edge, value in zip(step.edges, received, strict=True):
        assert value is not None, f"{edge.what}: nothing arrived"
        leaf = value.detach()
        leaves.append(leaf.requires_grad_() if differentiate and edge.backward else leaf)
    return leaves
