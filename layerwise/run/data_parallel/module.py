"""DataRun: runs a plan that splits samples only, with the model as the user wrote it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree
from torch.utils.hooks import RemovableHandle

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.read.arguments import Arguments
from layerwise.importers.torch.read.effects import as_it_was
from layerwise.ops.base import Role
from layerwise.ops.random import combine
from layerwise.plan import Plan
from layerwise.run.base import Run
from layerwise.run.batch import Batch
from layerwise.run.compiling import compile_with, limits
from layerwise.run.data_parallel.calls import Calls, FedSamples, ModelCall
from layerwise.run.data_parallel.gradients import AveragedParameters
from layerwise.run.data_parallel.module_spans import follow
from layerwise.run.data_parallel.replaced_modules import GlobalBatchNorm, replaced_modules
from layerwise.run.data_parallel.replacements import Replacements
from layerwise.run.execute.autograd import factors
from layerwise.run.execute.reducer import GradientReducer, Gradients
from layerwise.run.guards.compare_ranks import looks
from layerwise.run.guards.hooks import check_around, check_transforms, in_backward
from layerwise.run.options import RuntimeOptions
from layerwise.run.outputs import map_tensors
from layerwise.run.parallel import become, leave
from layerwise.run.schedule.schedule import Schedule
from layerwise.run.shapes import Returned, Sized, Sizes
from layerwise.run.state.model_state import ModelState, map_kept_losses
from layerwise.tensorfile import dtype_name

COMPILED = "the compiled model"  # the span's name in a trace


class DataRun(Run):
    """The user's module, called as it is: on one device plain PyTorch, on several ranks like DistributedDataParallel.

    Gradients are averaged over the ranks during the backward pass. The outputs' gradients are scaled so that the
    average is the gradient of the mean over all samples, even if ranks feed different numbers. Gradients of inputs are
    those of this rank's own loss.
    """

    _state: ModelState

    def __init__(
        self,
        module: nn.Module,
        graph: LayerGraph,
        plan: Plan,
        comm: Comm,
        options: RuntimeOptions,
        replacements: Replacements,
        keys: Mapping[str, str],
        arguments: Arguments,
    ) -> None:
        """keys: names in the state dict -> names of tensors in the graph."""
        super().__init__(module, graph, plan, comm, options)
        self._calls, self._replacements, self._keys, self.arguments = Calls(), replacements, keys, arguments
        self._state = ModelState(keys, graph, module, comm)
        self._schedule: Schedule | None = None
        self._span_hooks: list[RemovableHandle] = []
        self._replaced = list(replaced_modules(module, replacements, self._calls, comm))
        self._norms = [replaced for replaced in self._replaced if type(replaced) is GlobalBatchNorm]
        self._samples = FedSamples(graph, arguments)
        moves = options.device.type != "cpu" or options.dtype != getattr(torch, graph.dtype)
        self._moved = self._move if moves else None
        self.plain = not (self._replaced or moves or options.autocast or comm.size > 1)
        self._called: Callable[..., Any] | None = None
        self._average()
        for replaced in self._replaced:
            replaced.place()
        become(module, self)
        if options.compile is not None:
            self._called = compile_with(self._own, options.compile)

    @property
    def _own(self) -> Callable[..., Any]:
        """Returns the user's own forward pass."""
        own: Callable[..., Any] = self.own_forward or partial(self.own_class.forward, self.model)
        return own

    def _average(self) -> None:
        """Turns on averaging of gradients."""
        self._averaged: AveragedParameters | None = None
        if self.comm.size > 1:
            self._averaged = AveragedParameters(self)
            for kind in ("sync", "io", "statistics"):
                self._prepare(kind, {tuple(range(self.comm.size))})
        self._reducer = GradientReducer({}, [], {}) if self._averaged is None else self._averaged.reducer

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns the outputs for this rank's samples. batch: all ranks' samples, if ranks feed different numbers."""
        if self._calls.forward is not None:  # the model calls itself
            return self._own(*inputs, **named)
        if self.plain and "batch" not in named:
            self.steps_done += self.training  # checkpoints are named by it
            return (self._called or self._own)(*inputs, **named)
        check_transforms()
        batch = None if self.arguments.takes("batch") else named.pop("batch", None)
        self._check_device()
        call = self._call(inputs, named, batch)
        if self._moved is not None:
            inputs, named = pytree.tree_map_only(Tensor, self._moved, (inputs, named))
        if self.comm.size > 1 and torch.is_grad_enabled():
            inputs, named = pytree.tree_map_only(Tensor, partial(self._entering, call=call), (inputs, named))
        before, self._calls.forward = self._calls.forward, call
        try:
            with self._autocast():
                outputs = (
                    self._compiled(call, inputs, named)
                    if self.runtime_options.compile is not None
                    else self._own(*inputs, **named)
                )
        finally:
            self._calls.forward = before
        if not torch.is_grad_enabled() or (self.comm.size == 1 and not self._replaced):
            return outputs
        scale = self._scale(call)
        leaving = partial(self._leaving, call=call, scale=scale)
        if scale != 1:
            map_kept_losses(self.model, leaving)
        return map_tensors(leaving, outputs)

    def sized(self, sizes: Sizes, samples: int = 1) -> Sized:
        boxes = tuple(Box.full((samples, *size)) for size in sizes)

        def run(local_inputs: Sequence[Tensor]) -> Returned:
            inputs = local_inputs if self._moved is None else list(map(self._moved, local_inputs))
            with self._autocast():
                outputs = [x for x in pytree.tree_leaves(self._own(*inputs)) if isinstance(x, Tensor)]
            return [((Box.full(x.shape),), x) for x in outputs]

        layers = [layer for layer in self.layer_graph.layers if layer.role is Role.INPUT]
        types = [self.runtime_options.element_type(layer.out.dtype, self.layer_graph) for layer in layers]
        shapes = _returned_shapes(
            self.model, self._own, self.runtime_options.device, [box.shape for box in boxes], types
        )
        return Sized(boxes, shapes, run, alone=True)

    def _compiled(self, call: ModelCall, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> Any:
        """Returns the compiled model's outputs."""
        self._calls.seed(call, self.device)
        span = nullcontext() if self.trace is None else self.trace.span(COMPILED, "compute")
        with span, limits(len(self._replaced)):
            assert self._called is not None
            return self._called(*inputs, **named)

    def _call(self, inputs: tuple[Any, ...], named: Mapping[str, Any], batch: int | None) -> ModelCall:
        """Returns this call of the model, on which the ranks agree."""
        if self.training and in_backward():
            return self._calls.recomputed()
        seed = combine(self.runtime_options.seed, self.steps_done)
        # Also in evaluation if a dropout is in training mode: it draws new numbers in every call.
        drawn = self.training or any(replaced.active for replaced in self._replaced)
        self.steps_done += drawn
        if self._averaged is None:
            if batch is not None:
                _ = Batch(self.plan, self.comm, self._samples.given(inputs, named), batch).total
            return ModelCall(seed)
        check_around(self.model.parameters())
        self._averaged.check()
        self.comm.at(self.steps_done, "the model")
        if not (drawn or torch.is_grad_enabled()):
            return ModelCall(seed)
        sizes = None
        if any(norm.active for norm in self._norms):
            sizes = tuple(tuple(x.shape[1:]) for x in (*inputs, *named.values()) if isinstance(x, Tensor))
        fed, training = self._samples.given(inputs, named), self.training
        planned = bool(self.plan.shares)  # unequal devices have unequal shares, by which they end together
        batch_of_ranks = partial(Batch, self.plan, self.comm, fed, batch, sizes, as_planned=planned, training=training)
        alike, reducer = self._averaged.comparison, self._averaged.reducer
        step = self.steps_done * training
        full = self._samples.shared(inputs, named) if alike is not None and looks(step) else ()
        return ModelCall(seed, batch_of_ranks(alike=alike, step=step, gradients=reducer, full=full))

    def _move(self, x: Tensor) -> Tensor:
        """Returns x on the run's device, in the run's element type."""
        return x.to(
            self.runtime_options.device, self.runtime_options.element_type(dtype_name(x.dtype), self.layer_graph)
        )

    def _autocast(self) -> AbstractContextManager[object]:
        if self.runtime_options.autocast is None:
            return nullcontext()
        return torch.autocast(self.runtime_options.device.type, self.runtime_options.autocast)

    def _scale(self, call: ModelCall) -> float:
        """Returns the factor of the outputs' gradients, whose mean over the ranks is then the full loss's."""
        return 1.0 if self.comm.size == 1 else factors(self.layer_graph, call.samples / call.total)[0] * self.comm.size

    def _entering(self, x: Tensor, call: ModelCall) -> Tensor:
        """Returns an input. If its gradient is differentiated again, that backward pass begins here."""
        if not x.requires_grad:
            return x
        if self._scale(call) != 1:
            raise LayerwiseError(
                "an input requires a gradient, which layerwise computes only if all ranks feed the same number of "
                "samples and the loss is a mean: detach the input, or feed such a batch"
            )
        x = x.view_as(x)

        def at_gradient(gradient: Tensor) -> None:
            if gradient.requires_grad:
                gradient.register_hook(lambda _: self.begin_backward())  # type: ignore[no-untyped-call]

        x.register_hook(at_gradient)  # type: ignore[no-untyped-call]
        return x

    def _leaving(self, x: Tensor, call: ModelCall, scale: float) -> Tensor:
        """Returns an output whose gradient begins the backward pass."""
        if not x.requires_grad:
            return x
        if x.is_leaf or scale != 1:
            x = x.view_as(x)  # a tensor with its own gradient

        def at_gradient(gradient: Tensor) -> Tensor | None:
            self._calls.begin_backward(call)
            if self.comm.size > 1:
                self.begin_backward()
            return None if scale == 1 else gradient * scale

        x.register_hook(at_gradient)  # type: ignore[no-untyped-call]
        return x

    def _begun(self) -> None:
        if self._averaged is not None:
            assert self._pass is not None
            self._averaged.check_hooks()
            self.comm.at(self.steps_done, "the model (backward)")
            self._averaged.begin(self._pass[1])

    def _finish(self, gradients: Gradients, *, differentiable: bool) -> None:
        if self._averaged is not None:
            self._averaged.finish()
        super()._finish(gradients, differentiable=differentiable)

    def _failed(self, gradients: Gradients) -> None:
        super()._failed(gradients)
        if self._averaged is not None:
            self._averaged.fail()

    @property
    def rank_schedule(self) -> Schedule:
        """Returns this rank's schedule at the plan's batch, for reports."""
        if self._schedule is None:
            self._schedule = Schedule(self.layer_graph, self.plan, self.comm, self.runtime_options)
        return self._schedule

    def _traced(self) -> None:
        for hook in self._span_hooks:
            hook.remove()
        trace = self.trace if self.runtime_options.compile is None else None  # a compiled model hides its layers
        self._span_hooks = [] if trace is None else follow(self.model, self.layer_graph, trace)

    def apply_to_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        self._note_device(fn)
        self.own_class._apply(self.model, fn)  # type: ignore[no-untyped-call]
        self._average()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Loads into the user's module. Raises LayerwiseError, not RuntimeError. assign: on one device only."""
        if assign and self.comm.size > 1:
            raise LayerwiseError("load_state_dict(assign=True) would replace the parameters: pass assign=False")
        return self._state.load(state_dict, strict=strict, assign=assign)

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        model = self.model
        leave(model)
        try:
            copied: nn.Module = copy.deepcopy(model, memo)
        finally:
            become(model, self)
        alike = self.layer_graph, self.plan, self.comm, self.runtime_options
        DataRun(copied, *alike, self._replacements, self._keys, self.arguments).steps_done = self.steps_done
        return copied

    def compile(self, **settings: Any) -> None:
        """Compiles the model with torch.compile's arguments; communication stays between the compiled parts."""
        self._called = compile_with(self._own, settings)
        self.runtime_options = replace(self.runtime_options, compile=settings)
        self._traced()  # now records the full model

    def restore(self) -> None:
        for replaced in self._replaced:
            replaced.remove()
        if self._averaged is not None:
            self._averaged.release()
        leave(self.model)


def _returned_shapes(
    module: nn.Module, own: Any, device: torch.device, shapes: Sequence[tuple[int, ...]], types: Sequence[torch.dtype]
) -> tuple[tuple[int, ...], ...]:
    """Returns the shapes of what a module returns, not computed. Raises LayerwiseError if it takes no such inputs."""
    try:  # what the model keeps of a call goes: it has no values
        with as_it_was(module), FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
            outputs = own(*(torch.empty(s, dtype=t, device=device) for s, t in zip(shapes, types, strict=True)))
    except Exception as error:  # the model's own code, which may raise anything
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise LayerwiseError(f"the model takes no input of shape {shapes[0]}: {reason}") from None
    return tuple(tuple(x.shape) for x in pytree.tree_leaves(outputs) if isinstance(x, Tensor))
