"""Stopwatch: how long the parts of a step take, warm, repeated, as medians with their spread."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import repeat

import torch

Do = Callable[[], object]
Parts = Sequence[Do]


def nothing() -> None:
    """Before a part that needs no preparation."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What was timed."""

    seconds: tuple[float, ...]  # the median of each part
    spread: float  # the range of the middle half of the whole's samples, as a share of their median
    samples: int  # how many there were


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times parts that run one after the other.

    On a GPU by events between the parts, in a stream that is never waited for amid the samples: a part takes what the
    GPU takes, or what its launches take where these are slower. On a CPU by a clock.
    """

    device: torch.device
    budget_s: float = 0.5  # about how long it takes
    least: int = 5  # samples, at least
    most: int = 200  # samples, at most
    warm: int = 2  # samples before, which do not count
    clock: Callable[[], float] | None = None  # in seconds; default: the wall clock

    def __call__(self, parts: Parts, before: Parts | None = None) -> Reading:
        """before: what runs before each part, and is not timed."""
        pairs = list(zip(repeat(nothing, len(parts)) if before is None else before, parts, strict=True))
        sample = self._events if self.device.type == "cuda" else self._clocked
        sample(pairs, self.warm - 1)
        start = time.perf_counter()
        sample(pairs, 1)
        estimate = time.perf_counter() - start
        count = min(self.most, max(self.least, int(self.budget_s / max(estimate, 1e-6))))
        rows = sample(pairs, count)
        totals = sorted(sum(row) for row in rows)
        median = statistics.median(totals)
        middle = totals[-1 - count // 4] - totals[count // 4]
        seconds = tuple(statistics.median(column) for column in zip(*rows, strict=True))
        return Reading(seconds, middle / median if median > 0 else 0.0, count)

    def _clocked(self, pairs: Sequence[tuple[Do, Do]], count: int) -> list[tuple[float, ...]]:
        rows, now = [], self.clock or time.perf_counter
        for _ in range(count):
            row = []
            for prepare, part in pairs:
                prepare()
                start = now()
                part()
                row.append(now() - start)
            rows.append(tuple(row))
        return rows

    def _events(self, pairs: Sequence[tuple[Do, Do]], count: int) -> list[tuple[float, ...]]:
        torch.cuda.synchronize(self.device)
        rows: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        for _ in range(count):
            row = []
            for prepare, part in pairs:
                prepare()
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                part()
                end.record()
                row.append((start, end))
            rows.append(row)
        torch.cuda.synchronize(self.device)
        return [tuple(float(a.elapsed_time(b)) / 1e3 for a, b in row) for row in rows]
