"""Guard: a thread that ends the process if the main thread is inside torch for too long.

It never touches the network. SIGTERM reaches it through a pipe, as Python's own handlers wait for the main thread.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from functools import partial
from typing import Final, NoReturn

from layerwise.comm.verdict import STOPPED
from layerwise.comm.watch import Watch
from layerwise.errors import shortened

TICK_S: Final = 1.0
GRACE_S: Final = 3.0  # for the main thread to end by itself
TWICE_S: Final = 2.0  # a later SIGTERM is a second one; an earlier one was forwarded twice


def noted(*_: object) -> None:
    """A signal handler that does nothing: for SIGTERM, if there is a Guard."""


class Guard:
    """The guard of a watch; start it in the main thread.

    It ends this process on SIGTERM, when a communication is overdue, and when another rank has failed and the main
    thread does not notice.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._has_signal = False
        self._stopped_s = 0.0

    def start(self) -> None:
        """Starts the thread, and handles SIGTERM unless it has a handler already."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, noted)
            signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._has_signal = True
            # A forked process's SIGTERM, such as a data loader's worker's, does not concern this one.
            hold, release = (
                partial(signal.pthread_sigmask, how, {signal.SIGTERM}) for how in (signal.SIG_BLOCK, signal.SIG_UNBLOCK)
            )
            os.register_at_fork(before=hold, after_in_parent=release, after_in_child=self._forget)
        threading.Thread(target=self._run, name="layerwise guard", daemon=True).start()

    def _forget(self) -> None:
        if self._has_signal:
            self._has_signal = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], TICK_S)
            if ready and signal.SIGTERM in os.read(self._read, 64):
                self._terminated()
            elif not self._watch.reported:
                self._look()

    def _terminated(self) -> None:
        """Ends after SIGTERM, which torchrun usually sends to the others because a rank has died."""
        watch = self._watch
        twice = watch.stopped and time.monotonic() - self._stopped_s > TWICE_S
        theirs = not watch.spared and signal.getsignal(signal.SIGTERM) is not noted  # set after `start`
        if (not watch.alive or twice) and not theirs:  # no other rank needs to be told
            os._exit(128 + signal.SIGTERM)
        if not watch.stopped:
            watch.stopped, self._stopped_s = True, time.monotonic()  # for the next sign of life
        if watch.spared or theirs:
            return watch.look()
        text = watch.verdict or watch.find("SIGTERM")
        self._end(text, 128 + signal.SIGTERM if STOPPED in text else 2)

    def _look(self) -> None:
        watch, now = self._watch, time.monotonic()
        if watch.verdict is not None and now - watch.heard_s > GRACE_S:
            self._end(watch.verdict, 2)
        what = watch.waits_for if watch.waits_for and now > watch.due_s else watch.overdue()
        if what:
            self._end(f"{watch.find('overdue')}; this rank was in {what}", 2)

    def _end(self, text: str, code: int) -> NoReturn:
        if self._watch.reported:  # the main thread is about to say the same
            time.sleep(GRACE_S)
        else:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os.write(2, f"layerwise: error: {shortened(' '.join(text.split()))}\n".encode(errors="backslashreplace"))
        os._exit(code)
