"""Board: signs of life of the ranks and what went wrong, in the store of the rendezvous, and in words.

alive/R   the sign of life of rank R
verdict   what happened and to whom: the first rank that knows writes it, all others repeat it
heard/R   rank R knows the verdict
ended     the last sign of the first rank whose run is over
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING, Final, TypeVar

from layerwise.comm.base import Members, ranks, reason

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

STOPPED: Final = "stopped from outside (SIGTERM"  # in the words of `stopped_text` alone


@dataclass(frozen=True, slots=True)
class Sign:
    """A rank's sign of life."""

    count: int  # rises with every sign
    time_s: float  # of its clock
    step: int | None  # what it computes; None: nothing yet
    layer: str
    waits_for: str  # the communication that it is in, or ""
    since_s: float  # how long it has been in this state
    ended: bool = False  # its run is over
    joint: int = 0  # operations of all ranks that it has started
    stopped: bool = False  # it was sent SIGTERM

    def pack(self) -> str:
        """Returns a text for the store."""
        return json.dumps(astuple(self))

    @property
    def where(self) -> str:
        """`at step 17 in layer conv3`."""
        if self.step is None:
            return "before its first step"
        return f"at step {self.step}" + (f" in layer {self.layer}" if self.layer else "")


def unpack(text: bytes | str) -> Sign:
    """Returns the sign that `pack` made a text of."""
    return Sign(*json.loads(text))


def gone_text(gone: Collection[int], signs: Mapping[int, Sign], members: Members, now_s: float, me: int) -> str:
    """Says that ranks are gone, when they were last heard of, and where. Rank `me` says so: it may be at fault."""
    which = sorted(gone)
    last = [
        f"{max(now_s - signs[rank].time_s, 0.0):.1f} s ago, {signs[rank].where}"
        if rank in signs
        else "none: it never arrived"
        for rank in which[:4]
    ]
    how = "killed" if any(rank in signs for rank in which) else "not started, or ended early as its own output says"
    if len(which) == 1:
        what = f"{ranks(which, members)} is gone (last sign {last[0]}): {how}, or its network is cut"
    else:
        what = f"{ranks(which, members)} are gone (last signs {'; '.join(last)}): {how}, or their network is cut"
    return what + (f", or rank {me} itself is cut off: it hears nobody" if len(which) == len(members) - 1 else "")


def stopped_text(signs: Mapping[int, Sign], members: Members) -> str:
    """Says which ranks were sent SIGTERM; "" for none."""
    which = [rank for rank, sign in sorted(signs.items()) if sign.stopped]
    if not which:
        return ""
    if len(which) == len(members):
        return f"the run was {STOPPED} to all {len(members)} ranks) {signs[which[0]].where}"
    return f"{ranks(which, members)} {'was' if len(which) == 1 else 'were'} {STOPPED}) {signs[which[0]].where}"


def stuck_text(signs: Mapping[int, Sign], members: Members, timeout_s: float, reason: str) -> str:
    """Says what keeps ranks that are all alive: one that does not come, or ranks that wait for different things."""
    ended = [rank for rank, sign in sorted(signs.items()) if sign.ended]
    early = [rank for rank in ended if signs[rank].joint < max(sign.joint for sign in signs.values())]
    if early:
        return _ended_text(early, signs, members)
    busy = {rank: sign for rank, sign in signs.items() if not (sign.waits_for or sign.ended)}
    if busy:
        rank = max(busy, key=lambda r: busy[r].since_s)
        if busy[rank].since_s >= timeout_s / 2:
            sign = busy[rank]
            return (
                f"{ranks([rank], members)} is alive but stuck: for {sign.since_s:.0f} s {sign.where}, "
                "outside of communication"
            )
    long = {rank: sign for rank, sign in sorted(signs.items()) if sign.waits_for and sign.since_s >= timeout_s / 2}
    if len(long) > 1:
        waits = [f"rank {rank} {sign.where} for {sign.waits_for!r}" for rank, sign in list(long.items())[:4]]
        return f"all ranks are alive but wait for each other for more than {timeout_s / 2:g} s: {'; '.join(waits)}"
    if ended:
        return _ended_text(ended, signs, members)
    return f"a connection between ranks failed although all of them are alive: {reason}"


