"""Transfers: what a rank needs of a tensor and another owns, and the way back, the adjoint.

What travels is `needs & owned`, for every pair of ranks. How: a transfer where nothing travels is a slice. Where the
network prefers collectives (NCCL), ranks that all need a box of which each owns an equal part all-gather it (the way
back is a reduce-scatter), and ranks that need equal parts of each other exchange all to all. All else, and everything
on gloo (whose point-to-point messages in chunks are faster: tests/benchmarks), is a batch of point-to-point messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group, Kind
from layerwise.geometry import Box
from layerwise.run.place import Boxes

Parts = tuple[tuple[int, Box], ...]  # (peer, box)
Pattern = Literal["local", "messages", "gather", "all-to-all"]


@dataclass(frozen=True, slots=True)
class Transfer:
    """One rank's part of moving a tensor from those who own it to those who need it.

    own, need: this rank's boxes of the whole tensor, None where it has no part. kept: what it needs of its own.
    """

    own: Box | None
    need: Box | None
    kept: Box | None
    sends: Parts
    receives: Parts
    pattern: Pattern
    group: Group = ()

    def forward(self, comm: Comm, x: Tensor | None, like: Tensor, what: str, kind: Kind = "transfers") -> Tensor | None:
        """From the box `own` to the box `need`; `like` has the element type and device of what is received."""
        if self.pattern == "local":
            if self.need is None:
                return None
            return like.new_empty(self.need.shape) if self.kept is None else _part(x, self.own, self.kept)
        sent = [(peer, _part(x, self.own, box)) for peer, box in self.sends]
        received = [(peer, like.new_empty(box.shape)) for peer, box in self.receives]
        self._exchange(comm, x, sent, received, what, kind)
        if self.need is None:
            return None
        out = like.new_empty(self.need.shape)
        if self.kept is not None:
            out[self.kept.slices(self.need)] = _part(x, self.own, self.kept)
        for (_, box), (_, part) in zip(self.receives, received, strict=True):
            out[box.slices(self.need)] = part
        return out

    def adjoint(self, comm: Comm, g: Tensor | None, like: Tensor, what: str, kind: Kind = "transfers") -> Tensor | None:
        """The way back: gradients of `need` are added up in `own`, in the order of the ranks after this one's."""
        if self.pattern == "local":
            return None if self.own is None else self._own_part(g, like, own_only=True)
        sent = [(peer, _part(g, self.need, box)) for peer, box in self.receives]
        received = [(peer, like.new_empty(box.shape)) for peer, box in self.sends]
        if self.pattern == "gather" and comm.collectives:
            assert g is not None
            return self._reduce_scatter(comm, g, like, what)
        self._exchange(comm, g, sent, received, what, kind)
        if self.own is None:
            return None
        total = self._own_part(g, like, own_only=not received)
        for (_, box), (_, part) in zip(self.sends, received, strict=True):
            total[box.slices(self.own)] += part
        return total

    def _own_part(self, g: Tensor | None, like: Tensor, *, own_only: bool) -> Tensor:
        """What this rank's own gradient adds to its own box; a fresh tensor unless nothing else will be added."""
        assert self.own is not None
        if g is None or self.kept is None:
            return like.new_zeros(self.own.shape)
        part = _part(g, self.need, self.kept)
        if self.kept == self.own:
            return part if own_only else part.clone()
        total = like.new_zeros(self.own.shape)
        total[self.kept.slices(self.own)] = part
        return total

    def _exchange(
        self,
        comm: Comm,
        x: Tensor | None,
        sent: list[tuple[int, Tensor]],
        received: list[tuple[int, Tensor]],
        what: str,
        kind: Kind,
    ) -> None:
        if comm.collectives and self.pattern == "all-to-all" and self.group:
            _all_to_all(comm, self.group, sent, received, what, kind)
        elif comm.collectives and self.pattern == "gather" and x is not None:
            mine = sent[0][1].flatten()
            out = mine.new_empty((len(self.group), mine.numel()))
            comm.all_gather(out, mine, self.group, kind, what)
            for peer, part in received:
                part.copy_(out[self.group.index(peer)].view_as(part))
        else:
            comm.exchange([(peer, part.contiguous()) for peer, part in sent], received, kind, what)

    def _reduce_scatter(self, comm: Comm, g: Tensor, like: Tensor, what: str) -> Tensor:
        assert self.own is not None
        assert self.kept is not None
        boxes = dict(self.receives) | {comm.rank: self.kept}
        parts = torch.stack([_part(g, self.need, boxes[peer]).flatten() for peer in self.group])
        out = like.new_empty(parts.shape[1:])
        comm.reduce_scatter(out, parts, self.group, "transfers", what)
        if self.kept == self.own:
            return out.view(self.own.shape)
        total = like.new_zeros(self.own.shape)
        total[self.kept.slices(self.own)] = out.view(self.kept.shape)
        return total


