"""SaveSignals: what SIGUSR1 and SIGTERM ask of a training, which all ranks learn at one step.

WorkerStart: they end no DataLoader's worker, as a signal to all processes of a job would: its rank is about to save.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Final

from layerwise.comm.base import Comm
from layerwise.comm.guard import TWICE_S, noted

STOPPED: Final = 75  # exit status of a training that SIGTERM has ended, once it is saved: EX_TEMPFAIL, "try again"


@contextmanager
def handled(handler: Callable[[int, object], object], *numbers: signal.Signals) -> Iterator[Collection[int]]:
    """Returns a context in which signals have this handler, where the user's program has none (main thread only).

    Yields those of them that have it.
    """
    main = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in numbers if main}
    ours = {number: was for number, was in before.items() if was in (signal.SIG_DFL, noted)}
    for number in ours:
        signal.signal(number, handler)
    try:
        yield ours
    finally:
        for number, was in ours.items():
            signal.signal(number, was)


class SaveSignals:
    """SIGUSR1 asks to save, SIGTERM to save and to end: with `STOPPED`, as a job's manager gives time to.

        with SaveSignals(comm).taken() as signals:
            for batch in batches:
                ...
                if number := signals.received():
                    layerwise.checkpoint.save(folder, module, optimizer, progress)
                    if number == signal.SIGTERM:
                        sys.exit(layerwise.checkpoint.STOPPED)

    A second SIGTERM, `TWICE_S` or more after the first, ends the process at once: one may come by two ways.

    Args:
        comm: The ranks, `module.comm`.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._numbers: list[int] = []  # that have come since `received`
        self._stopped_s: float | None = None

    @contextmanager
    def taken(self, *, stop: bool = True) -> Iterator[SaveSignals]:
        """Returns a context in which the signals end nothing by themselves. stop: SIGTERM, too; else it is left."""
        process = os.getpid()

        def note(number: int, _: object) -> None:
            if os.getpid() == process:
                self._note(number)
            elif number == signal.SIGTERM:  # forked from this one, as a data loader's worker, which it ends
                signal.signal(number, signal.SIG_DFL)
                signal.raise_signal(number)

        with handled(note, signal.SIGUSR1, *((signal.SIGTERM,) if stop else ())) as ours:
            if signal.SIGTERM not in ours:
                yield self
                return
            self._comm.spare(True)
            try:
                yield self
            finally:
                self._comm.spare(False)

    def _note(self, number: int) -> None:
        if number == signal.SIGTERM:
            now = time.monotonic()
            self._stopped_s = self._stopped_s or now
            if now - self._stopped_s > TWICE_S:
                os._exit(128 + number)
        self._numbers.append(number)

    def received(self) -> int | None:
        """Returns the signal that any rank got since the last call, SIGTERM first; None: none. Every rank calls it."""
        new = list(self._numbers)
        del self._numbers[: len(new)]  # not those that have come meanwhile
        everyone: list[list[int]] = self._comm.all_gather_object(new)
        return max((number for numbers in everyone for number in numbers), default=None)  # SIGTERM is the greater


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
        """Sets the worker's own way with signals, once torch's handlers, which would end it, are set."""
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
