"""Timing of operations that several ranks do together: warm, repeated, the slowest rank's, the median of rounds."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

import torch

from layerwise.comm.base import Comm

ROUNDS = 5
ROUND_S = 0.03  # short operations are repeated until a round takes about that
MOST = 50  # repetitions a round


@dataclass(frozen=True, slots=True)
class Time:
    """Seconds of one operation: the median of the rounds, and their spread, (largest - smallest) / median."""

    seconds: float
    spread: float


def timed(comm: Comm, operation: Callable[[], None] | None, rounds: int = ROUNDS) -> Time:
    """How long an operation takes the slowest rank. Every rank calls this; None: it takes no part."""
    for _ in range(2):  # the first one connects and allocates
        first = _slowest(comm, operation, 1)
    times = max(1, min(MOST, round(ROUND_S / max(first, 1e-9))))
    found = [_slowest(comm, operation, times) for _ in range(rounds)]
    middle = median(found)
    return Time(middle, (max(found) - min(found)) / middle if middle else 0.0)


def _slowest(comm: Comm, operation: Callable[[], None] | None, times: int) -> float:
    comm.barrier()
    start = _now(comm)
    if operation is not None:
        for _ in range(times):
            operation()
    mine = (_now(comm) - start) / times if operation is not None else 0.0
    return max(float(text) for text in comm.tell_all(repr(mine)))


def _now(comm: Comm) -> float:
    if comm.device.type == "cuda":
        torch.cuda.synchronize(comm.device)
    return time.perf_counter()
