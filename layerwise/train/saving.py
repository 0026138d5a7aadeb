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

from layerwise.checkpoint import Writing
from layerwise.comm.base import Comm

LOOK_S = 1.0  # ranks ask each other at least so often whether a checkpoint is written
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
        begin: Begins to save, after so many steps; None: there is nothing to save.
        every: Steps from one checkpoint to the next; "auto": `interval_s` of what saving takes; None: none.
        mtbf_s: Mean seconds between failures of the job, for "auto".
        step_s: Seconds of a step, the same on all ranks; None: not known yet.
        asked: Whether SIGUSR1 has asked this rank for a checkpoint, which all are then told at their next gathering.
    """

    comm: Comm
    begin: Callable[[int], Writing | None]
    every: Every
    mtbf_s: float
    step_s: float | None = None
    asked: bool = False
    _next: int = 0
    _writing: Writing | None = None
    _begun: int = 0  # after how many steps
    _look: int = 0  # after so many steps the ranks ask each other whether it is written

    def after(self, done: int) -> None:
        """Saves after this step, where it is time; completes what has been written meanwhile."""
        if self._writing is not None and done >= self._look:
            if all(self.comm.all_gather_object(self._writing.written())):
                self.finish()
            soon = done if self.step_s is None else max(1, int(LOOK_S / self.step_s))
            self._look = done + min(done - self._begun, soon)
        if self.every == "auto":
            if self.step_s is None or done < self._next:
                return
            began = time.perf_counter()
            self.save(done)
            cost_s = max(self.comm.all_gather_object(time.perf_counter() - began))
            self._next = done + max(1, round(interval_s(cost_s, self.mtbf_s) / self.step_s))
        elif self.every and done % self.every == 0:
            self.save(done)

    def save(self, done: int) -> None:
        """Begins to save, once what is being written is complete."""
        self.finish()
        self._writing, self._begun, self._look = self.begin(done), done, done + 1

    def finish(self) -> None:
        """Completes what is being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

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
