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

from layerwise.comm.base import Comm, Group, Kind
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.ends import Constant, Input, Sink, Tied
from layerwise.plan import Plan
from layerwise.run.exchange import Transfer, groups_of, transfer
from layerwise.run.place import Boxes, Place, needed, places
from layerwise.run.replicas import Gradients
from layerwise.run.trace import Trace
from layerwise.run.trace_file import Category
from layerwise.run.work import Work, work

GEMMS = ("conv", "conv_transpose", "linear", "matmul", "attention", "pool", "concat", "fused")


@dataclass(frozen=True, slots=True)
class Edge:
    """One input of a layer: where it comes from, how it travels, and whether a gradient comes back."""

    source: str
    transfer: Transfer
    backward: bool
    what: str


@dataclass(frozen=True, slots=True)
class Step:
    """A layer on this rank. parameters: the model's names, or None for a tied one, which is an edge."""

    layer: Layer
    edges: tuple[Edge, ...]
    work: Work | None
    parameters: tuple[str | None, ...]
    dtype: torch.dtype | None  # of the floating-point output; None: as it comes
    backward: bool


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
    """One rank's schedule for one global batch."""

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        comm: Comm,
        *,
        dtype: torch.dtype,
        device: torch.device,
        whole_classes: bool,
        local_batch_norm: bool,
        autocast: torch.dtype | None,
        recompute: bool,
    ) -> None:
        self.graph, self.comm, self.device, self.dtype = graph, comm, device, dtype
        self.autocast, self.recompute = autocast, recompute
        self.places = places(graph, plan)
        self.free, self.whole_classes = plan.io == "free", whole_classes
        self.groups: set[Group] = set()  # of collective transfers
        self.statistics: set[Group] = set()
        self.sinks: list[Boxes] = []
        self.steps = tuple(self._step(i, layer, local_batch_norm) for i, layer in enumerate(graph.layers))
        self.last_use = {edge.source: i for i, step in enumerate(self.steps) for edge in step.edges}
        self.trace: Trace | None = None

    def _step(self, number: int, layer: Layer, local_batch_norm: bool) -> Step:
        place, rank, flows = self.places[layer.name], self.comm.rank, self.graph.has_gradient
        edges = []
        for slot, source in enumerate(layer.inputs):
            at = self.places[source]
            need = self._sink_need(layer, slot) if isinstance(layer.op, Sink) else self._need(layer, slot, place)
            part = transfer(at.owned, need, rank, everywhere=at.everywhere)
            if self.comm.collectives and not at.everywhere:
                self.groups |= groups_of(at.owned, need)
            backward = flows[source] and (flows[layer.name] or isinstance(layer.op, Sink))
            edges.append(Edge(source, part, backward, f"{source} -> {layer.name}"))
        own: tuple[str | None, ...] = tuple(
            None if i in layer.tied else name for i, name in enumerate(layer.parameters)
        )
        if isinstance(layer.op, Input | Sink):
            return Step(layer, tuple(edges), None, own, self.type_of(layer), flows[layer.name])
        for r in range(self.comm.size):
            made = work(layer, number, place, r, local_batch_norm=local_batch_norm)
            self.statistics |= {s.statistics for s in made.stages if s.statistics} if made else set()
            if r == rank:
                mine = made
        return Step(layer, tuple(edges), mine, own, self.type_of(layer), flows[layer.name])

    def _need(self, layer: Layer, slot: int, place: Place) -> Boxes:
        where = layer.space
        if slot < len(layer.specs):
            maps, late = where.needs[slot], where.late_inputs[slot]
        else:
            parameter = where.parameters[layer.tied[slot - len(layer.specs)]]
            maps, late = parameter.maps, parameter.late
        return needed(maps, place.owned if late else place.cells)

    def _sink_need(self, sink: Layer, slot: int) -> Boxes:
        """What each rank gets of an output: its samples; all of it (io free); or, with a loss, a box of all classes."""
        place, source = self.places[sink.name], self.places[sink.inputs[slot]]
        spec = sink.specs[slot]
        if self.free and self.whole_classes and len(sink.inputs) == 1 and len(spec.shape) > 1:
            wide = [b and Box((b.lo[0], 0, *b.lo[2:]), (b.hi[0], spec.shape[1], *b.hi[2:])) for b in source.owned]
            found: Boxes = tuple(b if b not in wide[:i] else None for i, b in enumerate(wide))
        else:
            found = needed(sink.space.needs[slot], place.cells)
        self.sinks.append(found)
        return found

    def type_of(self, layer: Layer) -> torch.dtype | None:
        """The element type that a layer's output has on the wire."""
        if not layer.out.differentiable:
            return None if isinstance(layer.op, Input) else getattr(torch, layer.out.dtype)
        kind = layer.op.main.kind if hasattr(layer.op, "main") else layer.op.kind
        if self.autocast is not None and not isinstance(layer.op, Input | Sink) and kind in GEMMS:
            return self.autocast
        return self.dtype

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
        for i, step in enumerate(self.steps):
            name = step.layer.name
            self.comm.at(number, name)
            sink = isinstance(step.layer.op, Sink)
            received = []
            for edge in step.edges:
                like = done.shapes[edge.source]
                kind: Kind = "io" if sink and self.free else "transfers"
                with self._span(edge.what, "transfers", edge.transfer.pattern != "local"):
                    received.append(edge.transfer.forward(self.comm, values[edge.source], like, edge.what, kind))
            if sink:
                outputs = received
            elif isinstance(step.layer.op, Tied):
                values[name] = parameters[name].detach() if name in parameters else None
            elif isinstance(step.layer.op, Input):
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
            for edge in step.edges:
                if self.last_use[edge.source] == i:
                    values.pop(edge.source, None)
        return outputs, done

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
        for step in reversed(self.steps):
            name = step.layer.name
            self.comm.at(number, f"{name} (backward)")
            if isinstance(step.layer.op, Sink):
                inward: list[Tensor | None] = list(gradients)
            elif isinstance(step.layer.op, Tied):
                if name in parameters:
                    into.add(name, grads.pop(name, torch.zeros_like(parameters[name])))
                continue
            elif not step.backward or isinstance(step.layer.op, Input):
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
                if isinstance(step.layer.op, Sink) and self.free:
                    back = self._own_share(edge, gradient, like)
                else:
                    with self._span(f"{edge.what} (backward)", "transfers", edge.transfer.pattern != "local"):
                        back = edge.transfer.adjoint(self.comm, gradient, like, f"{edge.what}, backward")
                if back is not None:
                    grads[edge.source] = grads[edge.source] + back if edge.source in grads else back

    def _own_share(self, edge: Edge, gradient: Tensor | None, like: Tensor) -> Tensor | None:
        """With io free every rank has the whole output and computes the same loss of it: nothing is added up."""
        if self.whole_classes:
            return edge.transfer.adjoint(self.comm, gradient, like, f"{edge.what}, backward", "io")
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
        if self.autocast is not None:
            mixed = torch.autocast(self.device.type, self.autocast)
        try:
            with torch.set_grad_enabled(differentiate and step.backward), mixed:
                out = step.work.run(self.comm, leaves[:count], given, training=training, seed=seed)
                return out if step.dtype is None else out.to(step.dtype)
        except LayerwiseError as error:
            raise type(error)(f"layer {step.layer.name!r}: {error}") from None

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


def parameter_boxes(graph: LayerGraph, at: Mapping[str, Place]) -> dict[str, Boxes]:
    """By the model's name, the box of each parameter and buffer that every rank holds."""
    found: dict[str, Boxes] = {}
    for layer in graph.layers:
        place = at[layer.name]
        if isinstance(layer.op, Tied):
            found[layer.name] = place.owned
        for name, p in layer.own_parameters():
            found[name] = needed(p.maps, place.owned if p.late else place.cells)
    return found


def constants(graph: LayerGraph) -> list[Layer]:
    """The layers that are constants."""
    return [layer for layer in graph.layers if isinstance(layer.op, Constant)]
