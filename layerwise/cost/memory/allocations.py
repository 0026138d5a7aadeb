"""AllocationTracker: the bytes of live storages on each of N devices, and their peak.

A storage lives while something holds it, as in PyTorch: a view holds the storage behind it. Devices hold different
storages, so holders are counted for each device. A set of devices is an integer with a bit for each. Bytes are added up
for some hundred instants at a time, because calls of numpy on small arrays cost more than the additions.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain
from typing import Literal, get_args

import numpy as np

from layerwise.geometry.arrays import Floats, Mask

# What memory is used for. activations: outputs of layers, and what is saved for the backward pass. gathered: copies of
# inputs and parameters that other devices own. gradients: those of parameters, with their buckets, and of activations.
# workspace: temporary memory of a kernel or a message.
MemoryKind = Literal["parameters", "states", "gradients", "activations", "gathered", "workspace"]
KINDS: tuple[MemoryKind, ...] = get_args(MemoryKind)
Devices = int  # a set of devices: device d is the bit 1 << d
LOGGED = 1 << 20  # the most numbers that are added up at once or stored, which bounds the memory
COMPARED = 256  # devices: sizes of at most so many are compared by their contents, others by their ids


@dataclass(slots=True, eq=False)
class Storage:
    """A block of memory that one or several tensors use."""

    size: Floats  # (N,) bytes
    kind: MemoryKind
    devices: Devices  # devices on which it is not empty
    holders: list[Devices]  # the devices with at least 1 holder, at least 2, ...


Ref = tuple[tuple[Storage, Devices], ...]  # the storages of a tensor, and the devices on which it holds them
NOBODY: Ref = ()


def devices_of(mask: Mask) -> Devices:
    """The set of devices whose flag in (N,) is True."""
    return int.from_bytes(np.packbits(mask, bitorder="little").tobytes(), "little")


def part(ref: Ref, where: Devices) -> Ref:
    """The part of a tensor on the devices `where`."""
    return tuple([(s, here) for s, devices in ref if (here := devices & where)])


class SizeTable:
    """The distinct sizes (N,) of storages, each with a number. Trackers of one model share a table."""

    def __init__(self, devices: int) -> None:
        self.rows: list[Floats] = []
        self.by_content = devices <= COMPARED
        self.known: dict[object, tuple[int, Devices]] = {}  # the number, and the devices on which the size is not 0
        self._matrix = np.zeros((0, devices))

    def add(self, key: object, size: Floats) -> tuple[int, Devices]:
        """Adds a new size."""
        self.known[key] = len(self.rows), devices_of(size > 0)
        self.rows.append(size)  # which also keeps its id unique
        return self.known[key]

    def matrix(self) -> Floats:
        """(sizes, N) all sizes, by number."""
        if len(self._matrix) < len(self.rows):
            self._matrix = np.stack(self.rows)
        return self._matrix


class AllocationTracker:
    """Counts the live bytes (`now`, (N,)) and their maximum (`peak`, (N,)).

    sizes: the table of sizes to begin with.
    """

    def __init__(self, devices: int, sizes: SizeTable | None = None) -> None:
        self.count, self.everyone = devices, (1 << devices) - 1
        self._now, self._peak = np.zeros(devices), np.zeros(devices)
        self._sizes = sizes or SizeTable(devices)
        self._log: list[int] = []  # 3 * the size's number, plus 0 if it is freed, 2 if allocated, 1 if both at once

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
        """Allocates a storage with one holder on the devices where it is not empty."""
        devices = self._note(size, kind, 1)
        return ((Storage(size, kind, devices, [devices]), devices),) if devices else NOBODY

    def spike(self, size: Floats | float) -> None:
        """Allocates and frees temporary memory."""
        self._note(size if isinstance(size, np.ndarray) else np.full(self.count, size), "workspace", 0)

    def _note(self, size: Floats, kind: MemoryKind, change: Literal[-1, 0, 1]) -> Devices:
        """Logs a change: allocated (1), freed (-1), or both at once (0). Returns the devices where it is not empty."""
        sizes = self._sizes
        if len(sizes.rows) * self.count > LOGGED:
            self._add_up()
            sizes = self._sizes = SizeTable(self.count)
        key = size.tobytes() if sizes.by_content else id(size)
        number, devices = sizes.known.get(key) or sizes.add(key, size)
        if devices:
            self._log.append(3 * number + change + 1)
            if len(self._log) * self.count > LOGGED:
                self._add_up()
        return devices

    def _add_up(self) -> None:
        if not self._log:
            return
        number, change = np.divmod(np.array(self._log), 3)
        self._log = []
        size = self._sizes.matrix()[number]
        alive = size * (change - 1)[:, None]
        alive[0] += self._now
        alive = alive.cumsum(0)
        self._now = alive[-1].copy()
        self._peak = np.maximum(self._peak, (alive + size * (change == 1)[:, None]).max(0))

    def hold(self, ref: Ref, where: Devices | None = None) -> Ref:
        """Adds a holder on the devices `where`; None: on all devices."""
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

    def drop(self, *refs: Ref) -> None:
        """Removes a holder of each tensor, one after the other."""
        for s, devices in chain.from_iterable(refs):
            fewer = devices
            for i in reversed(range(len(s.holders))):
                gone = s.holders[i] & fewer
                s.holders[i] ^= gone
                fewer ^= gone
            assert not fewer, "dropped more often than held"
            if gone:  # the last holder is gone there
                size = s.size if gone == s.devices else np.where(self.mask(gone), s.size, 0.0)
                self._note(size, s.kind, -1)

    def unshared(self, ref: Ref) -> Devices:
        """The devices on which this tensor is the only holder of its storage."""
        alone = self.everyone
        for s, devices in ref:
            several = s.holders[1] if len(s.holders) > 1 else 0
            alone &= ~devices | (s.holders[0] & ~several)
        return alone
