"""AllocationTracker: the bytes of live storages on each of N devices, and their peak.

A storage lives while anybody holds it, as in PyTorch: a view holds the storage behind it. Devices differ in what they
hold, so holders are counted for each of them. Sets of devices are the bits of integers, and bytes are added up for some
hundred instants at a time, as calls on small arrays cost more than the additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from layerwise.geometry.arrays import Floats, Mask

# What memory is held for. activations: outputs of layers, and what is saved for the backward pass. gathered: copies of
# what other devices own, inputs of layers and parameters. gradients: of parameters, with their buckets, and of
# activations. workspace: temporary memory of a kernel or a message.
MemoryKind = Literal["parameters", "states", "gradients", "activations", "gathered", "workspace"]
KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
Devices = int  # of device d the bit 1 << d
LOGGED = 1 << 20  # numbers added up at once, and sizes stored, to bound the memory


@dataclass(slots=True, eq=False)
class Storage:
    """Memory that tensors share."""

    size: Floats  # (N,) bytes
    kind: MemoryKind
    devices: Devices  # devices on which it is not empty
    holders: list[Devices]  # devices with more than 0 holders, more than 1, ...


Ref = tuple[tuple[Storage, Devices], ...]  # what a tensor holds, and on which devices
NOBODY: Ref = ()


def devices_of(mask: Mask) -> Devices:
    """The devices of (N,) flags."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def part(ref: Ref, where: Devices) -> Ref:
    """The part of it on the devices `where`."""
    return tuple([(s, here) for s, devices in ref if (here := devices & where)])


@dataclass(frozen=True, slots=True)
class TransferStorage:
    """Storages of a transfer that is under way, forward or backward."""

    arrived: Ref  # the destination
    copies: Ref  # copies of sent parts that were not contiguous
    gradient: Ref = NOBODY  # backward: what is sent


class AllocationTracker:
    """Counts the live bytes (`now`, (N,)) and their maximum (`peak`, (N,))."""

    def __init__(self, devices: int) -> None:
        self.count, self.everyone = devices, (1 << devices) - 1
        self._now, self._peak = np.zeros(devices), np.zeros(devices)
        self._log: list[tuple[Floats, bool]] = []  # new bytes, and whether they stay
        # By the id of (N,) bytes, which are kept here; equal layers give the same ones.
        self._where: dict[int, tuple[Devices, Floats]] = {}

    @property
    def now(self) -> Floats:
        """(N,) bytes alive now."""
        self._add_up()
        return self._now

    @property
    def peak(self) -> Floats:
        """(N,) the most bytes so far."""
        self._add_up()
        return self._peak

    def mask(self, devices: Devices) -> Mask:
        """(N,) flags of devices."""
        bits = np.frombuffer(devices.to_bytes((self.count + 7) // 8, "little"), np.uint8)
        return np.unpackbits(bits, count=self.count, bitorder="little").astype(np.bool_)

    def new(self, size: Floats, kind: MemoryKind = "activations") -> Ref:
        """A storage with one holder, on the devices where it is not empty."""
        known = self._where.get(id(size))
        if known is None:
            if len(self._where) * self.count > LOGGED:
                self._where.clear()
            known = self._where[id(size)] = devices_of(size > 0), size
        devices = known[0]
        if not devices:
            return NOBODY
        self._note(size, kind, stays=True)
        return ((Storage(size, kind, devices, [devices]), devices),)

    def spike(self, size: Floats | float) -> None:
        """Allocates and frees temporary memory."""
        whole = size if isinstance(size, np.ndarray) else np.full(self.count, size)
        self._note(whole, "workspace", stays=False)

    def _note(self, size: Floats, kind: MemoryKind, *, stays: bool) -> None:
        self._log.append((size, stays))
        if len(self._log) * self.count > LOGGED:
            self._add_up()

    def _add_up(self) -> None:
        if not self._log:
            return
        sizes, stay = zip(*self._log, strict=True)
        self._log = []
        stays = np.array(stay)[:, None]
        size = np.concatenate(sizes, dtype=np.float64).reshape(len(sizes), self.count)
        alive = size * stays
        alive[0] += self._now
        alive = alive.cumsum(0)
        self._now = alive[-1].copy()
        self._peak = np.maximum(self._peak, (alive + size * ~stays).max(0))

    def hold(self, ref: Ref, where: Devices | None = None) -> Ref:
        """Adds a holder of what lies on the devices `where`."""
        held = ref if where is None else part(ref, where)
        for s, devices in held:
            more = devices
            for i, there in enumerate(s.holders):
                s.holders[i], more = there | more, there & more
                if not more:
                    break
            else:
                s.holders.append(more)
        return held

    def drop(self, ref: Ref) -> None:
        """Removes a holder."""
        for s, devices in ref:
            fewer = devices
            for i in reversed(range(len(s.holders))):
                gone = s.holders[i] & fewer
                s.holders[i] ^= gone
                fewer ^= gone
            assert not fewer, "dropped more often than held"
            if gone:  # of the first holders
                size = s.size if gone == s.devices else np.where(self.mask(gone), s.size, 0.0)
                self._note(-size, s.kind, stays=True)

    def unshared(self, ref: Ref) -> Devices:
        """The devices on which this tensor is its storage's only holder."""
        alone = self.everyone
        for s, devices in ref:
            several = s.holders[1] if len(s.holders) > 1 else 0
            alone &= ~devices | (s.holders[0] & ~several)
        return alone
