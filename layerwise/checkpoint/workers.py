"""DataLoader workers that a signal to all processes of a job does not end: their rank is about to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A DataLoader's worker_init_fn, which then calls the user's.

    SIGUSR1 and SIGTERM do nothing in the worker, unless its rank sends the latter: multiprocessing does so where a
    worker is to end, and waits for it. (Where the rank itself is gone, torch's worker ends.)
    """

    then: Callable[[int], None] | None = None

    def __call__(self, worker: int) -> None:
        """Called in the worker, once torch's handlers, which would end it, are set."""
        if hasattr(signal, "sigwaitinfo"):  # macOS has none
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGUSR1})
            threading.Thread(target=_obey, args=(os.getppid(),), name="layerwise worker signals", daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _obey(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)  # as torch's handler
