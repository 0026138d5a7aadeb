"""LayeredRun: runs a plan layer by layer."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import Call
from layerwise.ops.random import combine
from layerwise.partition.groups import sharing
from layerwise.plan import Plan
from layerwise.run import hugging_face, in_full
from layerwise.run.base import Function, Run
from layerwise.run.batch import Batch
from layerwise.run.calls import CallPlans
from layerwise.run.execute.autograd import begins, ends, factors, ordered
from layerwise.run.execute.executor import Executor
from layerwise.run.execute.kernels import Pass
from layerwise.run.execute.reducer import Gradients
from layerwise.run.execute.working_parameters import WorkingParameters
from layerwise.run.guards.compare_model import ModelComparison
from layerwise.run.guards.compare_ranks import RankComparison, looks
from layerwise.run.guards.hooks import OutsideGradients, check_around, check_call, check_hooks_of_all, take_hooks
from layerwise.run.guards.invariants import Invariants
from layerwise.run.guards.reached import Reached
from layerwise.run.guards.refusals import check_unwritten, versions
from layerwise.run.local_tensor import Version, is_dtensor
from layerwise.run.options import RuntimeOptions, check_types
from layerwise.run.outputs import returned
from layerwise.run.parallel import become, leave
from layerwise.run.schedule.schedule import Schedule, parameter_boxes, places, shardings
from layerwise.run.shapes import Returned, Shaped, Shapes, Sized, Sizes
from layerwise.run.state.state import Shard, State
from layerwise.run.state.tree import allow_calls, reads, refuse_calls, skeleton, without_memory


class LayeredRun(Run):
    """One rank's part of a planned network, run layer by layer. The model's own layers hold this rank's tensors but
    compute nothing; calls to them are refused.

    With io "free" (a batch smaller than the number of ranks) each rank passes the global batch and gets the full
    outputs, and all ranks must compute the same loss from them; a model that returns its loss gathers no other outputs.
    With io "boxes" a rank passes and gets its boxes, and the full loss.

    Parameters are DTensors under the model's names if the plan splits some. Ranks that are not processes (in tests)
    have their boxes as plain tensors, for element-wise use only.
    """

    _state: State
    _network: Network  # without its parameters' memory
    comparison: ModelComparison | None = None
    calls: CallPlans | None = None  # in evaluation, where the model is called in several ways

    def __init__(self, model: nn.Module, network: Network, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        super().__init__(model, network.graph, plan, comm, options)
        self._executors: dict[tuple[object, ...], Executor] = {}
        boxes = parameter_boxes(self.layer_graph, places(self.layer_graph, plan))
        shared_out = shardings(self.layer_graph, plan)
        owned = boxes | {name: one.boxes.each for name, (one, _) in shared_out.items()}
        self._network = without_memory(network)  # for other sizes, copies and element types
        self._state = State(network, owned, plan.device_order, comm, options, model)  # now the model holds the tensors
        self._applying = False  # whether a function sees full parameters now
        self._shapes = Shapes(self._network, plan, comm, options)
        self.arguments = self._shapes.arguments
        every = self._state.tree.parameters()
        self._invariants = Invariants(model, every, partial(self._state.values, network.graph.folded))
        self.has_cut = comm.size > 1 and self._state.cut()  # whether some rank lacks a part of a trained parameter
        first = self.rank_schedule
        # With io sample, a rank's loss is the mean over its own samples, and the mean over the ranks is the global one.
        self._mean_over = comm.size if self.plan.io == "sample" else 1
        scale = 1 / self._mean_over
        self._working = WorkingParameters(self._state, first, boxes, shared_out, scale, self.pass_gradients)
        self._reducer = self._working.reducer
        shared_by = {name: groups for name, groups in self._working.groups.items() if name not in shared_out}
        compare = options.compare_ranks and comm.size > 1
        self._ranks = RankComparison(every, shared_by, comm.members) if compare else None
        self._prepare("gathers", {sharing(boxes[name], rank) for name in shared_out for rank in range(comm.size)})
        self._prepare("sync", {group for groups in self._working.groups.values() for group in groups})
        self._prepare("io", {tuple(range(comm.size))})
        trained = {name: p for name, p in every.items() if p.requires_grad and comm.size > 1}
        self._outside = {name: OutsideGradients(self, name) for name in trained}
        for name, p in trained.items():
            take_hooks(p, self._outside[name])
        self.unkept = network.written
        self._enter()

    def _enter(self) -> None:
        reached = Reached(self.model)
        become(self.model, self)
        refuse_calls(self.model, self.unkept)
        self._invariants.begin(self.model, reached)

    def _leave(self) -> None:
        allow_calls(self.model)
        leave(self.model)

    def keep(self) -> None:
        self._state.tree.keep()

    def methods(self) -> dict[str, Callable[..., Any]]:
        return hugging_face.methods(self.own_class)

    def apply(self, apply: Callable[[Function], object], fn: Function) -> None:
        """Calls `fn` with full parameters. Random initial values are those of one device: rank 0's count.

        It needs the memory of the full model meanwhile. Raises LayerwiseError if parameters have gradients, or `fn`
        replaces some.
        """
        if self._applying or self.comm.size == 1:
            apply(fn)
            return
        self._applying = True
        try:
            in_full.apply(self._state, lambda: apply(fn))
        finally:
            self._applying = False

    def _executor(self, batch: int, shaped: Shaped, differentiated: frozenset[str] = frozenset()) -> Executor:
        """Returns the executor for a global batch of this size. differentiated: inputs that need gradients."""
        options = self.runtime_options.here()
        few = not torch.is_grad_enabled() and batch < max(config["n"] for config in shaped.plan.strategy.values())
        key = batch, id(shaped), differentiated, options.autocast, few  # the module keeps every `shaped` alive
        if key not in self._executors:
            fitted, plan = self._shapes.fitted(batch, shaped, few=few)
            graph = replace(fitted, differentiated=differentiated)
            schedule = Schedule(graph, plan, self.comm, options)
            self._prepare("statistics", schedule.statistics)
            self._prepare("transfers", schedule.groups)
            with torch.inference_mode(False):  # constants may be used in training later
                constants = shaped.constants(schedule)
            self._executors[key] = Executor(schedule, constants)
        return self._executors[key]

    @property
    def rank_schedule(self) -> Schedule:
        """Returns this rank's schedule at the plan's batch and sizes."""
        return self._executor(self.layer_graph.batch, self._shapes.first).schedule

    def sized(self, sizes: Sizes, samples: int = 1) -> Sized:
        if self.plan.io != "boxes":
            raise LayerwiseError(f"the plan has io {self.plan.io!r}: use ParallelOptions(io='boxes')")
        self._invariants.check_folded()
        shaped = self._shapes.at(sizes, training=False)
        schedule, evaluate = self.evaluation(samples, shaped)

        def run(local_inputs: Sequence[Tensor]) -> Returned:
            return list(zip(map(tuple, schedule.sinks), evaluate(local_inputs), strict=True))

        shapes = tuple(spec.shape for spec in schedule.graph.layers[-1].specs)
        return Sized(tuple(schedule.input_boxes().values()), shapes, run, alone=False)

    def evaluation(self, samples: int, shaped: Shaped) -> tuple[Schedule, Callable[[Sequence[Tensor]], Any]]:
        """Returns the schedule of an evaluation, and what makes this rank's boxes of the outputs of those of inputs."""
        executor = self._executor(samples, shaped)
        schedule, inputs = executor.schedule, shaped.inputs
        scales = [1.0] * len(schedule.sinks)
        return schedule, lambda boxes: self._run(executor, inputs.fed(schedule, boxes), (), scales)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """Returns outputs of this rank's samples (io sample; else see the class), in the model's own structure.

        batch: all ranks' samples, to be checked.
        """
        check_call()
        check_around(self.model.parameters())
        self._check_device()
        check_hooks_of_all()
        self._working.check_hooks()
        self._invariants.check(self.model)
        if self.calls is not None:
            return self.calls(inputs, named)
        batch = None if self.arguments.takes("batch") else named.pop("batch", None)
        named = hugging_face.as_configured(self.model, named, self.arguments.leaves)
        shapes = self._shapes if self.training else self._shapes.of_call(inputs, named)
        call, inputs = (inputs, named), shapes.tensors_of(inputs, named)
        total, shaped = self._agreed(shapes, inputs, batch)
        planned = self.training and torch.is_grad_enabled() and shaped is self._shapes.first
        if planned and self.comparison is not None and self.comparison.due():
            self._compare(self.comparison, call)
        share = self.share(total)
        part = 1.0 if self.plan.io != "sample" else (share.stop - share.start) / total
        scales = [factor * self._mean_over for factor in factors(shaped.graph, part)]
        differentiated = shaped.inputs.differentiated(inputs, scales)
        executor = self._executor(total, shaped, differentiated)
        fed = shaped.inputs.fed(executor.schedule, inputs)
        outputs = self._run(executor, fed, sorted(differentiated), scales)
        local = share.stop - share.start if self.plan.io == "sample" else None  # else it gets its boxes of an output
        return returned(executor.schedule, outputs, shaped.structure, local)

    def _compare(self, comparison: ModelComparison, call: Call) -> None:
        """Raises LayerwiseError, on every rank, if the model as written computes something else on one of them."""
        values = self._state.full_tensors()

        def full() -> dict[str, Callable[[], Any]]:
            in_full.fill(self._state, self.device, values)
            self._leave()
            return {**self._network.stored, **{n: reads(x) for n, x in self._state.tree.tensors().items()}}

        with in_full.undone(self._state, self.model):
            agree(self.comm, lambda: (comparison.check(self.model, self.arguments, call, full), None))

    def _agreed(self, shapes: Shapes, inputs: tuple[Any, ...], batch: int | None) -> tuple[int, Shaped]:
        """Returns how many samples all ranks feed together, as they tell each other, and the network at their sizes."""
        samples, sizes = shapes.inputs.fed_samples(inputs), shapes.sizes
        if self.plan.io != "boxes":
            sizes = shapes.sizes_of(inputs)
        step = (self.steps_done + 1) * self.training
        alike_in = (*sizes, shapes.called) if shapes.called else sizes
        agreement = partial(Batch, self.plan, self.comm, samples, batch, alike_in, training=self.training, step=step)
        compared = self._ranks is not None and (looks(step) or not self.training)
        full = shapes.inputs.full(inputs) if compared else ()
        fed = agreement(alike=self._ranks, gradients=self._reducer, full=full)
        return fed.total, shapes.at(sizes, training=self.training)

    def _run(
        self, executor: Executor, fed: dict[str, Tensor], differentiated: Sequence[str], scales: Sequence[float]
    ) -> Any:
        """Returns the outputs from this rank's boxes of the inputs. scales: the factors of the outputs' gradients."""
        seed = combine(self.runtime_options.seed, self.steps_done)
        if self.training:
            self.steps_done += 1
            self._state.count()
        first = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        parameters, gathers = self._working.begin(executor.constants)
        token, options = self._begins(first), executor.schedule.options
        run = Pass(parameters, self.training, seed, self.steps_done, token, self.comm, options, self._spans, gathers)
        if differentiated:  # an input's gradient depends on everything that communicates
            run.token, *tensors = ordered(run.token, *(fed[name] for name in differentiated))
            fed |= dict(zip(differentiated, tensors, strict=True))
        versions_then = versions(self._reducer.parameters) if self.comm.size > 1 and first.requires_grad else {}
        at_backward = partial(self._backward_begins, executor.schedule.graph, versions_then)
        try:
            outputs = executor.forward(run, fed)
            parameters.finish()
            if not (first.requires_grad or options.compile):  # what is fed, and constants, are others'
                fed_storages = {x.untyped_storage().data_ptr() for x in fed.values()}
                empty = first.new_zeros(0, dtype=self.dtype)
                made = [empty if x is None else x for x in outputs]
                return [x.clone() if x.untyped_storage().data_ptr() in fed_storages else x for x in made]
            return ends(run.token, outputs, scales, self.dtype, at_backward)
        finally:
            run.token = first  # functions in the graph refer to the pass, so it must not hold the graph

    def _begins(self, token: Tensor) -> Tensor:
        """Returns the token, which every backward pass for parameters' gradients reaches."""
        if not (self._outside and token.requires_grad):
            return token
        named = [(name, p) for name, p in self._reducer.parameters.items() if p.requires_grad]

        def see() -> None:
            for name, p in named:
                self._outside[name].see(p)

        return begins(token, [p for _, p in named], see)

    def _backward_begins(
        self, graph: LayerGraph, versions_then: Mapping[str, Version], has_gradient: Sequence[bool]
    ) -> None:
        """Begins a backward pass at the outputs of a call. versions_then: its parameters', in the forward pass."""
        check_unwritten(self._reducer.parameters, versions_then)
        self.begin_backward()
        self._working.unused.reach(graph, has_gradient)

    def _begun(self) -> None:
        self._working.begin_backward()

    def _finish(self, gradients: Gradients, *, differentiable: bool) -> None:
        self._working.finish(gradients)
        super()._finish(gradients, differentiable=differentiable)

    def apply_to_tensors(self, fn: Callable[[Tensor], Tensor]) -> None:
        self._note_device(fn)
        self._invariants.check_folded()
        dtype = fn(torch.zeros((), dtype=self.dtype, device=self.device)).dtype
        other = dtype != self.dtype
        if other:
            check_types(self.layer_graph, dtype)
            self._check_movable("convert it")
        self._state.apply(fn)
        self._working.renew()
        self._invariants.renew(self.model)
        if not other:
            return
        self.dtype, self.runtime_options = dtype, replace(self.runtime_options, dtype=dtype)
        self._state.options = self.runtime_options
        self._shapes = Shapes(self._network, self.plan, self.comm, self.runtime_options)
        self._executors.clear()
        self.comparison = None  # the imported layers have the old type

    def _check_movable(self, act: str) -> None:
        if self.calls is not None:
            raise LayerwiseError(f"the model is planned for several unlike calls: {act} before you parallelize it")

    def compile(self, **settings: Any) -> None:
        """Compiles what each rank computes by itself; takes torch.compile's arguments. Call it on every rank."""
        self.runtime_options = replace(self.runtime_options, compile=settings)
        for executor in self._executors.values():
            executor.compile(settings)

    def shards(self) -> list[Shard]:
        self._invariants.check_places()
        return super().shards()

    def full_state_dict(self) -> dict[str, Tensor]:
        self._invariants.check_places()
        return super().full_state_dict()

    def copied(self, memo: dict[int, Any]) -> nn.Module:
        model = self.model
        self._check_movable("copy it")
        self._invariants.check_attributes(model)
        self._invariants.check_folded()
        self._leave()
        try:
            copied = skeleton(model, memo)
        finally:
            self._enter()
        if copied is None:
            raise LayerwiseError("the model cannot be copied: copy it before you parallelize it")
        memo[id(model)] = copied
        run = LayeredRun(copied, self._network, self.plan, self.comm, self.runtime_options)
        run.keep()
        copied.load_state_dict(model.state_dict())
        run._invariants.renew(copied)
        for original, copy_of_it in zip(model.parameters(), copied.parameters(), strict=True):
            copy_of_it.requires_grad_(original.requires_grad)
        run.steps_done, run.comparison = self.steps_done, copy.copy(self.comparison)
        return copied

    def restore(self) -> None:
        shards = in_full.fill(self._state, self.device)
        for p in filter(is_dtensor, shards.values()):
            p.retire()  # type: ignore[attr-defined]
        self._state.tree.let_go()
        self._leave()

    def load_state_dict(self, state_dict: Mapping[str, Any], *, strict: bool = True, assign: bool = False) -> Any:
        missing, odd = self._state.load(state_dict, strict=strict)
        return torch.nn.modules.module._IncompatibleKeys(missing, odd)
