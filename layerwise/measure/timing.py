"""Timing, warm and repeated: on this device (Stopwatch), or by several ranks together (timed).

Rounds of several ranks during which a machine's host took CPU time from it are repeated, and those with the least of it
count, however long they took.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from math import inf
from pathlib import Path
from statistics import mean, median

import torch

from layerwise.comm.base import Comm
from layerwise.trace import now_s

STAT = Path("/proc/stat")
ROUNDS = 5
ROUND_S = 0.03  # short operations are repeated until a round takes about that
MOST = 50  # repetitions a round
STOLEN = 0.02  # of all cores' time: a round with more is repeated
TRIES = 3  # times as many rounds at most
LONG_S, FEW = 0.1, 3  # a sample that takes longer varies less: so many are enough, and the last to warm up is one
CYCLES_PER_S = 3e9  # of a GPU, and half as many again
Do = Callable[[], object]
Parts = Sequence[Do]


def nothing() -> None:
    """Prepares nothing."""


@dataclass(frozen=True, slots=True)
class Reading:
    """The times of a measurement."""

    seconds: tuple[float, ...]  # of each part: the median of its samples, on a CPU of rounds of them (`averaged`)
    spread: float  # the range of the middle half of the whole's samples, as a share of their median
    samples: int  # how many there were


@dataclass(frozen=True, slots=True)
class Stopwatch:
    """Times parts that run one after the other.

    On a GPU by events between the parts, in a stream that is never waited for amid the samples: a part takes what the
    GPU takes, or, unless the host is `ahead`, what its launches take where these are slower. On a CPU by a clock.
    """

    device: torch.device
    budget_s: float = 0.5  # about how long it takes
    least: int = 5  # samples, at least
    most: int = 200  # samples, at most
    warm: int = 2  # samples before, which do not count
    ahead: bool = False  # a GPU waits before each part until the host has launched it

    def __call__(self, parts: Parts, before: Parts | None = None) -> Reading:
        """before: what runs before each part, and is not timed."""
        pairs = list(zip(repeat(nothing, len(parts)) if before is None else before, parts, strict=True))
        sample = self._events if self.device.type == "cuda" else self._clocked
        sample(pairs, self.warm - 1)
        if self.ahead and self.device.type == "cuda":
            sample = partial(self._events, waits=self._launching_cycles(pairs))
        start = time.perf_counter()
        samples = sample(pairs, 1)
        estimate = time.perf_counter() - start
        long = estimate > LONG_S
        least = min(self.least, FEW) if long else self.least
        count = min(self.most, max(least, int(self.budget_s / max(estimate, 1e-6))))
        samples = [*samples, *sample(pairs, count - 1)] if long else sample(pairs, count)
        totals = sorted(sum(row) for row in samples)
        middle, apart = median(totals), totals[-1 - count // 4] - totals[count // 4]
        rounds = samples if self.device.type == "cuda" else averaged(samples)
        seconds = tuple(median(column) for column in zip(*rounds, strict=True))
        return Reading(seconds, apart / middle if middle > 0 else 0.0, count)

    def least_s(self, sample_s: float) -> float:
        """Returns the seconds that it takes at least, of parts that take `sample_s` together."""
        return sample_s * (FEW + self.warm - 1 if sample_s > LONG_S else self.least + self.warm)

    def _clocked(self, pairs: Sequence[tuple[Do, Do]], count: int) -> list[tuple[float, ...]]:
        samples, now = [], time.perf_counter
        for _ in range(count):
            row = []
            for prepare, part in pairs:
                prepare()
                start = now()
                part()
                row.append(now() - start)
            samples.append(tuple(row))
        return samples

    def _launching_cycles(self, pairs: Sequence[tuple[Do, Do]]) -> list[int]:
        """How many of its cycles a GPU has to wait before each part, until the host has launched it."""
        torch.cuda.synchronize(self.device)
        cycles = []
        for prepare, part in pairs:
            prepare()
            start = time.perf_counter()
            part()
            cycles.append(int(CYCLES_PER_S * (time.perf_counter() - start)))
        return cycles

    def _events(
        self, pairs: Sequence[tuple[Do, Do]], count: int, waits: Sequence[int] | None = None
    ) -> list[tuple[float, ...]]:
        torch.cuda.synchronize(self.device)
        samples: list[list[tuple[torch.cuda.Event, torch.cuda.Event]]] = []
        for _ in range(count):
            row = []
            for (prepare, part), cycles in zip(pairs, waits or repeat(0), strict=False):
                prepare()
                if cycles:
                    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
                start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
                start.record()
                part()
                end.record()
                row.append((start, end))
            samples.append(row)
        torch.cuda.synchronize(self.device)
        return [tuple(float(a.elapsed_time(b)) / 1e3 for a, b in row) for row in samples]


def averaged(samples: Sequence[tuple[float, ...]]) -> list[tuple[float, ...]]:
    """Means of each part over rounds of samples that take `ROUND_S` together; fewer at the end do not count.

    Where ranks share a core, or have a quota of it, a rank stands still for some milliseconds in some of the samples.
    Their median would not have that, but the sum of a step's layers does.
    """
    rounds, samples_now = list[tuple[float, ...]](), list[tuple[float, ...]]()
    for sample in samples:
        samples_now.append(sample)
        if sum(map(sum, samples_now)) >= ROUND_S:
            rounds.append(tuple(map(mean, zip(*samples_now, strict=True))))
            samples_now = []
    return rounds or [tuple(map(mean, zip(*samples, strict=True)))]


def stolen_s() -> float:
    """CPU seconds that the host of a virtual machine has kept from all its cores since it started; 0 where the kernel
    does not tell.
    """
    try:
        fields = STAT.read_text(encoding="ascii").split("\n", 1)[0].split()
    except OSError:
        return 0.0
    return int(fields[8]) / os.sysconf("SC_CLK_TCK") if len(fields) > 8 else 0.0


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of one operation: the median of the rounds, and their spread, (largest - smallest) / median."""

    seconds: float
    spread: float


