"""DataLoader workers that a signal to all processes of a job does not end: their rank is about to save."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A DataLoader's worker_init_fn, which then calls the user's. The rank makes it.

    SIGUSR1 and SIGTERM do nothing in the worker, unless its rank sends the latter: multiprocessing does so where a
    worker is to end, and waits for it. (Where the rank itself is gone, torch's worker ends.) Processes that the worker
    starts ignore SIGTERM likewise, and end by SIGKILL.
    """

    then: Callable[[int], None] | None = None
    rank: int = field(default_factory=os.getpid)

    def __call__(self, worker: int) -> None:
        """Called in the worker, once torch's handlers, which would end it, are set."""
        if hasattr(signal, "sigwaitinfo"):  # macOS has none
            signal.signal(signal.SIGUSR1, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_obey, args=(self.rank,), name="layerwise worker signals", daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _obey(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)  # as torch's handler
