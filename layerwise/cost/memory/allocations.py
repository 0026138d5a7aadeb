"""AllocationTracker: the bytes of storages that are alive on each of N devices, and the most there ever were.

A storage lives while anybody holds it, as PyTorch's do: a view holds the storage behind it. Devices differ in what they
hold, so holders are counted for each of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from layerwise.geometry.arrays import Floats, Ints, Mask

# What memory is held for. activations: what layers make, and keep for the backward pass. gathered: copies of what other
# devices own, inputs of layers and parameters. gradients: of parameters, with their buckets, and of activations.
# workspace: what a kernel or a message takes for the moment.
Kind = Literal["parameters", "states", "gradients", "activations", "gathered", "workspace"]


@dataclass(frozen=True, slots=True, eq=False)
class Storage:
    """Memory that tensors share."""

    size: Floats  # (N,) bytes
    holders: Ints  # (N,) how many hold it
    kind: Kind


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
    """Counts the bytes that are alive (`now`, (N,)) and the most that were (`peak`, (N,)).

    by_kind: whether to know also, of what kinds the most was (`fullest`).
    """

    def __init__(self, devices: int, *, by_kind: bool = False) -> None:
        self.now, self.peak = np.zeros(devices), np.zeros(devices)
        kinds: tuple[Kind, ...] = get_args(Kind) if by_kind else ()
        self._of = {kind: np.zeros(devices) for kind in kinds}
        self.fullest = {kind: np.zeros(devices) for kind in kinds}  # (N,) of each kind, when a device had its most

    def new(self, size: Floats, kind: Kind = "activations") -> Ref:
        """A storage with one holder, on the devices where it is not empty."""
        held = size > 0
        if not np.count_nonzero(held):
            return NOBODY
        self._add(kind, size)
        self._note(self.now)
        return ((Storage(size, held.astype(np.int64), kind), held),)

    def spike(self, size: Floats | float) -> None:
        """Something that is gone at once."""
        self._note(self.now + size, size)

    def _add(self, kind: Kind, size: Floats) -> None:
        self.now = self.now + size
        if self._of:
            self._of[kind] = self._of[kind] + size

    def _note(self, alive: Floats, workspace: Floats | float = 0.0) -> None:
        """Whether there never was as much."""
        for kind, most in self.fullest.items():
            here = self._of[kind] + (workspace if kind == "workspace" else 0.0)
            self.fullest[kind] = np.where(alive > self.peak, here, most)
        self.peak = np.maximum(self.peak, alive)

    def hold(self, ref: Ref, where: Mask | None = None) -> Ref:
        """One more holder, of what lies on the devices `where`."""
        held = ref if where is None else part(ref, where)
        for s, mask in held:
            np.add(s.holders, mask, out=s.holders)
        return held

    def drop(self, ref: Ref) -> None:
        """One holder less."""
        for s, mask in ref:
            np.subtract(s.holders, mask, out=s.holders)
            assert not np.count_nonzero(s.holders < 0), "dropped more often than held"
            gone = mask & (s.holders == 0)
            if np.count_nonzero(gone):
                self._add(s.kind, -np.where(gone, s.size, 0.0))

    def unshared(self, ref: Ref) -> Mask:
        """(N,) whether a tensor is alone in holding what it holds."""
        alone = np.ones(len(self.now), bool)
        for s, mask in ref:
            alone &= ~mask | (s.holders == 1)
        return alone
