"""A device's second stream: sums of gradients, one after the other, beside its computation."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from layerwise.geometry.arrays import Floats, Ints


@dataclass(eq=False)
class Sum:
    """An all-reduce; arrays are (N,)."""

    name: str
    row: Ints  # devices with the same number take part in one; -1: in none
    seconds: float  # that it takes alone
    compute: float  # the share of its speed at which computation goes on beside it
    sync: float  # and the share of its own
    ready: Floats = field(init=False)  # from when on it may run
    left: Floats = field(init=False)  # seconds that it still needs, alone
    started: Floats = field(init=False)
    ended: Floats = field(init=False)

    def begin(self, clock: Floats) -> None:
        """It begins where the last of its members has come so far."""
        members = self.row >= 0
        last = np.full(self.row.max() + 1, 0.0)
        np.maximum.at(last, self.row[members], clock[members])
        self.started = clock.copy()
        self.ready = np.where(members, last[self.row], 0.0)
        self.left = np.where(members, self.seconds, 0.0)
        self.ended = self.ready.copy()


class Stream:
    """The sums of N devices, in the order in which they were added."""

    def __init__(self, devices: int) -> None:
        self.devices = devices
        self.sums: list[Sum] = []

    def add(self, one: Sum, clock: Floats) -> None:
        """Another one, at the devices' times (N,)."""
        one.begin(clock)
        self.sums.append(one)

    def beside(self, clock: Floats, work: Floats) -> Floats:
        """When each device is through with so many seconds of computation, with the sums going on beside it."""
        clock, work = clock.copy(), work.copy()
        for s in self._under_way():
            here = s.left > 0
            alone = np.where(here, np.minimum(np.maximum(s.ready - clock, 0.0), work), 0.0)  # it may not run yet
            clock += alone
            work -= alone
            both = np.where(here, np.minimum(work / s.compute, s.left / s.sync), 0.0)
            clock += both
            ended = here & (s.left / s.sync <= both)
            work = np.maximum(work - s.compute * both, 0.0)
            s.left = np.where(ended, 0.0, s.left - s.sync * both)
            s.ended = np.where(ended, clock, s.ended)
        return clock + work

    def until(self, clock: Floats, then: Floats) -> None:
        """Devices wait; sums go on by themselves."""
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

    def _under_way(self) -> list[Sum]:
        return [s for s in self.sums if s.left.any()]
