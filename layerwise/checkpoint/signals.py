"""SaveSignals: lets all ranks learn in the same step that SIGUSR1 or SIGTERM has arrived.

WorkerStart: protects DataLoader workers from these signals, which a job manager may send to all processes, as their
rank is about to save.
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

STOPPED: Final = 75  # exit status of a training that saved and stopped after SIGTERM: EX_TEMPFAIL, "try again"


@contextmanager
def handled(handler: Callable[[int, object], object], *numbers: signal.Signals) -> Iterator[Collection[int]]:
    """Returns a context in which these signals have this handler, unless the user's program has its own.

    Yields the signals that got it. Main thread only.
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
    """Receives SIGUSR1, which asks to save, and SIGTERM, which asks to save and exit with `STOPPED`.


        with SaveSignals(comm).taken() as signals:
            for batch in batches:
                ...
                if number := signals.received():
                    layerwise.checkpoint.save(folder, module, optimizer, progress)
                    if number == signal.SIGTERM:
                        sys.exit(layerwise.checkpoint.STOPPED)

    A second SIGTERM, `TWICE_S` or more after the first, ends the process at once, as one signal may arrive twice.

    Args:
        comm: The ranks, `module.comm`.
    """

    def __init__(self, comm: Comm) -> None:
        self._comm = comm
        self._numbers: list[int] = []  # that have arrived since `received`
        self._stopped_s: float | None = None

    @contextmanager
    def taken(self, *, stop: bool = True) -> Iterator[SaveSignals]:
        """Returns a context in which the signals do not end the process. stop: handle SIGTERM too."""
        process = os.getpid()

        def note(number: int, _: object) -> None:
            if os.getpid() == process:
                self._note(number)
            elif number == signal.SIGTERM:  # a forked process, such as a data loader's worker, which the signal ends
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
        """Returns the signal that any rank got since the last call, SIGTERM first, or None. Every rank must call it."""
        new = list(self._numbers)
        del self._numbers[: len(new)]  # not those that have arrived meanwhile
        everyone: list[list[int]] = self._comm.all_gather_object(new)
        # SIGTERM is the greater number
        return max((number for numbers in everyone for number in numbers), default=None)


@dataclass(frozen=True, slots=True)
class WorkerStart:
    """A DataLoader's worker_init_fn, created on the rank, which also calls the user's.

    In the worker SIGUSR1 and SIGTERM do nothing, unless its own rank sends SIGTERM: multiprocessing does so to end a
    worker, and waits for it. (If the rank itself is gone, torch ends the worker.) Processes that the worker starts also
    ignore SIGTERM, and end by SIGKILL.
    """

    then: Callable[[int], None] | None = None
    rank: int = field(default_factory=os.getpid)

    def __call__(self, worker: int) -> None:
        """Sets the worker's signal handling, after torch has set its handlers, which would end it."""
        if hasattr(signal, "sigwaitinfo"):  # macOS has none
            signal.signal(signal.SIGUSR1, lambda *_: None)
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            threading.Thread(target=_obey, args=(self.rank,), name="layerwise worker signals", daemon=True).start()
        if self.then is not None:
            self.then(worker)


def _obey(rank: int) -> None:
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != rank:
        pass
    os._exit(0)  # like torch's handler
