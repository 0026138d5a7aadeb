"""Watch: a thread of every rank that says that it lives, and finds out which rank is at fault when something fails.

All ranks repeat the verdict of the first one that knows (board.py), and whoever serves the store ends last. So a
cascade (rank 1 dies, rank 2 fails of it and ends, rank 0 sees rank 2 go) ends with every rank naming rank 1.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from queue import Empty, SimpleQueue
from typing import Final

from layerwise.comm.base import CommError
from layerwise.comm.board import HEAR_S, Board, Sign, gone_text, stopped_text, stuck_text

BEAT_S: Final = 1.0  # between two signs of life
SILENT_S: Final = 3.0  # a rank that gives no sign for so long is gone
FIRST: Final = 3  # steps that are said at once: where a run fails, it most often does here
ANSWER_S: Final = SILENT_S + HEAR_S + 3 * BEAT_S  # the longest that it takes to find out


@dataclass(eq=False, slots=True)
class _Question:
    """What the main thread asks the watch.

    Without a claim: to find out what failed; where all ranks are alive, who was stopped or what keeps them.
    """

    claim: tuple[str, list[int]] | None = None  # what has failed, and the ranks that are gone with it
    reason: str = ""  # torch's, for the failure
    beat: bool = False  # only to give a sign
    last: bool = False  # to stop
    answered: threading.Event = field(default_factory=threading.Event)


class Watch:
    """One rank's watch: a thread that alone talks to the board, which blocks where the network is cut.

    waits_for: the communication that the rank is in, else ""; it should have ended at `due_s` (by time.monotonic).
    reported: the main thread knows what failed, and is about to end. stopped: this process was sent SIGTERM.
    joint: how many operations of all ranks this one has started.

    It stops before the interpreter does: a thread that comes back from torch's C++ after that is ended by CPython
    (to 3.13) in a destructor, and C++ then aborts the process ("terminate called without an active exception").
    """

    def __init__(self, board: Board, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self.waits_for, self.due_s = "", 0.0
        self.reported = self.stopped = self._ended = False
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
        """What this rank computes."""
        first = step != self._step and step <= FIRST
        self._step, self._layer, self._since_s = step, layer, time.monotonic()
        if first:
            self._questions.put(_Question(beat=True))

    def enter(self, what: str, limit_s: float) -> None:
        """A communication begins, which should not take longer. CommError where the run has already failed."""
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
        """What failed, once that is known."""
        return self._board.verdict

    @property
    def heard_s(self) -> float:
        """The time at which that became known, by time.monotonic."""
        return self._board.heard_s

    @property
    def me(self) -> str:
        """`rank 2 of 4`."""
        return f"rank {self._board.rank} of {self._board.members}"

    @property
    def where(self) -> str:
        """`at step 17 in layer conv3`."""
        return self._sign().where

    def find(self, reason: str) -> str:
        """Who is at fault for a communication that failed for this `reason`. Takes up to `ANSWER_S`."""
        return self._ask(_Question(reason=reason)) or self._board.silent_text(reason)

    def accuse(self, claim: str, gone: Sequence[int] = ()) -> str:
        """Tells all ranks but those that are gone what has failed. Returns what they believe: the first claim."""
        return self._ask(_Question((claim, list(gone)))) or claim

    @property
    def alive(self) -> bool:
        """Until it is told to stop."""
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
        """Whether this rank waits for one that has ended, and will not come."""
        waits = self.waits_for and not self._ended and time.monotonic() - self._since_s > BEAT_S / 2
        last = self._board.ended() if waits and self.verdict is None else None
        return last is not None and last.joint < self.joint

    def _settle(self, question: _Question) -> None:
        """Makes the verdict known, unless another rank was first."""
        if self._board.verdict is None:
            text, gone = question.claim or self._search()
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
        """Everybody's signs. Where some were sent SIGTERM, the others may be about to be: whoever stops a run takes a
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
