"""Timing of operations that several ranks do together: warm, repeated, the slowest rank's, the median of rounds.

Rounds during which a machine's host took CPU time from it are repeated, and those with the least of it count, however
long they took.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from layerwise.comm.base import Comm
from layerwise.measure.stolen import stolen_s
from layerwise.run.trace import now_s

ROUNDS = 5
ROUND_S = 0.03  # short operations are repeated until a round takes about that
MOST = 50  # repetitions a round
STOLEN = 0.02  # of all cores' time: a round with more is repeated
TRIES = 3  # times as many rounds at most
Do = Callable[[], None]


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of one operation: the median of the rounds, and their spread, (largest - smallest) / median."""

    seconds: float
    spread: float


def timed(comm: Comm, operation: Do | None, rounds: int = ROUNDS) -> Time:
    """How long an operation takes the slowest rank. Every rank calls this; None: it takes no part."""
    for _ in range(2):  # the first one connects and allocates
        _, first = _slowest(comm, operation, 1)
    times = max(1, min(MOST, round(ROUND_S / max(first, 1e-9))))
    bearable_s = STOLEN * (os.cpu_count() or 1) * times * first
    rounds_taken: list[tuple[float, float]] = []  # seconds stolen, and of the operation
    while len(rounds_taken) < TRIES * rounds and sum(stolen <= bearable_s for stolen, _ in rounds_taken) < rounds:
        rounds_taken.append(_slowest(comm, operation, times))
    least = sorted(rounds_taken, key=lambda one: one[0])[:rounds]  # of those that are alike the earlier ones
    seconds = [each for _, each in least]
    middle = median(seconds)
    return Time(middle, (max(seconds) - min(seconds)) / middle if middle else 0.0)


def _slowest(comm: Comm, operation: Do | None, times: int) -> tuple[float, float]:
    """Seconds that were stolen meanwhile from the rank that lost most, and seconds that the slowest rank took."""
    before = stolen_s()
    comm.barrier()
    start = now_s(comm.device)
    if operation is not None:
        for _ in range(times):
            operation()
    mine = (now_s(comm.device) - start) / times if operation is not None else 0.0
    everyone = comm.all_gather_object([stolen_s() - before, mine])
    return max(stolen for stolen, _ in everyone), max(seconds for _, seconds in everyone)
