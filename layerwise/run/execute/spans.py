"""Spans: what a rank does, by name, in a trace or in torch's profiler."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.autograd import profiler

from layerwise.chrome import Category
from layerwise.run.schedule.redistribute import Flight
from layerwise.run.trace import Trace

NOTHING: AbstractContextManager[object] = nullcontext()


class Spans:
    """The destination of spans: `trace`, where set, else the profiler, where it is on."""

    def __init__(self) -> None:
        self.trace: Trace | None = None

    def span(self, name: str, category: Category) -> AbstractContextManager[object]:
        """A block of code."""
        if self.trace is not None:
            return self.trace.span(name, category)
        return torch.profiler.record_function(name) if profiler._is_profiler_enabled else NOTHING


@dataclass(frozen=True, slots=True)
class TimedTransfer:
    """A redistribution one way, with its span. `start`: of this rank's part of a tensor."""

    name: str
    start: Callable[[Tensor | None], Flight]
    spans: Spans

    def __call__(self, x: Tensor | None) -> Tensor | None:
        """Moves a tensor, and waits for it."""
        with self.spans.span(self.name, "transfers"):
            return self.start(x).finish()

    def begin(self, x: Tensor | None) -> Flight:
        """Starts to move a tensor, for `finish`. In a trace the span ends when the network is done."""
        trace = self.spans.trace
        if trace is None:
            with self.spans.span(self.name, "transfers"):
                return self.start(x)
        begun = trace.begin(self.name, "transfers")
        flight = self.start(x)
        flight.handle.when_done(partial(trace.end, begun))
        return flight

    def finish(self, flight: Flight) -> Tensor | None:
        """What has arrived."""
        with NOTHING if self.spans.trace is not None else self.spans.span(self.name, "transfers"):
            return flight.finish()
