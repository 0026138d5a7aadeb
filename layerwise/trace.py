"""Trace: what a rank did when, as a Chrome trace (one process a rank) that opens in Perfetto (ui.perfetto.dev)."""

from __future__ import annotations

import json
import os
import platform
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import torch
from torch.autograd import profiler

from layerwise.chrome import CATEGORIES, Category, RankSpans, chrome_trace
from layerwise.comm.base import Comm
from layerwise.files import write_text

_Mark = float | torch.cuda.Event

MOST_SPANS = 100_000  # a rank; then recording stops: rank 0 holds all ranks' spans when it writes
_ROUNDS = 9  # barriers by which clocks are compared
NOTHING: AbstractContextManager[object] = nullcontext()


@dataclass(frozen=True, slots=True)
class Span:
    """Seconds on the rank's own clock."""

    name: str
    category: Category
    start_s: float
    end_s: float


class Trace:
    """Collects spans; safe to use from several threads. `on`: until there are `MOST_SPANS`.

    `device`: where it is a GPU, spans are the time of the work on its current stream (events), not of the launches.
    """

    def __init__(self, *, device: torch.device | None = None) -> None:
        self.on = True
        self._lock = threading.Lock()
        self._spans: list[tuple[str, Category, _Mark, _Mark]] = []
        self._open: dict[int, tuple[str, Category, _Mark]] = {}
        self._begun = 0
        self._clock = _Clock(device if device is not None and device.type == "cuda" else None)

    def span(self, name: str, category: Category) -> AbstractContextManager[object]:
        """Records the time of a `with` block."""
        return self._span(name, category) if self.on else NOTHING

    @contextmanager
    def _span(self, name: str, category: Category) -> Iterator[None]:
        start = self._clock.mark()
        try:
            yield
        finally:
            self._record(name, category, start)

    def begin(self, name: str, category: Category) -> int:
        """Something starts that ends elsewhere: a collective under way. Returns what `end` is to be given."""
        if not self.on:
            return -1
        start = self._clock.mark()
        with self._lock:
            self._begun += 1
            self._open[self._begun] = (name, category, start)
            return self._begun

    def end(self, token: int) -> None:
        """Ends a span. What was begun while the trace was off is ignored."""
        with self._lock:
            begun = self._open.pop(token, None)
        if begun is not None:
            self._record(*begun)

    def _record(self, name: str, category: Category, start: _Mark) -> None:
        end = self._clock.mark()
        with self._lock:
            if len(self._spans) < MOST_SPANS:
                self._spans.append((name, category, start, end))
            else:
                self.on = False

    def spans(self) -> list[Span]:
        """Returns the recorded spans, in the order of their ends. Waits for the GPU."""
        with self._lock:
            recorded = list(self._spans)
        return [
            Span(name, kind, self._clock.time_s(start), self._clock.time_s(end)) for name, kind, start, end in recorded
        ]

    def write(self, path: str | os.PathLike[str], comm: Comm) -> None:
        """Rank 0 writes one file with every rank's spans on one clock, whole or not at all. Every rank calls this."""
        offset_s = clock_offset(comm, self._clock.now_s)
        names: dict[str, int] = {}
        rows = []
        for span in self.spans():
            start_ns, end_ns = (round((span_s - offset_s) * 1e9) for span_s in (span.start_s, span.end_s))
            rows.append((names.setdefault(span.name, len(names)), CATEGORIES.index(span.category), start_ns, end_ns))
        texts = comm.all_gather_text(json.dumps({"host": platform.node(), "names": list(names), "rows": rows}))
        if comm.rank == 0:
            write_text(path, chrome_trace([RankSpans(**json.loads(text)) for text in texts]))


class _Clock:
    """perf_counter, or events on a GPU's stream that are read against it when all is over."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._zero: tuple[torch.cuda.Event, float] | None = None
        if device is not None:
            event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
            event.record(torch.cuda.current_stream(device))
            event.synchronize()
            self._zero = event, time.perf_counter()

    def now_s(self) -> float:
        return time.perf_counter()

    def mark(self) -> _Mark:
        if self._zero is None:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def time_s(self, mark: _Mark) -> float:
        if isinstance(mark, float):
            return mark
        assert self._zero is not None
        zero, zero_s = self._zero
        mark.synchronize()
        return zero_s + float(zero.elapsed_time(mark)) / 1e3


def now_s(device: torch.device) -> float:
    """Seconds by this process's clock, once the work of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def clock_offset(comm: Comm, now_s: Callable[[], float]) -> float:
    """Returns what to subtract from this rank's clock to have rank 0's, in seconds; every rank calls this.

    Ranks of one machine share its monotonic clock. Others read theirs as they leave a barrier, several times, and
    take the median of the differences: good to the time that a message takes.
    """
    times = []
    for _ in range(_ROUNDS):
        comm.barrier()
        times.append(now_s())
    readings = comm.all_gather_object([_machine(), times])
    (machine, zero), (mine, own) = readings[0], readings[comm.rank]
    return 0.0 if machine == mine else median(b - a for a, b in zip(zero, own, strict=True))


def _machine() -> str:
    """This boot of this machine; names of machines are not unique."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return boot.read_text() if boot.exists() else f"{platform.node()} {os.getpid()}"


class Spans:
    """The destination of spans: `trace`, where set, else the profiler, where it is on."""

    def __init__(self) -> None:
        self.trace: Trace | None = None

    def span(self, name: str, category: Category) -> AbstractContextManager[object]:
        """A block of code."""
        if self.trace is not None:
            return self.trace.span(name, category)
        return torch.profiler.record_function(name) if profiler._is_profiler_enabled else NOTHING
