"""Watch: a thread on every rank that gives signs of life, and finds the rank at fault when something fails.

The rendezvous store contains

    alive/R   the sign of life of rank R
    verdict   what happened and to whom: the first rank that knows writes it, all others repeat it
    heard/R   rank R knows the verdict
    ended     how many joint operations the first rank to end its run had started

The process that serves the store ends last. So a cascade (rank 1 dies, rank 2 fails because of it and ends, rank 0
sees rank 2 go) ends with every rank naming rank 1.
"""

from __future__ import annotations

import atexit
import json
import threading
import time
from collections.abc import Callable
from concurrent.futures import wait
from typing import TYPE_CHECKING, Final, TypeVar

from layerwise.comm.base import CommError, Members, ranks, reason
from layerwise.comm.together import in_thread
from layerwise.comm.verdict import Sign, gone_text, stopped_text, stuck_text

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

BEAT_S: Final = 1.0  # between two signs of life
SILENT_S: Final = 3.0  # a rank that is silent for so long is gone
HEAR_S: Final = 3.0  # the longest that the store's server waits for the others to hear a verdict
ANSWER_S: Final = SILENT_S + HEAR_S + 3 * BEAT_S  # the longest that finding a verdict takes
FIRST: Final = 3  # steps that are reported at once, as runs most often fail here
T = TypeVar("T")