def transfer(owned: Boxes, need: Boxes, rank: int, *, everywhere: bool = False) -> Transfer:
    """This rank's part of a transfer between the boxes that the ranks own and those that they need.

    `everywhere`: all ranks own the whole; each takes its own copy.
    """
    mine, wanted = owned[rank], need[rank]
    kept = _overlap(mine, wanted)
    inside = all(n is None or not n.volume or _overlap(o, n) == n for o, n in zip(owned, need, strict=True))
    if everywhere or inside:
        return Transfer(mine, wanted, kept, (), (), "local")
    ranks = [r for r in range(len(owned)) if r != rank]
    sends = tuple((q, box) for q in ranks if (box := _overlap(mine, need[q])) is not None)
    receives = tuple((p, box) for p in ranks if (box := _overlap(owned[p], wanted)) is not None)
    pattern, group = _pattern(owned, need, rank)
    return Transfer(mine, wanted, kept, sends, receives, pattern, group)


def groups_of(owned: Boxes, need: Boxes) -> set[Group]:
    """The groups of ranks that do a transfer as collectives, where the network prefers these."""
    found = {_pattern(owned, need, rank)[1] for rank in range(len(owned))}
    return found - {()}


def _overlap(a: Box | None, b: Box | None) -> Box | None:
    if a is None or b is None:
        return None
    box = a & b
    return box if box.volume else None


def _part(x: Tensor | None, origin: Box | None, box: Box) -> Tensor:
    assert x is not None
    return x if box == origin else x[box.slices(origin)]


def _pattern(owned: Boxes, need: Boxes, rank: int) -> tuple[Pattern, Group]:
    """Whether the exchanges that `rank` takes part in are a regular collective, and of whom. All of them agree."""
    peers = [_peers(owned, need, r) for r in range(len(owned))]
    group = tuple(sorted(peers[rank] | {rank}))
    if any(peers[r] | {r} != set(group) for r in group) or len(group) == 1:
        return "messages", ()
    own, wanted = [owned[r] for r in group], [need[r] for r in group]
    if any(box is None for box in (*own, *wanted)):
        return "messages", ()
    volumes = {(a & b).volume for a in own for b in wanted if a is not None and b is not None}
    if len(volumes) > 1:
        return "messages", ()
    return ("gather" if len(set(wanted)) == 1 else "all-to-all"), group


def _peers(owned: Boxes, need: Boxes, rank: int) -> set[int]:
    return {
        r for r in range(len(owned)) if r != rank and (_overlap(owned[rank], need[r]) or _overlap(owned[r], need[rank]))
    }


def _all_to_all(
    comm: Comm,
    group: Group,
    sent: Sequence[tuple[int, Tensor]],
    received: Sequence[tuple[int, Tensor]],
    what: str,
    kind: Kind,
) -> None:
    """Equal parts between all members; what stays here is not sent."""
    flat = {peer: part.reshape(-1) for peer, part in sent}
    size = next(iter(flat.values()))
    empty = size.new_zeros(size.shape)
    out = size.new_empty((len(group), *size.shape))
    comm.all_to_all(out, torch.stack([flat.get(peer, empty) for peer in group]), group, kind, what)
    for peer, part in received:
        part.copy_(out[group.index(peer)].view_as(part))
