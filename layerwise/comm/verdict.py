"""The verdict: a sentence that says which rank is at fault, from the signs of life of all ranks."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Final, NamedTuple

from layerwise.comm.base import Members, ranks

STOPPED: Final = "stopped from outside (SIGTERM"  # only `stopped_text` uses these words


class Sign(NamedTuple):
    """A rank's sign of life, which is JSON in the store."""

    time_s: float  # by the rank's clock; no two signs have the same
    step: int | None  # the step that it computes; None: none yet
    layer: str
    waits_for: str  # the communication that it is in, or ""
    since_s: float  # how long it has been in this state
    ended: bool = False  # its run is over
    joint: int = 0  # operations of all ranks that it has started
    stopped: bool = False  # it received SIGTERM

    @property
    def where(self) -> str:
        """`at step 17 in layer conv3`."""
        if self.step is None:
            return "before its first step"
        return f"at step {self.step}" + (f" in layer {self.layer}" if self.layer else "")


def gone_text(gone: Collection[int], signs: Mapping[int, Sign], members: Members, now_s: float, me: int) -> str:
    """Says which ranks are gone, and when and where they were last heard of. `me` is the reporting rank, which may be
    at fault.
    """
    which = sorted(gone)
    last = [
        f"{max(now_s - signs[rank].time_s, 0.0):.1f} s ago, {signs[rank].where}"
        if rank in signs
        else "none: it never arrived"
        for rank in which[:4]
    ]
    how = "killed" if any(rank in signs for rank in which) else "not started, or ended early as its own output says"
    are, sign, their = ("is", "sign", "its") if len(which) == 1 else ("are", "signs", "their")
    what = f"{ranks(which, members)} {are} gone (last {sign} {'; '.join(last)}): {how}, or {their} network is cut"
    return what + (f", or rank {me} itself is cut off: it hears nobody" if len(which) == len(members) - 1 else "")


def stopped_text(signs: Mapping[int, Sign], members: Members) -> str:
    """Says which ranks received SIGTERM; "" for none."""
    which = [rank for rank, sign in sorted(signs.items()) if sign.stopped]
    if not which:
        return ""
    if len(which) == len(members):
        return f"the run was {STOPPED} to all {len(members)} ranks) {signs[which[0]].where}"
    return f"{ranks(which, members)} {'was' if len(which) == 1 else 'were'} {STOPPED}) {signs[which[0]].where}"


def stuck_text(signs: Mapping[int, Sign], members: Members, timeout_s: float, reason: str) -> str:
    """Says what blocks ranks that are all alive: one that does not arrive, or ranks that wait for different things."""
    ended = [rank for rank, sign in sorted(signs.items()) if sign.ended]
    if early := [rank for rank in ended if signs[rank].joint < max(sign.joint for sign in signs.values())]:
        return _ended_text(early, signs, members)
    long = {r: sign for r, sign in sorted(signs.items()) if sign.since_s >= timeout_s / 2 and not sign.ended}
    if busy := [rank for rank, sign in long.items() if not sign.waits_for]:
        rank = max(busy, key=lambda r: long[r].since_s)
        stuck = f"alive but stuck: for {long[rank].since_s:.0f} s {long[rank].where}, outside of communication"
        return f"{ranks([rank], members)} is {stuck}"
    if len(long) > 1:
        waits = [f"rank {rank} {sign.where} for {sign.waits_for!r}" for rank, sign in list(long.items())[:4]]
        return (
            f"all ranks are alive, but have waited for each other for more than {timeout_s / 2:g} s: {'; '.join(waits)}"
        )
    if ended:
        return _ended_text(ended, signs, members)
    return f"a connection between ranks failed although all of them are alive: {reason}"


def _ended_text(which: Sequence[int], signs: Mapping[int, Sign], members: Members) -> str:
    have = "has" if len(which) == 1 else "have"
    return (
        f"{ranks(which, members)} {have} ended the run ({signs[which[0]].where}) while others go on: every rank "
        "must call the model equally often, also to evaluate it"
    )
