"""Watch: a thread of every rank that says that it lives, and finds out which rank is at fault when something fails.

All ranks repeat the verdict of the first one that knows (board.py), and whoever serves the store ends last. So a
cascade (rank 1 dies, rank 2 fails of it and ends, rank 0 sees rank 2 go) ends with every rank naming rank 1.

The guard is a second thread, which never touches the network, and ends the process where the main thread is inside
torch for too long. SIGTERM reaches it through a pipe, as Python's own handlers wait for the main thread.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final, NoReturn

from layerwise.comm.base import CommError
from layerwise.comm.board import HEAR_S, STOPPED, Board, Sign, gone_text, stopped_text, stuck_text
from layerwise.errors import shortened

BEAT_S: Final = 1.0  # between two signs of life
SILENT_S: Final = 3.0  # a rank that gives no sign for so long is gone
FIRST: Final = 3  # steps that are said at once: where a run fails, it most often does here
ANSWER_S: Final = SILENT_S + HEAR_S + 3 * BEAT_S  # the longest that it takes to find out


@dataclass(eq=False, slots=True)
class _Question:
    """A question of the main thread to the watch.

    Without a claim: to find out what failed; where all ranks are alive, who was stopped or what keeps them.
    """

    claim: tuple[str, list[int]] | None = None  # what has failed, and the ranks that are gone with it
    reason: str = ""  # torch's, for the failure
    beat: bool = False  # only to give a sign
    gone_only: bool = False  # only whether ranks are gone
    last: bool = False  # to stop
    answered: threading.Event = field(default_factory=threading.Event)


class Watch:
    """One rank's watch: a thread that alone talks to the board, which blocks where the network is cut.

    waits_for: the communication that the rank is in, else ""; it should have ended at `due_s` (by time.monotonic).
    reported: the main thread knows what failed, and is about to end. stopped: this process was sent SIGTERM.
    spared: that does not end it, while all ranks are there: the main thread saves, and ends by itself.
    joint: how many operations of all ranks this one has started.

    It stops before the interpreter does: a thread that comes back from torch's C++ after that is ended by CPython
    (to 3.13) in a destructor, and C++ then aborts the process ("terminate called without an active exception").
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.waits_for, self.due_s = "", 0.0
        self.reported = self.stopped = self.spared = self._ended = False
        self.joint = 0
        self.overdue: Callable[[], str] = str  # names a communication that is overdue although nobody waits in it
        self._board = board
        self._step: int | None = None
        self._layer, self._since_s, self._count = "", time.monotonic(), 0
        self._questions: SimpleQueue[_Question] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="layerwise watch", daemon=True)
        self._thread.start()
        atexit.register(self.stop)

    def at(self, step: int, layer: str) -> None:
        """Notes what this rank computes."""
        first = step != self._step and step <= FIRST
        self._step, self._layer, self._since_s = step, layer, time.monotonic()
        if first:
            self._questions.put(_Question(beat=True))

    def enter(self, what: str, limit_s: float) -> None:
        """Notes a communication, and how long it should take at most. CommError where the run has already failed."""
        self.check()
        self._since_s = time.monotonic()
        self.due_s = self._since_s + limit_s
        self.waits_for = what

    def leave(self) -> None:
        """Notes that it has ended, or goes on in the background."""
        self.waits_for, self._since_s = "", time.monotonic()

    def check(self) -> None:
        """Raises CommError where the run has failed; but first the others hear of it: the store may end here."""
        if self._board.verdict is not None:
            raise self.error(self.find("the run has failed"))

    def error(self, text: str) -> CommError:
        """Returns an error for the main thread to raise."""
        self.reported = True
        return CommError(text)

    @property
    def verdict(self) -> str | None:
        """Returns the sentence that says what failed; None until that is known."""
        return self._board.verdict

    @property
    def heard_s(self) -> float:
        """Returns the time at which that became known, by time.monotonic."""
        return self._board.heard_s

    @property
    def me(self) -> str:
        """Returns `rank 2 of 4`."""
        return f"rank {self._board.rank} of {self._board.members}"

    @property
    def where(self) -> str:
        """Returns `at step 17 in layer conv3`."""
        return self._sign().where

    def find(self, reason: str) -> str:
        """Finds out who is at fault for a communication that failed for this `reason`. Takes up to `ANSWER_S`."""
        return self._ask(_Question(reason=reason)) or self._board.silent_text(reason)

    def look(self) -> None:
        """Finds out whether ranks are gone, which is then the verdict. Does not wait for it."""
        self._questions.put(_Question(gone_only=True))

    def accuse(self, claim: str, gone: Sequence[int] = ()) -> str:
        """Tells all ranks but those that are gone what has failed. Returns what they believe: the first claim."""
        return self._ask(_Question((claim, list(gone)))) or claim

    @property
    def alive(self) -> bool:
        """True until it is told to stop."""
        return self._thread.is_alive()

    def end(self) -> None:
        """Says that this rank's run is over."""
        self._ended = True
        self._questions.put(_Question(beat=True))

    def stop(self) -> None:
        """Says so, and gives no more signs of life. Nothing where it has stopped."""
        atexit.unregister(self.stop)
        self._ended = True
        self._questions.put(_Question(last=True))
        self._thread.join(ANSWER_S)

    def _ask(self, question: _Question) -> str | None:
        self._questions.put(question)
        question.answered.wait(ANSWER_S)
        return self._board.verdict

    def _run(self) -> None:
        while True:
            self._board.beat(self._sign())
            if self._waits_in_vain():
                self._settle(_Question(reason="another rank has ended"))
            try:
                question = self._questions.get(timeout=BEAT_S)
            except Empty:
                continue
            if question.last:
                return self._board.beat(self._sign())
            if not question.beat:
                self._settle(question)
                question.answered.set()

    def _waits_in_vain(self) -> bool:
        """True if this rank waits for one that has ended, and will not come."""
        waits = self.waits_for and not self._ended and time.monotonic() - self._since_s > BEAT_S / 2
        last = self._board.ended() if waits and self.verdict is None else None
        return last is not None and last.joint < self.joint

    def _settle(self, question: _Question) -> None:
        """Makes the verdict known, unless another rank was first."""
        if self._board.verdict is None:
            text, gone = question.claim or self._search()
            if text is None and question.gone_only:
                return
            if text is None:
                signs, members = self._stopped_signs(), self._board.members
                text = stopped_text(signs, members) or stuck_text(signs, members, self.timeout_s, question.reason)
            self._board.publish(text, gone)
        self._board.linger()

    def _search(self) -> tuple[str | None, list[int]]:
        """Says which ranks are gone, and names them. None: all are alive, or there is a verdict."""
        others = [rank for rank in self._board.members.ranks if rank != self._board.rank]
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
                return gone_text(silent, signs, self._board.members, time.time(), self._board.rank), silent
            time.sleep(BEAT_S / 5)

    def _stopped_signs(self) -> dict[int, Sign]:
        """Returns all signs. Where some were sent SIGTERM, the others may be about to be: whoever stops a run takes a
        moment to reach all of it.
        """
        until = time.monotonic() + BEAT_S
        while True:
            self._board.beat(self._sign())
            signs = self._board.signs() | {self._board.rank: self._sign()}
            stopped = [sign.stopped for sign in signs.values()]
            if not any(stopped) or all(stopped) or self._board.verdict or time.monotonic() > until:
                return signs
            time.sleep(BEAT_S / 10)

    def _sign(self) -> Sign:
        self._count += 1
        since = time.monotonic() - self._since_s
        waits_for = self.waits_for or self.overdue()
        who = self._count, time.time(), self._step, self._layer
        return Sign(*who, waits_for, since, self._ended, self.joint, self.stopped)