def timed(comm: Comm, operation: Do | None, rounds: int = ROUNDS, budget_s: float = inf) -> Time:
    """The time that an operation takes the slowest rank. Every rank calls this; None: it takes no part.

    budget_s: no further round begins once this is over, the ranks' talk included; one is always taken.
    """
    began, spent_s = time.monotonic(), 0.0
    for _ in range(2):  # the first one connects and allocates
        _, first, spent_s = _slowest(comm, operation, 1, began)
    times = max(1, min(MOST, round(min(ROUND_S, budget_s / (rounds + 2)) / max(first, 1e-9))))
    bearable_s = STOLEN * (os.cpu_count() or 1) * times * first
    rounds_taken: list[tuple[float, float]] = []  # seconds stolen, and of the operation
    while len(rounds_taken) < TRIES * rounds and sum(stolen <= bearable_s for stolen, _ in rounds_taken) < rounds:
        if rounds_taken and spent_s > budget_s:
            break
        stolen, each, spent_s = _slowest(comm, operation, times, began)
        rounds_taken.append((stolen, each))
    least = sorted(rounds_taken, key=lambda taken: taken[0])[:rounds]  # of those that are alike the earlier ones
    seconds = [each for _, each in least]
    middle = median(seconds)
    return Time(middle, (max(seconds) - min(seconds)) / middle if middle else 0.0)


def _slowest(comm: Comm, operation: Do | None, times: int, began: float) -> tuple[float, float, float]:
    """Seconds that were stolen meanwhile from the rank that lost most, seconds that the slowest rank took, and the
    seconds since `began`.
    """
    before = stolen_s()
    comm.barrier()
    start = now_s(comm.device)
    if operation is not None:
        for _ in range(times):
            operation()
    local_s = (now_s(comm.device) - start) / times if operation is not None else 0.0
    everyone = comm.all_gather_object([stolen_s() - before, local_s, time.monotonic() - began])
    stolen, seconds, spent = (max(column) for column in zip(*everyone, strict=True))
    return stolen, seconds, spent
