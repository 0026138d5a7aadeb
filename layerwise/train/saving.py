"""Decides when a run saves: every so many steps, and on request."""

from __future__ import annotations

import signal
from collections.abc import Callable
from dataclasses import dataclass, field

from layerwise.checkpoint import SaveSignals
from layerwise.comm.base import Comm


@dataclass
class Saving:
    """Decides after which steps a run's state is saved, the same on all ranks.

    Attributes:
        comm: The ranks.
        save: Saves the state after so many steps.
        every: Steps between checkpoints; None: never.
        signals: Signals that ask for a checkpoint.
        stopped: Whether SIGTERM has arrived, so that the training ends.
    """

    comm: Comm
    save: Callable[[int], None]
    every: int | None = None
    signals: SaveSignals = field(init=False)
    stopped: bool = False

    def __post_init__(self) -> None:
        self.signals = SaveSignals(self.comm)

    def after(self, done: int) -> None:
        """Saves after this step, if it is time."""
        if self.every and done % self.every == 0:
            self.save(done)

    def asked(self, done: int) -> bool:
        """Saves if a signal has asked for it. True: the training ends."""
        number = self.signals.received()
        if number is not None:
            self.save(done)
        self.stopped = self.stopped or number == signal.SIGTERM
        return self.stopped
