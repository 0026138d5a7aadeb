"""AllocationTracker: the bytes of storages that are alive on each of N devices, and the most there ever were.

A storage lives while anybody holds it, as PyTorch's do: a view holds the storage behind it. Devices differ in what they
hold, so holders are counted for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from layerwise.geometry.arrays import Floats, Ints, Mask


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Memory that tensors share."""

    size: Floats  # (N,) bytes
    holders: Ints  # (N,) how many hold it


Ref = tuple[tuple[Storage, Mask], ...]  # what a tensor holds, and on which devices
NOBODY: Ref = ()


def part(ref: Ref, where: Mask) -> Ref:
    """What of it lies on the devices `where`."""
    return tuple((s, mask & where) for s, mask in ref)


@dataclass(frozen=True, slots=True)
class Flight:
    """What is on its way from its source, or back to it, while others compute."""

    arrived: Ref  # where it arrives
    copies: Ref  # of what is sent and was not contiguous
    gradient: Ref = NOBODY  # on the way back: what it is made of


class AllocationTracker:
    """Counts the bytes that are alive (`now`, (N,)) and the most that were (`peak`, (N,))."""

    def __init__(self, devices: int) -> None:
        self.now, self.peak = np.zeros(devices), np.zeros(devices)

    def new(self, size: Floats) -> Ref:
        """A storage with one holder, on the devices where it is not empty."""
        held = size > 0
        if not held.any():
            return NOBODY
        self.now = self.now + size
        self.peak = np.maximum(self.peak, self.now)
        return ((Storage(size, held.astype(np.int64)), held),)

    def spike(self, size: Floats | float) -> None:
        """Something that is gone at once."""
        self.peak = np.maximum(self.peak, self.now + size)

    def hold(self, ref: Ref, where: Mask | None = None) -> Ref:
        """One more holder, of what lies on the devices `where`."""
        held = ref if where is None else part(ref, where)
        for s, mask in held:
            s.holders[mask] += 1
        return held

    def drop(self, ref: Ref) -> None:
        """One holder less."""
        for s, mask in ref:
            s.holders[mask] -= 1
            assert (s.holders >= 0).all(), "dropped more often than held"
            self.now = self.now - np.where(mask & (s.holders == 0), s.size, 0.0)

    def unshared(self, ref: Ref) -> Mask:
        """(N,) whether a tensor is alone in holding what it holds."""
        alone = np.ones(len(self.now), bool)
        for s, mask in ref:
            alone &= ~mask | (s.holders == 1)
        return alone
