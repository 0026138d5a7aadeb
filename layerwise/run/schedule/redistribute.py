"""Redistribution: a transfer on torch.distributed, and its adjoint for the backward pass.

With gloo everything is sent as messages, which are faster than its collectives (`comm.process`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Done, Group, Handle, Then, TrafficKind
from layerwise.geometry import Box
from layerwise.partition.moved import Transfer
from layerwise.trace import NOTHING, Spans

Messages = Sequence[tuple[int, Tensor]]  # (peer, tensor)


@dataclass(frozen=True, slots=True)
class Flight:
    """A tensor under way; do not write to its source until it has landed."""

    handle: Handle
    land: Callable[[], Tensor | None]  # builds the tensor from what was received

    def finish(self) -> Tensor | None:
        """Waits for the tensor, and returns it. Call it once."""
        self.handle.wait()
        return self.land()


def landed(x: Tensor | None) -> Flight:
    """Returns a flight that has ended, with x."""
    return Flight(Done(), lambda: x)


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A redistribution in one direction, with its trace span. `start`: takes this rank's part of a tensor."""

    name: str
    start: Callable[[Tensor | None], Flight]
    spans: Spans

    def __call__(self, x: Tensor | None) -> Tensor | None:
        """Transfers a tensor, and waits for it."""
        with self.spans.span(self.name, "transfers"):
            return self.start(x).finish()

    def begin(self, x: Tensor | None) -> Flight:
        """Starts to transfer a tensor, for `finish`. In a trace the span ends when the network is done."""
        trace = self.spans.trace
        if trace is None:
            with self.spans.span(self.name, "transfers"):
                return self.start(x)
        begun = trace.begin(self.name, "transfers")
        flight = self.start(x)
        flight.handle.when_done(partial(trace.end, begun))
        return flight

    def finish(self, flight: Flight) -> Tensor | None:
        """Returns what was received."""
        with NOTHING if self.spans.trace is not None else self.spans.span(self.name, "transfers"):
            return flight.finish()


