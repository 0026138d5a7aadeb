"""Run: a parallel model's run on this rank: its plan, its state and its passes."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group, TrafficKind
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.read.arguments import Arguments
from layerwise.plan import Plan
from layerwise.run.execute.reducer import GradientReducer, Gradients
from layerwise.run.local_tensor import local_tensor
from layerwise.run.options import RuntimeOptions, planned_types, uses_local_batch_norm
from layerwise.run.schedule.schedule import Schedule, samples
from layerwise.run.shapes import Sized, Sizes
from layerwise.run.state.model_state import ModelState
from layerwise.run.state.state import Shard, State
from layerwise.run.step_check import StepCheck
from layerwise.tensorfile import dtype_name
from layerwise.trace import Spans, Trace

Function = Callable[[nn.Module], object]
PREDICTED: Mapping[TrafficKind, str] = {  # the names that a plan has for kinds of traffic
    "transfers": "transfer_bytes",
    "sync": "sync_bytes",
    "gathers": "gather_bytes",
    "statistics": "statistics_bytes",
}


class Run:
    """A model's run on this rank: its plan, its state and its passes. It refers weakly to the model, which holds it."""

    _state: State | ModelState
    arguments: Arguments  # the signature by which the model is called
    _reducer: GradientReducer
    has_cut = False  # whether some rank holds only a part of a trained parameter
    own_class: type[nn.Module]  # the model's class before it was made parallel
    own_forward: Callable[..., Any] | None = None  # the instance's own `forward`, if it had one
    plain = False  # whether the run only calls the model
    step_check: StepCheck | None = None  # compares the time of steps with the plan's prediction, while that is on
    unkept: frozenset[str] = frozenset()  # attributes that the model's forward pass sets but the run does not

    def __init__(self, model: nn.Module, graph: LayerGraph, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        self._model = weakref.ref(model)
        self.plan, self.comm, self.runtime_options, self.layer_graph = plan, comm, options, graph
        self.device, self.dtype = options.device, options.dtype
        self._spans = Spans()
        self.steps_done = 0  # training forward passes done; each step's random numbers follow from it
        self._synchronise = True
        self._parameters_on = options.device  # where the loop has moved the parameters
        self._pass: tuple[int, Gradients] | None = None  # the backward pass under way, by autograd's number

    @property
    def model(self) -> Any:
        """Returns the model."""
        model = self._model()
        assert model is not None
        return model

    @property
    def training(self) -> bool:
        """Returns True in training mode."""
        return bool(self.model.training)

    def methods(self) -> dict[str, Callable[..., Any]]:
        """Returns the methods that replace those of the model's class."""
        return {}

    @abstractmethod
    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns the model's outputs for this rank's samples."""

    @abstractmethod
    def compile(self, **settings: Any) -> None:
        """Compiles what each rank computes by itself; takes torch.compile's arguments. Call it on every rank."""

    @abstractmethod
    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False) -> Any:
        """Loads a full state dict; its values may be DTensors or lazy tensors."""

    def apply(self, apply: Callable[[Function], object], fn: Function) -> None:
        """Calls `fn` on the model's modules, in PyTorch's order, or on those of a submodule, by their own `apply`."""
        apply(fn)

    def keep(self) -> None:
        """Called once nothing can fail any more: from then on the model is parallel."""

    @abstractmethod
    def apply_to_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Calls `fn` on all tensors, as `to` and the like do."""

    @abstractmethod
    def copied(self, memo: dict[int, Any]) -> nn.Module:
        """Returns a parallel model with the same values on the same ranks; every rank must copy it."""

    @abstractmethod
    def restore(self) -> None:
        """Undoes parallelization: the model is what it was, with today's full values. Every rank must call it."""

    @property
    @abstractmethod
    def rank_schedule(self) -> Schedule:
        """Returns this rank's schedule at the plan's batch."""

    @property
    def trace(self) -> Trace | None:
        """Returns the trace that collects spans of this rank's work, or None."""
        return self._spans.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._spans.trace = trace
        self._traced()

    def _traced(self) -> None:
        """Called when the trace is set or removed."""

    def _prepare(self, kind: TrafficKind, groups: set[Group]) -> None:
        self.comm.prepare(sorted(group for group in groups if len(group) > 1), kind)

    def share(self, batch: int | None = None) -> slice:
        """Returns the slice of a global batch that this rank feeds.

        Args:
            batch: The number of samples of all ranks together. None: the plan's batch.

        Examples:
            >>> import layerwise
            >>> quiet = layerwise.ParallelOptions(verbose=False)
            >>> layerwise.parallelize(nn.Linear(4, 2), torch.randn(8, 4), options=quiet).share()
            slice(0, 8, None)
        """
        return samples(self.plan, self.plan.batch if batch is None else batch)[self.comm.rank]

    def begin_backward(self) -> None:
        """Begins a backward pass, which `_finish` ends. Further calls within the pass do nothing."""
        number = torch._C._current_graph_task_id()
        if self._pass is None or self._pass[0] != number:
            gradients = Gradients(self._reducer, self.comm, synchronise=self._synchronise, trace=self.trace)
            self._pass = number, gradients
            self._begun()
            finish = partial(self._finish, gradients, differentiable=torch.is_grad_enabled())
            torch.autograd.Variable._execution_engine.queue_callback(_End(finish, partial(self._failed, gradients)))

    def pass_gradients(self) -> Gradients:
        """Returns the gradients of the backward pass under way; begins that pass if it has not begun."""
        self.begin_backward()
        assert self._pass is not None
        return self._pass[1]

    @abstractmethod
    def _begun(self) -> None:
        """Called when a backward pass has begun."""

    def _finish(self, gradients: Gradients, *, differentiable: bool) -> None:
        """Ends a backward pass. differentiable: whether `create_graph=True` asked for a graph of the gradients."""
        self._pass = None
        with torch.no_grad():
            gradients.finish()
            if differentiable and self.comm.size > 1:
                gradients.refuse_derivatives()
            gradients.call_hooks()
        if self.step_check is not None:
            self.step_check.end(self, summed=self._synchronise)

    def _failed(self, gradients: Gradients) -> None:
        """Called when an error has ended a backward pass."""
        gradients.fail()
        self._pass = None

    @property
    def summed(self) -> bool:
        """True if every gradient that a parameter has now is a sum over the ranks."""
        return self._synchronise and not self._reducer.waiting

    def predicted_bytes(self, batches: int = 1) -> dict[TrafficKind, float | None]:
        """Returns the bytes that all ranks together send in a step, as the plan predicts.

        Args:
            batches: Batches in a step; all but the last run within no_sync().

        Returns:
            Bytes by kind of traffic; None if the plan does not predict that kind (statistics, other element types).
        """
        schedule, options = self.rank_schedule, self.runtime_options
        types = [_types(graph) for graph in (schedule.graph, planned_types(self.plan, self.layer_graph))]
        as_planned = types[0] == types[1] and dtype_name(self.dtype) == self.layer_graph.dtype
        planned = self.plan.predicted if as_planned and not options.recompute else {}
        unknown = {"statistics"} if options.local_batch_norm != uses_local_batch_norm(self.plan) else set[str]()
        if batches > 1 and any(config.states != "replicated" for config in self.plan.strategy.values()):
            unknown.add("sync")  # some gradients travel with each batch, others only with the last
        return {
            kind: None if name not in planned or kind in unknown else planned[name] * (1 if kind == "sync" else batches)
            for kind, name in PREDICTED.items()
        }

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Returns a context in which gradients are not synchronised; the next backward pass outside sums them all."""
        before, self._synchronise = self._synchronise, False
        try:
            yield
        finally:
            self._synchronise = before

    def _note_device(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Notes the device that `to()` and the like move the parameters to."""
        self._parameters_on = fn(torch.zeros((), device=self._parameters_on)).device

    def _check_device(self) -> None:
        """Raises LayerwiseError if the parameters are not on the run's device."""
        if self._parameters_on != self.device:
            raise LayerwiseError(
                f"the parameters are on {self._parameters_on}, but the parallel model runs on {self.device}: move them "
                f"back with .to({str(self.device)!r}), or move the model to that device before you parallelize it"
            )

    def read_boxes(self) -> dict[str, Box]:
        """Returns the box of each input that this rank must be fed: with io "boxes", what its layers need."""
        return self.rank_schedule.input_boxes()

    def output_boxes(self) -> tuple[Box | None, ...]:
        """Returns the box of each output of the global batch that this rank returns; of a loss, a scalar's."""
        sink, graph = self.rank_schedule.graph.layers[-1], self.rank_schedule.graph
        pairs = zip(sink.inputs, self.rank_schedule.sinks, strict=True)
        return tuple(Box((), ()) if name in graph.losses else boxes[self.comm.rank] for name, boxes in pairs)

    @abstractmethod
    def sized(self, sizes: Sizes, samples: int = 1) -> Sized:
        """Returns a runner for samples of these input shapes, in evaluation without gradients.

        The model is traced and cut once for each size, then remembered. Raises LayerwiseError if the model takes no
        such input, or the plan's degrees do not suit it.
        """

    def shards(self) -> list[Shard]:
        """Returns every parameter and buffer that this rank holds; you may write to their tensors."""
        return self._state.shards()

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the full model's state dict, on every rank, on the CPU: the original model takes it."""
        return self._state.full_state_dict()

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False) -> Tensor:
        """Clips all gradients so that the norm over the full model is at most `max_norm`; returns the norm before.

        Same as torch.nn.utils.clip_grad_norm_ on one device. Every rank must call it.

        Args:
            max_norm: The largest norm that is allowed.
            norm_type: The p of the p-norm: above 0, may be inf.
            error_if_nonfinite: Whether to raise if the norm is nan or infinite.

        Returns:
            The norm of all gradients before clipping, a scalar tensor.

        Raises:
            LayerwiseError: The norm is not finite (if asked), or `norm_type` is not above 0.

        Examples:
            >>> import layerwise
            >>> quiet = layerwise.ParallelOptions(verbose=False)
            >>> model = layerwise.parallelize(nn.Linear(4, 2), torch.randn(8, 4), options=quiet)
            >>> model(torch.ones(8, 4)).sum().backward()
            >>> round(float(model.clip_grad_norm_(1.0)), 3)  # 8 in each of 2 x 5 places
            25.298
        """
        if not float(norm_type) > 0:
            raise LayerwiseError(f"norm_type must be above 0, not {norm_type}")
        # by rank: the norm of the boxes that it holds first
        norms = torch.zeros(self.comm.size, dtype=torch.float64, device=self.device)
        parameters = self._state.parameters()
        gradients = {name: local_tensor(p.grad) for name, p in parameters.items() if p.grad is not None}
        first_here = [g for name, g in gradients.items() if self._state.sharing(name)[:1] == (self.comm.rank,)]
        if first_here:
            each = [torch.linalg.vector_norm(g, norm_type, dtype=torch.float64) for g in first_here]
            norms[self.comm.rank] = torch.linalg.vector_norm(torch.stack(each), norm_type)
        if self.comm.size > 1:
            self.comm.all_reduce(norms, tuple(range(self.comm.size)), "io", "norm of the gradients").wait()
        norm: Tensor = torch.linalg.vector_norm(norms, norm_type)
        if error_if_nonfinite and not bool(norm.isfinite()):
            raise LayerwiseError(f"the norm of the gradients is {float(norm)}, so they were not clipped")
        scale = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
        for gradient in gradients.values():
            gradient *= scale.to(gradient.dtype)
        return norm


def _types(graph: LayerGraph) -> list[str]:
    return [stage.space.out.dtype for layer in graph.layers for stage in layer.stages]


class _End:
    """The callback at the end of a backward pass: autograd calls it, or drops it if an error has ended the pass."""

    def __init__(self, finish: Callable[[], None], fail: Callable[[], None]) -> None:
        self._finish, self._fail = finish, fail
        self._called = False

    def __call__(self) -> None:
        self._called = True
        self._finish()

    def __del__(self) -> None:
        if not self._called:
            self._fail()
