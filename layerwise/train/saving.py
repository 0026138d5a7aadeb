"""When a run saves: every so many steps, as often as failures make it worth it, and when it is asked to."""

from __future__ import annotations

import contextlib
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from math import sqrt
from typing import Literal

from layerwise.comm.base import Comm

Every = int | Literal["auto"] | None


def interval_s(cost_s: float, mtbf_s: float) -> float:
    """The time between two checkpoints that loses least, of saving and of what is done again after a failure.

    Daly, A higher order estimate of the optimum checkpoint interval for restart dumps, FGCS 22 (2006), equation 37.

    Args:
        cost_s: Seconds that saving takes.
        mtbf_s: Mean seconds between failures of the job.

    Returns:
        Seconds of training between the end of one checkpoint and the beginning of the next.
    """
    if cost_s >= 2 * mtbf_s:
        return mtbf_s
    part = cost_s / (2 * mtbf_s)
    return sqrt(2 * cost_s * mtbf_s) * (1 + sqrt(part) / 3 + part / 9) - cost_s


@dataclass
class Saving:
    """The steps after which a run's state is saved, the same on all ranks.

    Attributes:
        comm: The ranks.
        save: Saves, after so many steps.
        every: Steps from one checkpoint to the next; "auto": `interval_s` of what saving takes; None: none.
        mtbf_s: Mean seconds between failures of the job, for "auto".
        step_s: Seconds of a step, the same on all ranks; None: not known yet.
        asked: Whether SIGUSR1 has asked this rank for a checkpoint, which all are then told at their next gathering.
    """

    comm: Comm
    save: Callable[[int], None]
    every: Every
    mtbf_s: float
    step_s: float | None = None
    asked: bool = False
    _next: int = 0

    def after(self, done: int) -> None:
        """Saves after this step, where it is time."""
        if self.every == "auto":
            if self.step_s is None or done < self._next:
                return
            began = time.perf_counter()
            self.save(done)
            cost_s = max(self.comm.all_gather_object(time.perf_counter() - began))
            self._next = done + max(1, round(interval_s(cost_s, self.mtbf_s) / self.step_s))
        elif self.every and done % self.every == 0:
            self.save(done)

    @contextlib.contextmanager
    def on_signal(self) -> Iterator[None]:
        """SIGUSR1 asks for a checkpoint within, which a job's manager sends before its time is over."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return

        def ask(*_: object) -> None:
            self.asked = True

        before = signal.signal(signal.SIGUSR1, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGUSR1, before)
