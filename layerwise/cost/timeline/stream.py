"""A device's second stream: traffic beside its computation, one after the other.

First the transfers that were issued early, in order; then gradient sums, in order.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from layerwise.geometry.arrays import Floats, Ints, Mask


@dataclass(eq=False)
class Flow:
    """A gradient all-reduce, or a transfer issued early; arrays are (N,)."""

    name: str
    row: Ints  # devices with the same number take part together; -1: in none
    seconds: float  # alone
    compute: float  # fraction of its speed at which computation runs meanwhile
    own: float  # fraction of its own speed
    ready: Floats = field(init=False)  # from when on it may run
    left: Floats = field(init=False)  # seconds that it still needs, alone
    number: int = field(init=False)  # in the order in which flows begin
    started: Floats = field(init=False)
    ended: Floats = field(init=False)
    _over: bool = field(init=False, default=False)

    @property
    def going(self) -> bool:
        """True if any device has some of it left."""
        self._over = self._over or not self.left.any()
        return not self._over

    def begin(self, clock: Floats) -> None:
        """Marks it as begun, when the last of its members has arrived."""
        members = self.row >= 0
        last = np.full(self.row.max() + 1, 0.0)
        np.maximum.at(last, self.row[members], clock[members])
        self.started = clock.copy()
        self.ready = np.where(members, last[self.row], 0.0)
        self.left = np.where(members, self.seconds, 0.0)
        self.ended = self.ready.copy()


class Stream:
    """The traffic of N devices, in the order in which it was added."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.sums: list[Flow] = []
        self._flows = 0  # how many were added
        self._transfers: list[Flow] = []  # those that may be going; they run before sums
        self._sums: list[Flow] = []  # likewise

    def add(self, one: Flow, clock: Floats, *, is_sum: bool = False) -> None:
        """Adds a sum or transfer at the devices' times (N,). Sums on the wire wait for transfers."""
        one.begin(clock)
        one.number = self._flows = self._flows + 1
        (self._sums if is_sum else self._transfers).append(one)
        if is_sum:
            self.sums.append(one)

    def through(self, clock: Floats, devices: Mask, last: Flow | None = None, *, sums: bool = False) -> Floats:
        """When these devices have finished all transfers up to the last, if they do nothing else meanwhile.

        sums: and then the sums, up to the last.
        """
        self._under_way()
        clock, end = clock.copy(), self._flows if last is None else last.number
        first = self._transfers if sums else []  # all transfers run before a sum
        upto = self._sums if sums else self._transfers
        for t in [*first, *(one for one in upto if one.number <= end)]:
            here = devices & (t.left > 0)
            clock = np.where(here, np.maximum(clock, t.ready) + t.left, clock)
            t.ended = np.where(here, clock, t.ended)
            t.left = np.where(here, 0.0, t.left)
        return clock

    def awaited(self, one: Flow, clock: Floats, *, is_sum: bool = False) -> Floats:
        """When the devices in a transfer or sum continue: it ends on all of them together."""
        members = one.row >= 0
        waited = self.through(clock, members, one, sums=is_sum)
        one.ended = np.where(members, one.ended[members].max(), one.ended)
        end = np.where(members, np.maximum(waited, one.ended), clock)
        self.until(waited, end)
        return end

    def beside(self, clock: Floats, work: Floats) -> Floats:
        """When each device has finished these seconds of computation, with concurrent traffic."""
        clock, work = clock.copy(), work.copy()
        for s in self._under_way():
            here = s.left > 0
            alone = np.where(here, np.minimum(np.maximum(s.ready - clock, 0.0), work), 0.0)  # it may not run yet
            clock += alone
            work -= alone
            both = np.where(here, np.minimum(work / s.compute, s.left / s.own), 0.0)
            clock += both
            ended = here & (s.left / s.own <= both)
            work = np.maximum(work - s.compute * both, 0.0)
            s.left = np.where(ended, 0.0, s.left - s.own * both)
            s.ended = np.where(ended, clock, s.ended)
        return clock + work

    def until(self, clock: Floats, then: Floats) -> None:
        """Lets devices wait; traffic goes on."""
        clock = clock.copy()
        for s in self._under_way():
            start = np.maximum(clock, s.ready)
            time = np.minimum(s.left, np.maximum(then - start, 0.0))
            ended = (s.left > 0) & (time >= s.left)
            clock = np.where(time > 0, start + time, clock)
            s.left = np.where(ended, 0.0, s.left - time)
            s.ended = np.where(ended, clock, s.ended)

    def finish(self, clock: Floats) -> Floats:
        """When each device has all its sums; a sum ends on all its members together."""
        for s in self.sums:
            clock = np.maximum(clock, s.ended)
            here = s.left > 0
            clock = np.where(here, np.maximum(clock, s.ready) + s.left, clock)
            s.ended = np.where(here, clock, s.ended)
            s.left = np.zeros(self.devices)
            members = s.row >= 0
            last = np.zeros(s.row.max() + 1)
            np.maximum.at(last, s.row[members], s.ended[members])
            s.ended = np.where(members, last[s.row], s.ended)
            clock = np.where(members, np.maximum(clock, s.ended), clock)
        return clock

    def _under_way(self) -> list[Flow]:
        """All traffic that is going, in the order in which it runs."""
        self._transfers, self._sums = ([one for one in flows if one.going] for flows in (self._transfers, self._sums))
        return [*self._transfers, *self._sums]
