"""Executor: a plan's layers in order, with the redistributions between, as one graph of autograd's.

Every rank goes through all layers, also those that it has no part of: one order of communication, on all ranks. What
communicates takes the order token along (see `run.execute.autograd`), so the backward pass keeps that order, reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Role
from layerwise.run.compiling import Settings
from layerwise.run.execute.autograd import Link, awaited, held_only, moved, ordered, sent_ahead
from layerwise.run.execute.compiled import CompiledSegment, CompiledSegments
from layerwise.run.execute.gathered import Gathered
from layerwise.run.execute.mirrors import remember
from layerwise.run.execute.passes import Pass
from layerwise.run.execute.recompute import Block, blocks_of
from layerwise.run.execute.spans import NOTHING, Move, Spans
from layerwise.run.execute.weights import LateWeights, weights_late
from layerwise.run.execute.within import KeptOutput
from layerwise.run.schedule.layers import Schedule, ScheduledEdge, ScheduledLayer
from layerwise.run.schedule.redistribute import Flight, landed
from layerwise.run.trace import Trace

Made = dict[str, Tensor | None]  # by a layer's name: this rank's box of what it makes


class Executor:
    """Runs one rank's schedule."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule, self.comm, self.options = schedule, schedule.comm, schedule.options
        self.spans = Spans()
        self._dropped = [tuple(schedule.dropped_after(number)) for number in range(len(schedule.layers))]
        self._by_name = {scheduled.layer.name: scheduled for scheduled in schedule.layers}
        self._likes: dict[torch.dtype, Tensor] = {}
        self._gathered = Gathered(schedule)
        self._compiled: CompiledSegments | None = None
        if self.options.compile is not None:
            self.compile(self.options.compile)

    def compile(self, settings: Settings) -> None:
        """What lies between communications, from now on."""
        for layer in self.schedule.graph.layers:
            if any(stage.op.draws_always for stage in layer.stages):
                raise LayerwiseError(
                    f"layer {layer.name!r} draws random numbers that are not compiled: leave compile= out"
                )
        self._compiled = CompiledSegments(self.schedule, settings)

    @property
    def trace(self) -> Trace | None:
        """Collects spans of what this rank does, where set."""
        return self.spans.trace

    @trace.setter
    def trace(self, trace: Trace | None) -> None:
        self.spans.trace = trace

    def forward(self, run: Pass, fed: Mapping[str, Tensor]) -> list[Tensor | None]:
        """This rank's boxes of the outputs, from those of the inputs (constants are in `fed`)."""
        values = Made()
        types = dict[str, torch.dtype]()  # of what each layer makes
        outputs: list[Tensor | None] = []
        ahead = dict[int, tuple[Link, Tensor | None]]()  # with their tickets, by the edge's id
        blocks = blocks_of(run, self.schedule, self.spans, self._like)
        segments = {} if self._compiled is None else self._compiled.by_layer(training=run.training)
        for i, scheduled in enumerate(self.schedule.layers):
            name, role = scheduled.layer.name, scheduled.layer.role
            self.comm.at(run.number, name)
            needed = run.training or scheduled.returned  # nothing is remembered in evaluation
            segment = segments.get(name)
            if needed:
                self._gathered.begin(run, name)
            waits = needed and (segment is None or segment.first is scheduled)
            received = self._received(run, scheduled, values, types, ahead) if waits else []
            for user, edge in self.schedule.begun_before.get(i, ()):
                if run.training or user.returned:
                    ahead[id(edge)] = self._sent_ahead(run, edge, values, types)
            if not needed:
                self._done(run, values, types, i, blocks)
                continue
            if role is Role.SINK:
                outputs = received
                break
            if run.differentiate and scheduled.backward:
                copies = [run.parameters[copy] for copy in scheduled.copies if copy != scheduled.late_weight]
                run.token = held_only(run.token, copies)
            if segment is None:
                if role is not Role.COMPUTE:
                    values[name] = run.source(scheduled, fed)
                else:
                    values[name] = self._layer(run, scheduled, received, values)
                types[name] = getattr(values[name], "dtype", scheduled.dtype or torch.int64)
            elif segment.first is scheduled:
                made = self._segment(run, segment, received, values, fed)
                values |= made
                types |= {name: out.dtype for name, out in made.items()}
                del made
            if name in run.gathers:
                values[name] = self._gathered.end(run, scheduled, values[name])
            unread = values.get(name) if name in self.schedule.unread else None
            if run.differentiate and unread is not None:
                run.token = held_only(run.token, [unread])
            if scheduled.mirrors and run.training:
                remember(run, scheduled, self.comm, self.spans)
            received = []
            self._done(run, values, types, i, blocks)
        return outputs

    def _segment(
        self,
        run: Pass,
        segment: CompiledSegment,
        received: Sequence[Tensor | None],
        values: Made,
        fed: Mapping[str, Tensor],
    ) -> dict[str, Tensor]:
        """Outputs of a segment, all of whose layers are computed at the first. received: what that one is given."""
        inputs = list[Tensor | None]()
        for source, slot in segment.inputs:
            if slot is not None:
                inputs.append(received[slot])
            elif source in values:
                inputs.append(values[source])
            else:  # it comes between the segment's layers
                inputs.append(run.source(self._by_name[source], fed))
        given, begun = [run.parameters[name] for name in segment.parameters], list[int]()
        traced = self.spans.trace is not None and run.differentiate and segment.backward
        if traced:
            self._end_span_behind(run, inputs, given, begun)
        with self.spans.span(segment.name, "compute"), self._autocast(segment.first):
            seeds = segment.seeds(run.seed, self.options.device)
            made = dict(zip(segment.outputs, segment(_all(inputs), given, seeds), strict=True))
        if traced:
            names = [name for name, out in made.items() if out.requires_grad]
            begin = partial(self._begin_span, segment.name, run, begun)
            run.token, *marked = ordered(run.token, *(made[name] for name in names), at_backward=begin)
            made |= dict(zip(names, marked, strict=True))
        return made

    def _done(
        self, run: Pass, values: Made, types: Mapping[str, torch.dtype], number: int, blocks: dict[int, Block]
    ) -> None:
        """Lets go of what no layer after this one uses, and ends its block, where it is the last of one."""
        for name in self._dropped[number]:
            values.pop(name, None)
        if number in blocks:
            blocks.pop(number).end(run, values, types)

    def _received(
        self,
        run: Pass,
        scheduled: ScheduledLayer,
        values: Made,
        types: Mapping[str, torch.dtype],
        ahead: dict[int, tuple[Link, Tensor | None]],
    ) -> list[Tensor | None]:
        """A layer's inputs. First those sent ahead: so in the backward pass what is needed next goes first."""
        edges = scheduled.edges
        if all(edge.stays for edge in edges):
            return [values[edge.source] for edge in edges]
        if run.differentiate and scheduled.late_weight is not None:
            if not edges[0].ahead:
                ahead[id(edges[0])] = self._sent_ahead(run, edges[0], values, types)
            self._weights_late(run, scheduled, scheduled.late_weight)
        came = [self._awaited(run, *ahead.pop(id(edge))) if id(edge) in ahead else edge for edge in edges]
        given = [self._redistribute(run, x, values, types) if isinstance(x, ScheduledEdge) else x for x in came]
        for edge, x in zip(edges, given, strict=True):
            if edge.within and edge.source in run.within:
                run.within.pop(edge.source).move(edge, x)
        return given

    def _weights_late(self, run: Pass, scheduled: ScheduledLayer, name: str) -> None:
        """The gradient of a layer's weights is made when the backward pass comes back to here."""
        if name in scheduled.copies:
            run.token = held_only(run.token, [run.parameters[name]])
        elif scheduled.work is not None and self._compiled is None and run.parameters[name].requires_grad:
            what = f"{scheduled.layer.name} (backward)"

            def span() -> AbstractContextManager[object]:
                self.comm.at(run.number, what)
                return self.spans.span(what, "compute")

            late = LateWeights(run.parameters[name].dtype, span)
            run.token, weight = weights_late(run.token, run.parameters[name], late)
            run.late[scheduled.layer.name] = late, weight

    def _redistribute(
        self, run: Pass, edge: ScheduledEdge, values: Made, types: Mapping[str, torch.dtype]
    ) -> Tensor | None:
        """What this rank needs of a layer's output for another one."""
        x, dtype = values[edge.source], types[edge.source]
        whole = edge.redistribution.kind == "io"  # every rank has all of it, and computes the same of it
        if not (edge.travels or whole):
            kept = edge.redistribution.kept(x, self._like(dtype))
            if kept is not None and not kept.numel() and run.differentiate and edge.backward and not kept.requires_grad:
                kept.requires_grad_()  # of nothing: yet the layer sums its statistics' gradients on all ranks
            return kept
        there, back = self._ways(run, edge, dtype, alike=whole and not self.schedule.whole_classes)
        if not (run.differentiate and edge.backward):
            with torch.no_grad():
                return there(x)
        run.token, result = moved(run.token, x, there, back)
        return result

    def _sent_ahead(
        self, run: Pass, edge: ScheduledEdge, values: Made, types: Mapping[str, torch.dtype]
    ) -> tuple[Link, Tensor | None]:
        """What is on its way, and the ticket that autograd knows it by."""
        link, x = Link(*self._ways(run, edge, types[edge.source])), values[edge.source]
        if not (run.differentiate and edge.backward):
            with torch.no_grad():
                link.begin(x)
            return link, None
        run.token, ticket = sent_ahead(run.token, x, link)
        return link, ticket

    def _awaited(self, run: Pass, link: Link, ticket: Tensor | None) -> Tensor | None:
        if ticket is None:
            with torch.no_grad():
                return link.finish()
        run.token, result = awaited(run.token, ticket, link)
        return result

    def _ways(self, run: Pass, edge: ScheduledEdge, dtype: torch.dtype, *, alike: bool = False) -> tuple[Move, Move]:
        """There and back. alike: nothing is added up, as all ranks have the same gradient."""
        like, way, name = self._like(dtype), edge.redistribution, f"{edge.what} (backward)"

        def back(gradient: Tensor | None) -> Flight:
            self.comm.at(run.number, name)
            return way.begin_adjoint(gradient, like)

        def own(gradient: Tensor | None) -> Flight:
            box = way.transfer.own
            return landed(None if box is None or gradient is None else gradient[box.slices()])

        there = Move(edge.what, lambda x: way.begin(x, like), self.spans)
        return there, Move(name, own if alike else back, self.spans)

    def _layer(
        self, run: Pass, scheduled: ScheduledLayer, received: Sequence[Tensor | None], values: Made
    ) -> Tensor | None:
        """The rank's box of a layer's output; None where it has no part of it."""
        block = run.blocks.pop(scheduled.layer.name, None)
        if block is not None:
            block.keep(scheduled, values)
        if scheduled.work is None:
            return None
        layer, count = scheduled.layer, len(scheduled.layer.specs)
        tied = iter(received[count:])
        given = [next(tied) if name is None else run.parameters[name] for name in scheduled.parameters]
        inputs, convolve = list(received[:count]), None
        if layer.name in run.late:
            late, given[0] = run.late.pop(layer.name)
            convolve = late.convolve
        if not (run.differentiate and scheduled.backward):
            with torch.no_grad(), self.spans.span(layer.name, "compute"):
                return self._compute(run, scheduled, inputs, given)
        communicates = scheduled.work.communicates
        if layer.name in run.gathers:
            self._gathered.in_turn(run, scheduled, given)
        if self.spans.trace is not None:
            begun: list[int] = []
            self._end_span_behind(run, inputs, given, begun)
        elif communicates:
            run.wait_for_one(inputs, given)
        compute = partial(self._compute, run, scheduled, convolve=convolve)
        if layer.name in self.schedule.within:
            kept = run.within[layer.name] = KeptOutput()
            compute = partial(kept.compute, compute)
        with self.spans.span(layer.name, "compute"):
            out = compute(inputs, given) if block is None else block.compute(run, scheduled, compute, inputs, given)
        if self.spans.trace is not None:
            run.token, out = ordered(run.token, out, at_backward=partial(self._begin_span, layer.name, run, begun))
        elif communicates:
            run.token, out = ordered(run.token, out)
        return out

    def _compute(
        self,
        run: Pass,
        scheduled: ScheduledLayer,
        inputs: Sequence[Tensor | None],
        given: Sequence[Tensor | None],
        convolve: Callable[..., Tensor] | None = None,
    ) -> Tensor:
        assert scheduled.work is not None
        how: dict[str, Any] = {"training": run.training, "seed": run.seed, "convolve": convolve}
        try:
            with self._autocast(scheduled):
                out = scheduled.work.run(self.comm, _all(inputs), _all(given), **how)
                return out if scheduled.dtype is None or out.dtype == scheduled.dtype else out.to(scheduled.dtype)
        except LayerwiseError as error:
            raise type(error)(f"layer {scheduled.layer.name!r}: {error}") from None
        except ValueError as error:  # PyTorch's own, such as batch norm of one value a channel
            raise LayerwiseError(f"layer {scheduled.layer.name!r}: {error}") from error

    def _autocast(self, scheduled: ScheduledLayer) -> AbstractContextManager[object]:
        """Where a layer's kernels run: within the run's torch.autocast, or one of the model's own."""
        kind, wanted = self.options.device.type, scheduled.autocast
        there = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else None
        if wanted == there:
            return NOTHING
        # The cache is that of the autocast around, and does not say to which type it has cast.
        return torch.autocast(kind, wanted, enabled=wanted is not None, cache_enabled=False)

    def _end_span_behind(
        self, run: Pass, inputs: list[Tensor | None], given: list[Tensor | None], begun: list[int]
    ) -> None:
        """In a trace a layer's backward pass ends when all its gradients are made."""

        def end() -> None:
            if self.spans.trace is not None and begun:
                self.spans.trace.end(begun.pop())

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
        if self.spans.trace is not None:
            begun.append(self.spans.trace.begin(f"{name} (backward)", "compute"))

    def _like(self, dtype: torch.dtype) -> Tensor:
        """An empty tensor of that type on this rank's device."""
        if dtype not in self._likes:
            self._likes[dtype] = torch.empty(0, dtype=dtype, device=self.options.device)
        return self._likes[dtype]


def _all(tensors: Sequence[Tensor | None]) -> Sequence[Tensor]:
    """A rank that computes a layer has all that it needs for it."""
    return cast("Sequence[Tensor]", tensors)
