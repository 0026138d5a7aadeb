"""Watch: a thread of every rank that says that it lives, and finds out which rank is at fault when something fails.

All ranks repeat the verdict of the first one that knows (board.py), and whoever serves the store ends last. So a
cascade (rank 1 dies, rank 2 fails of it and ends, rank 0 sees rank 2 go) ends with rank 1 on every rank's lips.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Final, NoReturn

from layerwise.comm.base import CommError, ranks
from layerwise.comm.board import HEAR_S, Board
from layerwise.comm.signs import Sign, gone_text, stuck_text

BEAT_S: Final = 1.0  # between two signs of life
SILENT_S: Final = 3.0  # a rank that gives no sign for so long is gone
GRACE_S: Final = 3.0  # for the main thread to end by itself
SLACK_S: Final = 10.0  # beyond the time-out, before the watch takes over from a communication that should have failed

ASK: Final = 0xFF  # what is written into the pipe that wakes the thread, beside the numbers of signals
STOP: Final = 0xFE


class Watch:
    """One rank's watch: a thread that alone talks to the board.

    guards: it may end the process, when this is told to end (SIGTERM), or stays in a communication beyond the
    time-out, or goes on long after another rank has failed.
    """

    def __init__(self, board: Board, timeout_s: float, *, guards: bool) -> None:
        self.timeout_s = timeout_s
        self.overdue: Callable[[], str] = str  # names a communication that is overdue although nobody waits in it
        self._board, self._guards = board, guards
        self._step: int | None = None
        self._layer, self._waits_for, self._since, self._count = "", "", time.monotonic(), 0
        self._claim: tuple[str, list[int]] | None = None
        self._reason = ""
        self._asked = self._told = False  # the main thread wants an answer; it knows what failed
        self._answer = threading.Event()
        self._has_signal = False
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._thread = threading.Thread(target=self._run, name="layerwise watch", daemon=True)

    # What the main thread calls.

    def start(self) -> None:
        """From here on this rank gives signs of life. SIGTERM is taken over where nobody else has."""
        main = threading.current_thread() is threading.main_thread()
        if self._guards and main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            # The main thread may be inside torch for long, where Python's handlers do not run: hence the pipe.
            signal.signal(signal.SIGTERM, lambda *_: None)
            signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._has_signal = True
            os.register_at_fork(after_in_child=self._release_signal)  # a worker's SIGTERM is none of ours
        self._board.beat(self._sign())
        self._thread.start()

    def stop(self) -> None:
        """No more signs of life; the last one says that this rank's run is over."""
        self._poke(STOP)
        self._thread.join(BEAT_S)
        self._release_signal()

    def at(self, step: int, layer: str) -> None:
        """What this rank computes."""
        self._step, self._layer, self._since = step, layer, time.monotonic()

    def enter(self, what: str) -> None:
        """A communication begins. Raises CommError where the run has already failed."""
        if self._board.verdict is not None:
            self._told = True
            raise CommError(self._board.verdict)
        self._waits_for, self._since = what, time.monotonic()

    def leave(self) -> None:
        """It has ended, or goes on in the background."""
        self._waits_for, self._since = "", time.monotonic()

    def progress(self) -> None:
        """Part of it is done: its time begins anew."""
        self._since = time.monotonic()

    @property
    def verdict(self) -> str | None:
        """What failed, once that is known."""
        return self._board.verdict

    @property
    def where(self) -> str:
        """`at step 17 in layer conv3`."""
        return self._sign().where

    def find(self, reason: str) -> str:
        """Who is at fault for a communication that failed for this `reason`. Takes up to 8 s."""
        self._reason = reason
        return self._ask(None) or self._board.silent_text(reason)

    def accuse(self, claim: str, gone: Sequence[int] = ()) -> str:
        """Tells all ranks but those that are gone what has failed. Returns what they believe: the first claim."""
        return self._ask((claim, list(gone))) or claim

    def _ask(self, claim: tuple[str, list[int]] | None) -> str | None:
        self._claim, self._asked = claim, True
        self._poke(ASK)
        if self._thread.is_alive():
            self._answer.wait(SILENT_S + HEAR_S + 2 * BEAT_S)
        self._told = True
        return self._board.verdict

    def _poke(self, what: int) -> None:
        with contextlib.suppress(OSError):  # a full pipe wakes the thread anyway
            os.write(self._write, bytes([what]))

    def _release_signal(self) -> None:
        if self._has_signal and threading.current_thread() is threading.main_thread():
            self._has_signal = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    # The thread.

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], BEAT_S)
            poked = os.read(self._read, 64) if ready else b""
            self._board.beat(self._sign(ended=STOP in poked))
            if STOP in poked:
                return
            if signal.SIGTERM in poked:
                self._terminated()
            elif ASK in poked:
                self._settle(self._claim)
            elif self._guards and not self._told:
                self._guard()

    def _guard(self) -> None:
        """Ends a process whose main thread does not come back."""
        now, verdict = time.monotonic(), self._board.verdict
        if verdict is not None and now - self._board.heard_s > GRACE_S:
            self._die(verdict, 2)
        late = now - self._since > self.timeout_s + SLACK_S
        what = self._waits_for if self._waits_for and late else self.overdue()
        if what:
            self._reason = f"{what!r} is overdue"
            self._settle(None)
            self._die(f"{self._board.verdict}; this rank was in {what!r}", 2)

    def _terminated(self) -> None:
        """SIGTERM: most often because another rank has died, and torchrun ends the others."""
        where, code = self._sign().where, 2
        if not self._told:
            claim, gone = self._search()
            if claim is None and self._board.verdict is None:
                claim = f"{ranks([self._board.rank], self._board.size)} was stopped from outside (SIGTERM) {where}"
                code = 128 + signal.SIGTERM
            self._board.publish(claim or "", gone)
            self._board.linger()
        self._die(self._board.verdict or "", code)

    def _settle(self, claim: tuple[str, list[int]] | None) -> None:
        """Makes the verdict known: `claim`, or what is found out, unless another rank was first."""
        text, gone = claim or self._search()
        if text is None:
            signs = self._board.signs() | {self._board.rank: self._sign()}
            text = stuck_text(signs, self._board.size, self.timeout_s, self._reason)
        self._board.publish(text, gone)
        self._board.linger()
        self._answer.set()

    def _search(self) -> tuple[str | None, list[int]]:
        """Says which ranks are gone, and names them. None: all are alive, or there is a verdict."""
        others = [rank for rank in range(self._board.size) if rank != self._board.rank]
        first: dict[int, int] = {}
        began = time.monotonic()
        while True:
            self._board.beat(self._sign())
            if self._board.verdict is not None:
                return None, []
            signs = self._board.signs()
            if self._board.lost:
                return self._board.lost_text(), others
            moved = {r for r, sign in signs.items() if sign.ended or first.setdefault(r, sign.count) != sign.count}
            silent = [rank for rank in others if rank not in moved]
            if not silent:
                return None, []
            if time.monotonic() - began > SILENT_S:
                return gone_text(silent, signs, self._board.size, time.time()), silent
            time.sleep(BEAT_S / 5)

    def _sign(self, *, ended: bool = False) -> Sign:
        self._count += 1
        since = time.monotonic() - self._since
        return Sign(self._count, time.time(), self._step, self._layer, self._waits_for, since, ended)

    def _die(self, text: str, code: int) -> NoReturn:
        """Ends the process, with the words that its main thread would have had."""
        if self._asked or self._told:  # it is about to end by itself
            self._answer.set()
            time.sleep(GRACE_S)
        if not self._told:
            with contextlib.suppress(OSError, ValueError):
                sys.stdout.flush()
            os.write(2, f"layerwise: error: {' '.join(text.split())}\n".encode(errors="backslashreplace"))
        os._exit(code)
