"""Moved: for each edge, the elements that a device needs, owns, receives and sends, and their memory."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from layerwise.geometry import Box, interval_overlap
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.ops.facts import Maps
from layerwise.partition.groups import Group
from layerwise.partition.place import Boxes, Each, Place
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Moved:
    """Elements of one edge on each of N devices; arrays are (N,)."""

    need: Floats  # of the needed box
    owned: Floats  # of these, owned by the device itself
    received: Floats
    sent: Floats
    local: bool  # nothing is sent
    forth: Floats  # of what it sends forward, the part that must be made contiguous first
    back: Floats  # the same for what it sends backward


def moved(source: Place, maps: Maps, target: Boxes) -> Moved:
    """The boxes that move from the owners of a tensor to devices that need `maps` of it for their box `target`."""
    own, need = source.owned, target.needs(maps)
    volume = need.volume
    owned = own.overlap(need)
    local = source.everywhere or bool((~need.active | (volume == owned)).all())
    zero = np.zeros_like(owned)
    if local:
        return Moved(volume, owned, zero, zero, True, zero, zero)
    forth = np.zeros(len(owned), np.bool_)
    sent = np.where(own.active, 1.0, 0.0)
    back = np.zeros(len(owned), np.bool_)
    for j, axis in enumerate(maps):
        lo, hi = np.zeros(1, np.int64), np.ones(1, np.int64)
        if axis.source is not None and target.cuts:
            lo, hi = target.cuts[axis.source][:-1], target.cuts[axis.source][1:]
        length, contiguous = _parts(own, j, *axis(lo, hi))
        sent = sent * length
        forth |= ~contiguous
        back |= ~_parts(need, j, own.cuts[j][:-1], own.cuts[j][1:])[1]
    driven = {axis.source for axis in maps}
    sent = sent * np.prod([len(cuts) - 1 for i, cuts in enumerate(target.cuts) if i not in driven])
    received, sent = volume - owned, np.maximum(sent - owned, 0.0)
    return Moved(volume, owned, received, sent, False, np.where(forth, sent, 0.0), np.where(back, received, 0.0))


def _parts(boxes: Boxes, dim: int, lo: Ints, hi: Ints) -> tuple[Floats, Mask]:
    """Elements of each box in the parts [lo, hi) of one dimension, and whether all these pieces are contiguous.

    They are if no dimension lies outside that one, or they are the full box.
    """
    lengths = interval_overlap(boxes.lo[:, dim, None], boxes.hi[:, dim, None], lo, hi)
    whole = ((lengths == 0) | (lengths == (boxes.hi - boxes.lo)[:, dim, None])).all(1)
    outermost = (boxes.hi - boxes.lo)[:, :dim].prod(1) <= 1
    return lengths.sum(1).astype(np.float64), whole | outermost


def outputs(source: Place, spec: TensorSpec, io: str, *, loss: bool = False) -> Moved:
    """The transfer of outputs if every device feeds the full batch (io free).

    All devices get the full outputs; backward, each continues with its own part of the gradient, which all have
    computed alike. If each reads boxes (io boxes), it keeps its own box of an output, and gets the full loss and
    outputs without samples.
    """
    own, zero = source.owned, np.zeros(len(source.owned.lo))
    if io == "boxes" and not loss and spec.index("n") is not None:
        return Moved(own.volume, own.volume, zero, zero, True, zero, zero)
    whole = np.full_like(zero, spec.volume)
    received = whole - own.volume
    return Moved(whole, own.volume, received, zero, bool((received == 0).all()), zero, zero)


Parts = tuple[tuple[int, Box], ...]  # (peer, box)
Pattern = Literal["local", "messages", "gather", "all-to-all"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One device's part of moving a tensor from its owners to those who need it."""

    own: Box | None  # in the full tensor; None: it owns nothing
    need: Box | None  # in the full tensor; None: it needs nothing
    kept: Box | None  # the needed part that it owns itself
    sends: Parts
    receives: Parts
    pattern: Pattern
    group: Group = ()  # if it runs as a collective


def transfer(owned: Each, need: Each, device: int, *, everywhere: bool = False, by_messages: bool = False) -> Transfer:
    """A device's part of a transfer between the boxes that the devices own and those that they need.

    `everywhere`: all devices own the full tensor, and each uses its own copy. `by_messages`: no collective is prepared
    for it.
    """
    mine, wanted = owned[device], need[device]
    kept = _overlap(mine, wanted)
    inside = all(n is None or not n.volume or _overlap(o, n) == n for o, n in zip(owned, need, strict=True))
    if everywhere or inside:
        return Transfer(mine, wanted, kept, (), (), "local")
    others = [r for r in range(len(owned)) if r != device]
    sends = tuple((q, box) for q in others if (box := _overlap(mine, need[q])) is not None)
    receives = tuple((p, box) for p in others if (box := _overlap(owned[p], wanted)) is not None)
    pattern, group = ("messages", ()) if by_messages else _pattern(owned, need, device)
    return Transfer(mine, wanted, kept, sends, receives, pattern, group)


def groups_of(owned: Each, need: Each) -> set[Group]:
    """The groups of devices that run a transfer as collectives, on networks that prefer these."""
    groups = {_pattern(owned, need, device)[1] for device in range(len(owned))}
    return groups - {()}


def _overlap(a: Box | None, b: Box | None) -> Box | None:
    if a is None or b is None:
        return None
    box = a & b
    return box if box.volume else None


def _pattern(owned: Each, need: Each, device: int) -> tuple[Pattern, Group]:
    """The regular collective that `device` takes part in, if any, and its group. All members agree."""
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