TICK_S: Final = 1.0
GRACE_S: Final = 3.0  # for the main thread to end by itself
TWICE_S: Final = 2.0  # a SIGTERM that comes later is a second one: before, one that two have sent on


def noted(*_: object) -> None:
    """The handler of a signal that nothing is to be done about here: of SIGTERM, where there is a Guard."""


class Guard:
    """Ends this process when it is told to (SIGTERM), when a communication is overdue, and when another rank has failed
    and the main thread does not come to hear of it. `start` it in the main thread.
    """

    def __init__(self, watch: Watch) -> None:
        self._watch = watch
        self._read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._has_signal = False
        self._stopped_s = 0.0

    def start(self) -> None:
        """Starts the thread, and takes over SIGTERM where that has no handler yet."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, noted)
            signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
            self._has_signal = True
            # The SIGTERM of a process forked from this one, a data loader's worker, does not concern this one.
            os.register_at_fork(before=self._hold, after_in_parent=self._let_go, after_in_child=self._forget)
        threading.Thread(target=self._run, name="layerwise guard", daemon=True).start()

    def _hold(self) -> None:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    def _let_go(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _forget(self) -> None:
        if self._has_signal:
            self._has_signal = False
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
        self._let_go()

    def _run(self) -> None:
        while True:
            ready, _, _ = select.select([self._read], [], [], TICK_S)
            if ready and signal.SIGTERM in os.read(self._read, 64):
                self._terminated()
            elif not self._watch.reported:
                self._look()

    def _terminated(self) -> None:
        """Ends after a SIGTERM, which comes most often because another rank has died, and torchrun ends the others."""
        watch = self._watch
        twice = watch.stopped and time.monotonic() - self._stopped_s > TWICE_S
        theirs = not watch.spared and signal.getsignal(signal.SIGTERM) is not noted  # set after `start`
        if (not watch.alive or twice) and not theirs:  # no other rank is to be told
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