class Watch:
    """A thread that shows the other ranks that this one is alive, and names the rank that failed.

    Calls to the store block if the network is cut, so the main thread makes none of them. The thread stops before the
    interpreter does: CPython (to 3.13) ends a thread that returns from torch's C++ later in a destructor, and C++ then
    aborts the process ("terminate called without an active exception").

    Args:
        store: A connection for this watch only.
        rank: This rank's number in the default group.
        members: The ranks that are watched.
        timeout_s: The longest that an operation may take.
        server: The store's server, for messages.
        address: The server's address.
        serves: Whether this process is the server, so that the store ends with it.

    Attributes:
        verdict: What failed, or None.
        heard_s: When the verdict became known, by time.monotonic.
        waits_for: The communication that the rank is in, else "".
        due_s: When that should end, by time.monotonic.
        overdue: Names a communication that is overdue although nobody waits in it.
        joint: How many joint operations (of all ranks) this one has started.
        reported: Whether the main thread knows what failed, and is about to end.
        stopped: Whether this process received SIGTERM.
        spared: Whether SIGTERM does not end it while all ranks live: the main thread saves, then ends.
        alive: Whether signs of life are given.
    """

    def __init__(
        self, store: Store, rank: int, members: Members, timeout_s: float, *, server: str, address: str, serves: bool
    ) -> None:
        self.rank, self.members, self.timeout_s = rank, members, timeout_s
        self.verdict: str | None = None
        self.waits_for, self.due_s = "", 0.0
        self.overdue: Callable[[], str] = str
        self.joint = 0
        self.reported = self.stopped = self.spared = self._ended = False
        self.alive = True
        self._store, self._server, self._address, self._serves = store, server, address, serves
        self._lost = ""  # why the store is gone
        self._gone: list[int] = []  # ranks that can no longer hear the verdict
        self._step: int | None = None
        self._layer = ""
        self.heard_s = self._contact_s = self._since_s = time.monotonic()
        self._soon = threading.Event()  # set to give a sign at once
        self._thread = in_thread(self._run, "layerwise watch")
        atexit.register(self.stop)

    def at(self, step: int, layer: str) -> None:
        """Notes what this rank computes."""
        first = step != self._step and step <= FIRST
        self._step, self._layer, self._since_s = step, layer, time.monotonic()
        if first:
            self._soon.set()

    def enter(self, what: str, limit_s: float) -> None:
        """Notes a communication, and how long it may take. Raises CommError if the run has already failed."""
        self.check()
        self._since_s = time.monotonic()
        self.due_s = self._since_s + limit_s
        self.waits_for = what

    def leave(self) -> None:
        """Notes that the communication has ended, or goes on in the background."""
        self.waits_for, self._since_s = "", time.monotonic()

    def check(self) -> None:
        """Raises CommError if the run has failed, once the others have heard of it: the store may end here."""
        if self.verdict is not None:
            raise self.error(self.find("the run has failed"))

    def error(self, text: str) -> CommError:
        """Returns an error for the main thread to raise."""
        self.reported = True
        return CommError(text)

    def find(self, why: str) -> str:
        """Finds the rank at fault for a failed communication; why: torch's message. Takes up to `ANSWER_S`."""
        wait([in_thread(lambda: self._settle(why))], ANSWER_S)
        silent_s = time.monotonic() - self._contact_s
        return self.verdict or (
            f"{ranks([self.rank], self.members)} has had no answer for {silent_s:.0f} s from the store at "
            f"{self._address} ({self._server}): the server is stopped, or one of the two is cut off from the network "
            f"({why})"
        )

    def look(self) -> None:
        """Starts to find out whether ranks are gone, which then is the verdict. Does not wait."""
        in_thread(lambda: self._settle("", gone_only=True))

    def accuse(self, claim: str) -> str:
        """Tells all ranks what has failed. Returns what they believe: the first claim."""
        wait([in_thread(lambda: self._settle("", claim))], ANSWER_S)
        return self.verdict or claim

    def fail(self, text: str) -> None:
        """Tells all ranks what has failed on this one, whose main thread is about to end."""
        self.reported = True
        self.accuse(f"{ranks([self.rank], self.members)} failed {self._sign().where}: {text}")

    def end(self) -> None:
        """Reports that this rank's run is over."""
        self._ended = True
        self._soon.set()

    def stop(self) -> None:
        """Reports the end, and stops giving signs of life. Does nothing a second time."""
        atexit.unregister(self.stop)
        self.alive = False
        self.end()
        wait([self._thread], ANSWER_S)

    def _run(self) -> None:
        alive = True
        while alive:
            alive = self.alive
            self._beat()
            waits = self.waits_for and not self._ended and time.monotonic() - self._since_s > BEAT_S / 2
            if waits and self._call(self._waits_in_vain, False):
                self._settle("another rank has ended")
            self._soon.wait(BEAT_S)
            self._soon.clear()

    def _sign(self) -> Sign:
        since_s, waits_for = time.monotonic() - self._since_s, self.waits_for or self.overdue()
        return Sign(time.time(), self._step, self._layer, waits_for, since_s, self._ended, self.joint, self.stopped)

    def _beat(self) -> None:
        """Gives a sign of life, and looks for a verdict. Does nothing once there is one, as the store may be gone."""

        def do() -> None:
            sign = self._sign()
            self._store.set(f"alive/{self.rank}", json.dumps(sign))
            if sign.ended:
                self._store.compare_set("ended", "", str(sign.joint))
            if self._store.check(["verdict"]):
                self._hear(self._store.get("verdict"))

        if self.verdict is None:
            self._call(do, None)

    def _waits_in_vain(self) -> bool:
        """True if a rank has ended that will not take part in an operation that this rank has started."""
        return self._store.check(["ended"]) and int(self._store.get("ended")) < self.joint

    def _settle(self, why: str, claim: str | None = None, *, gone_only: bool = False) -> None:
        """Publishes the verdict, unless another rank was first; the store's server waits until the others have heard
        it.

        why: torch's message about a failed communication. claim: the verdict; None: find it. gone_only: there is a
        verdict only if ranks are gone.
        """
        if self.verdict is None:
            text, gone = (claim, []) if claim is not None else self._search()
            if text is None and gone_only:
                return
            verdict = json.dumps([text or self._stuck(why), gone])
            self._call(lambda: self._hear(self._store.compare_set("verdict", "", verdict)), None)
            self.verdict = self.verdict or json.loads(verdict)[0]  # the store is gone: no rank can be told
        heard = [f"heard/{rank}" for rank in self.members.ranks if rank not in self._gone]
        until = time.monotonic() + HEAR_S
        while self._serves and time.monotonic() < until and not self._call(lambda: self._store.check(heard), True):
            time.sleep(BEAT_S / 20)

    def _search(self) -> tuple[str | None, list[int]]:
        """Says which ranks are gone, and returns their numbers. None: all are alive, or there is a verdict."""
        others = [rank for rank in self.members.ranks if rank != self.rank]
        first: dict[int, float] = {}
        began = time.monotonic()
        while True:
            self._beat()
            if self.verdict is not None:
                return None, []
            signs = self._signs()
            if self._lost:
                return f"{self._server} is gone: its store at {self._address} no longer answers ({self._lost})", others
            moved = {r for r, sign in signs.items() if sign.ended or first.setdefault(r, sign.time_s) != sign.time_s}
            silent = [rank for rank in others if rank not in moved]
            if not silent:
                return None, []
            if time.monotonic() - began > SILENT_S:
                return gone_text(silent, signs, self.members, time.time(), self.rank), silent
            time.sleep(BEAT_S / 5)

    def _stuck(self, why: str) -> str:
        """Says what blocks ranks that are all alive."""
        signs = self._signs()
        if any(sign.stopped for sign in signs.values()):  # a signal takes a moment to reach all ranks
            time.sleep(BEAT_S)
            signs = self._signs()
        return stopped_text(signs, self.members) or stuck_text(signs, self.members, self.timeout_s, why)

    def _signs(self) -> dict[int, Sign]:
        """Returns the last sign of every rank that ever gave one."""
        signs = {self.rank: self._sign()}

        def look() -> None:
            for rank in self.members.ranks:
                if rank != self.rank and self._store.check([f"alive/{rank}"]):
                    signs[rank] = Sign(*json.loads(self._store.get(f"alive/{rank}")))

        self._call(look, None)
        return signs

    def _hear(self, verdict: bytes) -> None:
        text, self._gone = json.loads(verdict)
        self._store.set(f"heard/{self.rank}", "1")  # first, as the main thread ends this process once it knows
        self.heard_s = time.monotonic()
        self.verdict = text

    def _call(self, do: Callable[[], T], otherwise: T) -> T:
        """Calls the store; if it is gone, notes that and raises nothing."""
        if self._lost:
            return otherwise
        try:
            result = do()
        except RuntimeError as error:  # torch.distributed.DistError and its kin
            self._lost = reason(error)
            return otherwise
        self._contact_s = time.monotonic()
        return result