@dataclass(frozen=True, slots=True)
class Redistribution:
    """A rank's part of moving a tensor from the boxes that ranks own to those that they need."""

    transfer: Transfer
    comm: Comm
    what: str  # for error messages
    kind: TrafficKind = "transfers"  # the kind that its bytes are counted as
    margins: tuple[tuple[int, int], ...] = ()  # zeros (low, high) around the box `need`, by dimension; (): none

    @property
    def room(self) -> Box | None:
        """Returns the box `need` with its margins: the shape that is received, and that its gradient has."""
        need = self.transfer.need
        if need is None or not self.margins:
            return need
        lo = tuple(x - low for x, (low, _) in zip(need.lo, self.margins, strict=True))
        return Box(lo, tuple(x + high for x, (_, high) in zip(need.hi, self.margins, strict=True)))

    def kept(self, x: Tensor | None, like: Tensor) -> Tensor | None:
        """Returns the box `need` if nothing is sent: it lies in the box `own`, or is empty."""
        t = self.transfer
        if t.need is None:
            return None
        return like.new_empty(t.need.shape) if t.kept is None else _part(x, t.own, t.kept)

    def begin(self, x: Tensor | None, like: Tensor) -> Flight:
        """Starts to move x from the box `own` to the box `need`; what is received has the type and device of `like`.

        None is a box of zeros.
        """
        t = self.transfer
        if t.pattern == "local":
            return landed(self.kept(x, like))
        if x is None and t.own is not None:
            x = like.new_zeros(t.own.shape)
        received, room = [(peer, like.new_empty(box.shape)) for peer, box in t.receives], self.room

        def land() -> Tensor | None:
            if room is None:
                return None
            out = like.new_empty(room.shape)
            for dim, (low, high) in enumerate(self.margins):
                out.narrow(dim, 0, low).zero_()
                out.narrow(dim, out.shape[dim] - high, high).zero_()
            if t.kept is not None:
                out[t.kept.slices(room)] = _part(x, t.own, t.kept)
            for (_, box), (_, part) in zip(t.receives, received, strict=True):
                out[box.slices(room)] = part
            return out

        return Flight(self._move(x, [(peer, _part(x, t.own, box)) for peer, box in t.sends], received), land)

    def begin_adjoint(self, g: Tensor | None, like: Tensor) -> Flight:
        """Starts the backward transfer: adds gradients of `need` up in `own`, in the order of ranks after this one.

        None is a gradient of zeros.
        """
        t = self.transfer
        if t.pattern == "local":
            return landed(None if t.own is None else self._own_part(g, t.need, like, own_only=True))
        room = self.room
        if g is None and room is not None:
            g = like.new_zeros(room.shape)
        if t.pattern == "gather" and self.comm.collectives:
            assert g is not None
            return self._reduce_scatter(g, like)
        received = [(peer, like.new_empty(box.shape)) for peer, box in t.sends]

        def land() -> Tensor | None:
            if t.own is None:
                return None
            total = self._own_part(g, room, like, own_only=not received)
            for (_, box), (_, part) in zip(t.sends, received, strict=True):
                total[box.slices(t.own)] += part
            return total

        sent = [(peer, _part(g, room, box)) for peer, box in t.receives]
        return Flight(self._move(g, sent, received), land)

    def _move(self, x: Tensor | None, sent: Messages, received: Messages) -> Handle:
        """Starts the collective that matches the pattern, or messages."""
        comm, group = self.comm, self.transfer.group
        if comm.collectives and self.transfer.pattern == "all-to-all" and group:
            return self._all_to_all(sent, received)
        if comm.collectives and self.transfer.pattern == "gather" and x is not None:
            local = sent[0][1].contiguous().view(-1)  # strided slices of a line stay views when flattened
            out = local.new_empty((len(group), local.numel()))
            handle = comm.all_gather(out, local, group, self.kind, self.what)
            return Then(handle, lambda: _take_rows(out, group, received))
        return comm.exchange([(peer, part.contiguous()) for peer, part in sent], received, self.kind, self.what)

    def _all_to_all(self, sent: Messages, received: Messages) -> Handle:
        """Starts an all-to-all of equal shards; this rank's own shard is not sent."""
        group, flat = self.transfer.group, {peer: part.reshape(-1) for peer, part in sent}
        size = next(iter(flat.values()))
        empty = size.new_zeros(size.shape)
        out = size.new_empty((len(group), *size.shape))
        rows = torch.stack([flat.get(peer, empty) for peer in group])
        handle = self.comm.all_to_all(out, rows, group, self.kind, self.what)
        return Then(handle, lambda: _take_rows(out, group, received))

    def _reduce_scatter(self, g: Tensor, like: Tensor) -> Flight:
        t = self.transfer
        assert t.own is not None
        assert t.kept is not None
        boxes = dict(t.receives) | {self.comm.rank: t.kept}
        parts = torch.stack([_part(g, self.room, boxes[peer]).flatten() for peer in t.group])
        out, shape, kept = like.new_empty(parts.shape[1:]), t.kept.shape, t.kept
        handle = self.comm.reduce_scatter(out, parts, t.group, self.kind, self.what)
        return Flight(handle, lambda: self._own_part(out.view(shape), kept, like, own_only=True))

    def _own_part(self, g: Tensor | None, origin: Box | None, like: Tensor, *, own_only: bool) -> Tensor:
        """Returns this rank's own contribution to its own box: a new tensor, unless nothing else will be added.

        origin: the box that `g` covers.
        """
        t = self.transfer
        assert t.own is not None
        if g is not None and t.kept == t.own:
            part = _part(g, origin, t.kept)
            return part if own_only else part.clone()
        total = like.new_zeros(t.own.shape)
        if g is not None and t.kept is not None:
            total[t.kept.slices(t.own)] = _part(g, origin, t.kept)
        return total


def _take_rows(rows: Tensor, group: Group, received: Messages) -> None:
    for peer, part in received:
        part.copy_(rows[group.index(peer)].view_as(part))


def _part(x: Tensor | None, origin: Box | None, box: Box) -> Tensor:
    assert x is not None
    return x if box == origin else x[box.slices(origin)]
