"""Watch: how long the parts of a step take, warm, repeated, as medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

Parts = Sequence[Callable[[], object]]


@dataclass(frozen=True, slots=True)
class Reading:
    """seconds: the median of each part; spread: the range of the middle half of the whole's samples, as a share of
    their median; samples: how many there were."""

    seconds: tuple[float, ...]
    spread: float
    samples: int


@dataclass(frozen=True, slots=True)
class Watch:
    """Times parts that run one after the other, `least` to `most` times, for about `budget_s` seconds.

    On a GPU by events between the parts, in a stream that is never waited for amid the samples: a part takes what the
    GPU takes, or what its launches take where these are slower.
    """

    device: torch.device
    budget_s: float = 0.5
    least: int = 5
    most: int = 200
    warm: int = 2

    def __call__(self, parts: Parts, between: Callable[[], object] = lambda: None) -> Reading:
        """`between` runs after each sample, and is not timed."""
        sample = self._events if self.device.type == "cuda" else self._clock
        first = sample(parts, between, self.warm)
        estimate = sum(first[-1])
        count = min(self.most, max(self.least, int(self.budget_s / max(estimate, 1e-6))))
        rows = sample(parts, between, count)
        totals = sorted(sum(row) for row in rows)
        median = statistics.median(totals)
        middle = totals[-1 - count // 4] - totals[count // 4]
        seconds = tuple(statistics.median(column) for column in zip(*rows, strict=True))
        return Reading(seconds, middle / median if median > 0 else 0.0, count)

    def _clock(self, parts: Parts, between: Callable[[], object], count: int) -> list[tuple[float, ...]]:
        rows = []
        for _ in range(count):
            times = [time.perf_counter()]
            for part in parts:
                part()
                times.append(time.perf_counter())
            between()
            rows.append(tuple(b - a for a, b in pairwise(times)))
        return rows

    def _events(self, parts: Parts, between: Callable[[], object], count: int) -> list[tuple[float, ...]]:
        torch.cuda.synchronize(self.device)
        rows: list[list[torch.cuda.Event]] = []
        for _ in range(count):
            events = [torch.cuda.Event(enable_timing=True) for _ in range(len(parts) + 1)]  # type: ignore[no-untyped-call]
            events[0].record()
            for part, event in zip(parts, events[1:], strict=True):
                part()
                event.record()
            between()
            rows.append(events)
        torch.cuda.synchronize(self.device)
        return [tuple(float(a.elapsed_time(b)) / 1e3 for a, b in pairwise(events)) for events in rows]