def _ended_text(which: Sequence[int], signs: Mapping[int, Sign], members: Members) -> str:
    have = "has" if len(which) == 1 else "have"
    return f"{ranks(which, members)} {have} ended the run ({signs[which[0]].where}) while others go on"


T = TypeVar("T")
HEAR_S: Final = 3.0  # at most so long does the server of the store wait for the others to hear a verdict


class Board:
    """One rank's view of the board. Its calls block where the network is cut; nothing is raised.

    store: a connection that nobody else uses. rank: as the default group has it. address: of the store, for messages.
    serves: this process serves it, and goes with it; agent: torchrun's agent does.
    verdict: what failed, once that is known. lost: why the store is no longer there, or "". contact_s: when it last
    answered, by time.monotonic. heard_s: when the verdict was heard.
    """

    def __init__(self, store: Store, rank: int, members: Members, *, address: str, serves: bool, agent: bool) -> None:
        self.rank, self.members, self.address, self.serves, self.agent = rank, members, address, serves, agent
        self.verdict: str | None = None
        self.lost = ""
        self.contact_s = self.heard_s = time.monotonic()
        self._store = store
        self._gone: list[int] = []  # who can no longer hear the verdict

    def beat(self, sign: Sign) -> None:
        """Gives a sign of life, and looks for a verdict. Does nothing where that is known: the store may go."""

        def do() -> None:
            self._store.set(f"alive/{self.rank}", sign.pack())
            if sign.ended:
                self._store.compare_set("ended", "", sign.pack())
            if self._store.check(["verdict"]):
                self._hear(self._store.get("verdict"))

        if self.verdict is None:
            self._call(do, None)

    def signs(self) -> dict[int, Sign]:
        """Returns the last sign of every other rank that ever gave one."""
        others = [(rank, f"alive/{rank}") for rank in self.members.ranks if rank != self.rank]
        return self._call(
            lambda: {rank: unpack(self._store.get(key)) for rank, key in others if self._store.check([key])}, {}
        )

    def ended(self) -> Sign | None:
        """Returns the last sign of the first rank whose run is over; None while all go on."""
        return self._call(lambda: unpack(self._store.get("ended")) if self._store.check(["ended"]) else None, None)

    def publish(self, text: str, gone: list[int]) -> None:
        """Makes this the verdict, unless there is one."""
        if self.verdict is None:
            self._call(lambda: self._hear(self._store.compare_set("verdict", "", json.dumps([text, gone]))), None)
        if self.verdict is None:  # the store is gone: no rank can be told
            self.verdict = text

    def linger(self) -> None:
        """Waits until all others have heard the verdict, where this process serves the store and is about to end."""
        if not self.serves:
            return
        keys = [f"heard/{rank}" for rank in self.members.ranks if rank not in self._gone]
        until = time.monotonic() + HEAR_S
        while time.monotonic() < until and not self._call(lambda: self._store.check(keys), True):
            time.sleep(0.05)

    def lost_text(self) -> str:
        """Says that the store is gone, and with it its rank."""
        if self.agent:
            return (
                f"torchrun's store at {self.address} is gone ({self.lost}): torchrun has ended, or the network is cut"
            )
        return f"{ranks([0], self.members.world)} is gone: its store at {self.address} no longer answers ({self.lost})"

    def silent_text(self, why: str) -> str:
        """Says that the store does not even refuse."""
        silent = time.monotonic() - self.contact_s
        who = "torchrun" if self.agent else "rank 0"
        return (
            f"{ranks([self.rank], self.members)} has had no answer for {silent:.0f} s from the store at {self.address}"
            f" ({who}): it is stopped, or the network of one of the two is cut ({why})"
        )

    def _hear(self, verdict: bytes) -> None:
        text, self._gone = json.loads(verdict)
        self._store.set(f"heard/{self.rank}", "1")  # first: the main thread ends this process once it knows
        self.heard_s = time.monotonic()
        self.verdict = text

    def _call(self, do: Callable[[], T], otherwise: T) -> T:
        if self.lost:
            return otherwise
        try:
            result = do()
        except RuntimeError as error:  # torch.distributed.DistError and its kin
            self.lost = reason(error)
            return otherwise
        self.contact_s = time.monotonic()
        return result
