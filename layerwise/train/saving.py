"""Decides when a run saves: every so many steps, as often as failures justify, and on request."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from math import sqrt
from typing import Literal

from layerwise.checkpoint import SaveSignals, Writing
from layerwise.comm.base import Comm

LOOK_S = 1.0  # the longest between two checks by the ranks whether a checkpoint is written
DAY_S = 86_400.0
Every = int | Literal["auto"] | None


def interval_s(cost_s: float, mtbf_s: float) -> float:
    """Returns the time between two checkpoints that loses least: for saving, and for repeated work after failures.

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
    """Decides after which steps a run's state is saved, the same on all ranks.

    Attributes:
        comm: The ranks.
        begin: Begins to save, after so many steps; None: there is nothing to save.
        every: Steps between checkpoints; "auto": `interval_s` of the time that saving takes; None: never.
        mtbf_s: Mean seconds between failures of the job, for "auto".
        step_s: Seconds of a step, the same on all ranks; None: not known yet.
        signals: Signals that ask for a checkpoint.
        stopped: Whether SIGTERM has arrived, so that the training ends.
    """

    comm: Comm
    begin: Callable[[int], Writing | None]
    every: Every = None
    mtbf_s: float = DAY_S
    step_s: float | None = None
    signals: SaveSignals = field(init=False)
    stopped: bool = False
    _next: int = 0
    _writing: Writing | None = None
    _begun: int = 0  # the step after which saving began
    _look: int = 0  # the step after which ranks ask each other whether it is written

    def __post_init__(self) -> None:
        self.signals = SaveSignals(self.comm)

    def after(self, done: int) -> None:
        """Saves after this step, if it is time; completes what has been written meanwhile."""
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
        """Begins to save, once the checkpoint being written is complete."""
        self.finish()
        self._writing, self._begun, self._look = self.begin(done), done, done + 1

    def finish(self) -> None:
        """Completes the checkpoint being written."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.finish()

    def asked(self, done: int) -> bool:
        """Saves completely if a signal has asked for it, as its sender may end the job next. True:
        the training ends.
        """
        number = self.signals.received()
        if number is not None:
            self.save(done)
            self.finish()
        self.stopped = self.stopped or number == signal.SIGTERM
        return self.stopped
