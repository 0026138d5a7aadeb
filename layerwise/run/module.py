"""LayeredModule: a plan that is run layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import Network
from layerwise.ops.base import Role
from layerwise.ops.random import combine
from layerwise.partition.groups import sharing
from layerwise.plan import Plan
from layerwise.run.batches import Batch
from layerwise.run.execute.autograd import ends, factors, ordered
from layerwise.run.execute.executor import Executor
from layerwise.run.execute.gathers import Gathers
from layerwise.run.execute.passes import Pass
from layerwise.run.execute.reducer import GradientReducer, Gradients
from layerwise.run.execute.rows import parts
from layerwise.run.execute.spans import NOTHING
from layerwise.run.execute.unused import Unused
from layerwise.run.guards.boxes import unguarded
from layerwise.run.guards.changes import (
    Places,
    Sums,
    Version,
    check_frozen,
    check_unwritten,
    check_values,
    summed,
    versions,
)
from layerwise.run.guards.hooks import FromOutside, check_call, check_hooks_of_all, check_parameters
from layerwise.run.guards.optimizers import Form, watch
from layerwise.run.guards.wanted import refuse_alone
from layerwise.run.lean import lean
from layerwise.run.leaves import Leaves
from layerwise.run.means import OfParts, of_parts
from layerwise.run.options import RuntimeOptions, check_types
from layerwise.run.original import Original
from layerwise.run.outputs import check_classes, global_loss, returned
from layerwise.run.parallel import LossFunction
from layerwise.run.schedule.layers import Schedule
from layerwise.run.schedule.place import parameter_boxes, places, shardings
from layerwise.run.shapes import Shaped, Shapes
from layerwise.run.state.shard import Shard
from layerwise.run.state.state import State
from layerwise.run.trace import Trace
from layerwise.run.with_tree import WithTree


class LayeredModule(WithTree):
    """One rank's part of a planned network, of which it goes through all layers.

    With io "free" (a batch smaller than the number of ranks) each rank gives the whole batch. Then with a `loss`, a
    mean over samples and positions, `module(*inputs, target)` is the global mean on every rank, and no output is
    gathered; without one every rank gets the whole outputs, and all must compute the same loss of them. With io "boxes"
    and a `loss` the target is this rank's, too: what belongs to its box of the output.

    Parameters are DTensors under the model's names where the plan splits some. Where no DTensor says which boxes a rank
    has, they are this rank's boxes, whose gradients are for element-wise use only: their norm is that of
    `clip_grad_norm_`.
    """

    def __init__(
        self, network: Network, plan: Plan, comm: Comm, options: RuntimeOptions, loss: LossFunction | None = None
    ) -> None:
        super().__init__(network.graph, plan, comm, options)
        self.loss = loss
        self._tried: OfParts | None = None
        self._original = None if network.module is None else Original(network.module)
        self._whole_classes = loss is not None
        self._executors: dict[tuple[int, int, frozenset[str], torch.dtype | None], Executor] = {}
        self._trace: Trace | None = None
        self._leaves: Leaves | None = None
        boxes = parameter_boxes(self.graph, places(self.graph, plan))
        shared_out = shardings(self.graph, plan)
        owners = {name: layer.name for layer in self.graph.layers for name, _ in layer.own_parameters()}
        held = boxes | {name: one.boxes.each for name, (one, _) in shared_out.items()}
        self._parts = {
            name: parts(boxes[name], one, comm.rank, gathered=owners[name] if states == "gathered" else "")
            for name, (one, states) in shared_out.items()
        }
        self._hold(State(network, held, plan.device_order, comm, options))
        self._shapes = Shapes(network, plan, comm, options)
        self._network = lean(network, self._state.types, self._state.extra)  # for copies, and other element types
        self._tied = {layer.name for layer in self.graph.layers if layer.role is Role.TIED}
        every = self._state.tree.parameters()
        self._frozen = [(name, p) for name, p in every.items() if not p.requires_grad]
        self._places = Places(self._tree)
        self._unused = Unused(self.graph, comm)
        self.cut = comm.size > 1 and self._state.cut()  # some rank holds not all of some parameter that is trained
        first = self.schedule
        if loss is not None and self.io == "boxes":
            check_classes(first)
        self._copies = {name for one in first.layers for name in one.copies}
        order = [name for one in reversed(first.layers) for name in reversed(one.parameters) if name is not None]
        order += [layer.name for layer in reversed(self.graph.layers) if layer.name in self._tied]
        groups = {name: sharing(boxes[name], comm.rank) for name, p in every.items() if p.requires_grad}
        # With io sample a rank's loss is the mean over its own samples: the mean over the ranks is the global one.
        self._mean_over = comm.size if self.io == "sample" else 1
        self._reducer = GradientReducer(
            every,
            [name for name in order if name in groups],
            groups,
            scale=1 / self._mean_over,
            cut=self.cut,
            parts=self._parts,
        )
        cut_groups = {sharing(boxes[name], rank) for name in self._parts for rank in range(comm.size)}
        self._prepare("gathers", cut_groups)
        self._prepare("sync", {sharing(boxes[name], rank) for name in order for rank in range(comm.size)})
        self._prepare("io", {tuple(range(comm.size))})
        if not any(p.requires_grad for p in every.values()):  # an optimizer refuses an empty list
            self._idle = nn.Parameter(torch.zeros(0, dtype=options.dtype, device=options.device))
        # Until the first step: values that nn.init gives a part of a parameter are not those that it gives the whole.
        self._initial = versions(every) if self.cut else {}
        if comm.size > 1:
            watch(self.parameters(), self.form)
            for name, p in every.items():
                if p.requires_grad:
                    p.register_post_accumulate_grad_hook(FromOutside(self, name))  # type: ignore[no-untyped-call]
                    refuse_alone(p, name)

    def _executor(self, batch: int, shaped: Shaped, differentiated: frozenset[str] = frozenset()) -> Executor:
        """The one for a global batch of that many samples. differentiated: inputs whose gradient is wanted."""
        options = self.options.here()
        key = batch, id(shaped), differentiated, options.autocast  # the module keeps every `shaped`
        if key not in self._executors:
            graph = replace(self._shapes.fitted(batch, shaped), differentiated=differentiated)
            schedule = Schedule(graph, shaped.plan, self.comm, options, whole_classes=self._whole_classes)
            self._prepare("statistics", schedule.statistics)
            self._prepare("transfers", schedule.groups)
            self._executors[key] = Executor(schedule)
            self._executors[key].trace = self._trace
        return self._executors[key]

    @property
    def schedule(self) -> Schedule:
        """What this rank does of the plan, at the plan's batch and sizes."""
        return self._executor(self.graph.batch, self._shapes.first).schedule

    @property
    def trace(self) -> Trace | None:
        """Collects spans of what this rank does, where set."""
        return self._trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self._trace = trace
        for executor in self._executors.values():
            executor.trace = trace

    def forward(self, *inputs: Tensor, batch: int | None = None) -> Any:
        """Outputs of this rank's samples (io sample), or see the class. `batch`: those of all ranks, to be checked.

        They are returned as the model does: one, a tuple, a dict, a dataclass; those of a file: one, or a tuple.
        """
        check_call()
        check_hooks_of_all()
        self._check_hooks()
        self._check_parameters()
        target = None
        if self.loss is not None:
            *before, target = inputs
            inputs = tuple(before)
        inputs = self._shapes.tensors_of(inputs)
        samples, sizes = self._shapes.inputs.fed_samples(inputs, target=target is not None), self._shapes.sizes
        if self.io != "boxes":
            sizes = self._shapes.sizes_of(inputs)
        whole = Batch(self.plan, self.comm, samples, batch, sizes, training=self.training).whole
        shaped = self._shapes.at(sizes, training=self.training)
        given = shaped.inputs
        share = self.share(whole)
        part = 1.0 if self.io != "sample" else (share.stop - share.start) / whole
        scales = [factor * self._mean_over for factor in factors(shaped.graph, part)]
        differentiated = given.differentiated(inputs, scales)
        executor = self._executor(whole, shaped, differentiated)
        fed = given.fed(executor.schedule, inputs)
        seed = combine(self.options.seed, self.steps)
        if self.training or torch.is_grad_enabled():  # a step may follow
            self._initial = {}
        if self.training:
            self.steps += 1
            self._state.count()
        token = torch.zeros((), device=self.device, requires_grad=torch.is_grad_enabled())
        held = self._held()
        known = self._gathers.begin(held)
        run = Pass(known, self.training, seed, self.steps, token, self._gathers.of_layers)
        if differentiated:  # whoever asks for an input's gradient goes through all that communicates
            names = sorted(differentiated)
            run.token, *tensors = ordered(token, *(fed[name] for name in names))
            fed |= dict(zip(names, tensors, strict=True))
        held_then = versions(self._reducer.parameters) if self.comm.size > 1 and token.requires_grad else {}
        sums = self._sums(executor.schedule) if token.requires_grad and summed(self.steps) else None
        came = partial(self._came, shaped.graph, held_then, sums)
        try:
            outputs = executor.forward(run, fed)
            known.finish()
            made = ends(run.token, outputs, scales, self.dtype, came)
        finally:
            run.token = token  # functions of the graph remember the pass, so it must not hold the graph
        if self.loss is not None and target is not None:
            return global_loss(self._of_parts(self.loss, target), executor.schedule, made, target)
        return returned(executor.schedule, made, shaped.structure)

    def _of_parts(self, loss: LossFunction, target: Tensor) -> OfParts:
        """The loss, tried when it is called first."""
        if self._tried is None or self._tried.loss is not loss:
            self._tried = of_parts(loss, self.graph.layers[-1].specs[0].shape, target, self.dtype, self.device)
        return self._tried

    def _check_parameters(self) -> None:
        """LayerwiseError where the loop has changed parameters in a way that would not be followed."""
        self._places.check()
        self._attributes.check(training=self.training)
        check_values(self._reducer.parameters, self._initial)
        check_frozen(self._frozen)

    def _sums(self, schedule: Schedule) -> Sums | None:
        """Of the parameters for which it is too late if they are written to before the backward pass."""
        parameters = self._reducer.parameters
        lasting = {name for name, one in self._parts.items() if not one.gathered}
        names = [name for name in parameters if name in lasting or name in schedule.read_elsewhere]
        groups = {name: self._state.sharing(name) for name in names}
        members = {name: (group.index(self.comm.rank), len(group)) for name, group in groups.items()}
        return Sums(parameters, members) if names else None

    def _came(
        self,
        graph: LayerGraph,
        held_then: Mapping[str, Version],
        sums: Sums | None,
        has_gradient: Sequence[bool],
    ) -> None:
        """A backward pass comes to the outputs of a call. held_then, sums: its parameters' versions and values."""
        check_unwritten(self._reducer.parameters, held_then)
        if sums is not None:
            sums.check(self._reducer.parameters)
        self.begin()
        self._unused.came(graph, has_gradient)

    def _finish(self, gradients: Gradients, *, differentiable: bool) -> None:
        self._gathers.end()
        gradients.leave_alone = self._unused.parameters()
        super()._finish(gradients, differentiable=differentiable)

    def _made(self, name: str, leaf: Tensor) -> None:
        """Autograd has added up the gradient of what the layers compute with in place of a parameter."""
        self.begin()
        assert self._pass is not None
        gradient, leaf.grad = leaf.grad, None
        self._gathers.made(name)
        if gradient is None:  # autograd has come by, with nothing: of an output that this rank's loss does not use
            if name in self._parts and self._parts[name].gathered:  # others may wait for its sum
                self._pass[1].absent(name)
            return
        # A context takes longer than what is in it.
        with torch.no_grad() if torch.is_grad_enabled() else NOTHING, unguarded():
            if name in self._copies:
                self._pass[1].absent(name)
            else:
                self._pass[1].add(name, gradient)

    def _begun(self) -> None:
        self._unused.begin()
        self._check_hooks()

    def _check_hooks(self) -> None:
        held = self._reducer.parameters
        with unguarded():
            check_parameters(held.items(), partial_sums=self.comm.size > 1)
            if self._tied and self.comm.size == 1:
                check_parameters(((name, held[name]) for name in self._tied if name in held), partial_sums=True)

    def _held(self) -> Mapping[str, Tensor]:
        """What the layers compute with, by name; collected anew where some were replaced, by `to` for example."""
        if self._leaves is None:
            summed_up = self._reducer.parameters if self.comm.size > 1 else {}
            self._leaves = Leaves(self._state.tree.tensors(), summed_up, self._parts, partial(_made, ref(self)))
            self._gathers = Gathers(self.graph, self._parts, self._reducer, self._leaves.tensors, self.comm)
        return self._leaves.now()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> LayeredModule:
        self._leaves, self._initial = None, {}
        super()._apply(fn, False)  # type: ignore[no-untyped-call]
        self._state.apply(fn)
        self._places = Places(self._tree)
        dtype = fn(torch.zeros((), dtype=self.dtype, device=self.device)).dtype
        if dtype != self.dtype:
            self._retype(dtype)
        return self

    def _retype(self, dtype: torch.dtype) -> None:
        """The parameters have another element type from now on. LayerwiseError where the model has several."""
        check_types(self.graph, dtype)
        self.dtype, self.options = dtype, replace(self.options, dtype=dtype)
        self._state.options = self.options
        self._shapes = Shapes(self._network, self.plan, self.comm, self.options)
        self._executors.clear()
        self._reducer.forget()

    def compile(self, **settings: Any) -> None:
        """What each rank computes by itself, from now on, with torch.compile's arguments. Every rank calls it."""
        self.options = replace(self.options, compile=settings)
        for executor in self._executors.values():
            executor.compile(settings)

    def _initialised(self) -> None:
        self._initial = versions(self._reducer.parameters) if self._initial else {}

    def shards(self) -> list[Shard]:
        self._initial = {}
        return super().shards()

    @property
    def form(self) -> Form:
        """What the ranks hold of parameters."""
        return "dtensors" if self._state.shardings else "boxes" if self.cut else "whole"

    def __deepcopy__(self, memo: dict[int, Any]) -> LayeredModule:
        """With the same values, and the same ranks to run it on; every rank copies alike."""
        made = LayeredModule(self._network, self.plan, self.comm, self.options, self.loss)
        memo[id(self)] = made
        made.load_state_dict(self.state_dict())
        for mine, theirs in zip(self.parameters(), made.parameters(), strict=True):
            theirs.requires_grad_(mine.requires_grad)
        made.steps, made._initial = self.steps, {}
        made._forward_hooks.update(self._forward_hooks)
        made._forward_pre_hooks.update(self._forward_pre_hooks)
        made.training = self.training
        self._carry(made)
        return made

    def state_dict(self, *args: Any, prefix: str = "", **kwargs: Any) -> dict[str, Any]:  # type: ignore[override]
        """By the model's names; DTensors where the plan splits them, which torch.distributed.checkpoint saves.

        Where no DTensor says which box a rank holds: this rank's boxes, as `fc.weight[0:8 of 16, :]`.
        """
        if args or kwargs.get("destination") is not None:
            raise LayerwiseError(
                "the parallel module is inside another module, whose state dict cannot have it: save its own"
            )
        return {prefix + name: tensor for name, tensor in self._state.state_dict().items()}

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Takes a whole state dict, also one of DTensors, or this rank's; another rank's boxes are refused."""
        self._initial = {}
        missing, odd = self._state.load(state_dict, strict=strict)
        return torch.nn.modules.module._IncompatibleKeys(missing, odd)


def _made(module: ref[LayeredModule], name: str, leaf: Tensor) -> None:
    held = module()
    if held is not None:  # a graph that is differentiated holds it
        held._made(name, leaf)
