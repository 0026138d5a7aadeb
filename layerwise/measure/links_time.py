"""Timing of operations that several ranks do together: warm, repeated, the slowest rank's, the median of rounds.

Rounds during which a machine's host took CPU time from it are repeated, and those with the least of it count: a choice
that does not look at the result.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from layerwise.comm.base import Comm
from layerwise.measure.stolen import stolen_s

ROUNDS = 5
ROUND_S = 0.03  # short operations are repeated until a round takes about that
MOST = 50  # repetitions a round
STOLEN = 0.04  # of a core: a round with more is repeated
TRIES = 3  # times as many rounds at most


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of one operation: the median of the rounds, and their spread, (largest - smallest) / median."""

    seconds: float
    spread: float


def timed(comm: Comm, operation: Callable[[], None] | None, rounds: int = ROUNDS) -> Time:
    """How long an operation takes the slowest rank. Every rank calls this; None: it takes no part."""
    for _ in range(2):  # the first one connects and allocates
        _, first = _slowest(comm, operation, 1)
    times = max(1, min(MOST, round(ROUND_S / max(first, 1e-9))))
    found: list[tuple[float, float]] = []  # stolen, seconds
    while len(found) < TRIES * rounds and sum(stolen < STOLEN for stolen, _ in found) < rounds:
        found.append(_slowest(comm, operation, times))
    undisturbed = sorted(found, key=lambda one: one[0])[:rounds]  # and the earlier ones of those that are alike
    seconds = [each for _, each in undisturbed]
    middle = median(seconds)
    return Time(middle, (max(seconds) - min(seconds)) / middle if middle else 0.0)


def _slowest(comm: Comm, operation: Callable[[], None] | None, times: int) -> tuple[float, float]:
    """The part of a core that the most disturbed rank's host took meanwhile, and seconds of the slowest rank."""
    comm.barrier()
    before, start = stolen_s(), _now(comm)
    if operation is not None:
        for _ in range(times):
            operation()
    took = _now(comm) - start
    stolen = (stolen_s() - before) / took
    told = [json.loads(text) for text in comm.tell_all(json.dumps([stolen, took / times if operation else 0.0]))]
    return max(share for share, _ in told), max(seconds for _, seconds in told)


def _now(comm: Comm) -> float:
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    return time.perf_counter()
