"""Transfers: what a device needs of a tensor and another owns, as plain data; and how it travels.

What travels is `needs & owned`, for every pair of devices. A transfer where nothing travels is a slice. Where the
network prefers collectives (NCCL), devices that all need a box of which each owns an equal part all-gather it (the way
back is a reduce-scatter), and devices that need equal parts of each other exchange all to all. All else is a batch of
messages. `gathers` says which are all-gathers for all pairs of configurations at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from layerwise.geometry import Box
from layerwise.partition.groups import Group
from layerwise.partition.place import Each

Parts = tuple[tuple[int, Box], ...]  # (peer, box)
Pattern = Literal["local", "messages", "gather", "all-to-all"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One device's part of moving a tensor from those who own it to those who need it."""

    own: Box | None  # of the whole tensor; None: it owns nothing
    need: Box | None  # of the whole tensor; None: it needs nothing
    kept: Box | None  # what it needs of its own
    sends: Parts
    receives: Parts
    pattern: Pattern
    group: Group = ()  # that does the transfer as a collective


def transfer(owned: Each, need: Each, device: int, *, everywhere: bool = False) -> Transfer:
    """A device's part of a transfer between the boxes that the devices own and those that they need.

    `everywhere`: all devices own the whole; each takes its own copy.
    """
    mine, wanted = owned[device], need[device]
    kept = _overlap(mine, wanted)
    inside = all(n is None or not n.volume or _overlap(o, n) == n for o, n in zip(owned, need, strict=True))
    if everywhere or inside:
        return Transfer(mine, wanted, kept, (), (), "local")
    others = [r for r in range(len(owned)) if r != device]
    sends = tuple((q, box) for q in others if (box := _overlap(mine, need[q])) is not None)
    receives = tuple((p, box) for p in others if (box := _overlap(owned[p], wanted)) is not None)
    pattern, group = _pattern(owned, need, device)
    return Transfer(mine, wanted, kept, sends, receives, pattern, group)


def groups_of(owned: Each, need: Each) -> set[Group]:
    """The groups of devices that do a transfer as collectives, where the network prefers these."""
    groups = {_pattern(owned, need, device)[1] for device in range(len(owned))}
    return groups - {()}


def _overlap(a: Box | None, b: Box | None) -> Box | None:
    if a is None or b is None:
        return None
    box = a & b
    return box if box.volume else None


def _pattern(owned: Each, need: Each, device: int) -> tuple[Pattern, Group]:
    """The regular collective that the part of `device` is, if any, and its group. All of them agree."""
    peers = [_peers(owned, need, r) for r in range(len(owned))]
    group = tuple(sorted(peers[device] | {device}))
    if any(peers[r] | {r} != set(group) for r in group) or len(group) == 1:
        return "messages", ()
    own, wanted = [owned[r] for r in group], [need[r] for r in group]
    if any(box is None for box in (*own, *wanted)):
        return "messages", ()
    volumes = {(a & b).volume for a in own for b in wanted if a is not None and b is not None}
    if len(volumes) > 1:
        return "messages", ()
    return ("gather" if len(set(wanted)) == 1 else "all-to-all"), group


def _peers(owned: Each, need: Each, device: int) -> set[int]:
    return {
        r
        for r in range(len(owned))
        if r != device and (_overlap(owned[device], need[r]) or _overlap(owned[r], need[device]))
    }
