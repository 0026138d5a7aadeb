"""Exchange: a transfer on torch.distributed, and the way back, its adjoint.

Everything on gloo is messages, whose chunks are faster there than its collectives (tests/benchmarks).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.comm.base import Comm, Group, Kind
from layerwise.geometry import Box
from layerwise.partition.transfer import Transfer


def forward(
    t: Transfer, comm: Comm, x: Tensor | None, like: Tensor, what: str, kind: Kind = "transfers"
) -> Tensor | None:
    """From the box `own` to the box `need`; `like` has the element type and device of what is received."""
    if t.pattern == "local":
        if t.need is None:
            return None
        return like.new_empty(t.need.shape) if t.kept is None else _part(x, t.own, t.kept)
    sent = [(peer, _part(x, t.own, box)) for peer, box in t.sends]
    received = [(peer, like.new_empty(box.shape)) for peer, box in t.receives]
    _exchange(t, comm, x, sent, received, what, kind)
    if t.need is None:
        return None
    out = like.new_empty(t.need.shape)
    if t.kept is not None:
        out[t.kept.slices(t.need)] = _part(x, t.own, t.kept)
    for (_, box), (_, part) in zip(t.receives, received, strict=True):
        out[box.slices(t.need)] = part
    return out


def adjoint(
    t: Transfer, comm: Comm, g: Tensor | None, like: Tensor, what: str, kind: Kind = "transfers"
) -> Tensor | None:
    """The way back: gradients of `need` are added up in `own`, in the order of the ranks after this one's."""
    if t.pattern == "local":
        return None if t.own is None else _own_part(t, g, like, own_only=True)
    sent = [(peer, _part(g, t.need, box)) for peer, box in t.receives]
    received = [(peer, like.new_empty(box.shape)) for peer, box in t.sends]
    if t.pattern == "gather" and comm.collectives:
        assert g is not None
        return _reduce_scatter(t, comm, g, like, what)
    _exchange(t, comm, g, sent, received, what, kind)
    if t.own is None:
        return None
    total = _own_part(t, g, like, own_only=not received)
    for (_, box), (_, part) in zip(t.sends, received, strict=True):
        total[box.slices(t.own)] += part
    return total


def _own_part(t: Transfer, g: Tensor | None, like: Tensor, *, own_only: bool) -> Tensor:
    """What this rank's own gradient adds to its own box; a fresh tensor unless nothing else will be added."""
    assert t.own is not None
    if g is None or t.kept is None:
        return like.new_zeros(t.own.shape)
    part = _part(g, t.need, t.kept)
    if t.kept == t.own:
        return part if own_only else part.clone()
    total = like.new_zeros(t.own.shape)
    total[t.kept.slices(t.own)] = part
    return total


def _exchange(
    t: Transfer,
    comm: Comm,
    x: Tensor | None,
    sent: list[tuple[int, Tensor]],
    received: list[tuple[int, Tensor]],
    what: str,
    kind: Kind,
) -> None:
    if comm.collectives and t.pattern == "all-to-all" and t.group:
        _all_to_all(comm, t.group, sent, received, what, kind)
    elif comm.collectives and t.pattern == "gather" and x is not None:
        mine = sent[0][1].flatten()
        out = mine.new_empty((len(t.group), mine.numel()))
        comm.all_gather(out, mine, t.group, kind, what)
        for peer, part in received:
            part.copy_(out[t.group.index(peer)].view_as(part))
    else:
        comm.exchange([(peer, part.contiguous()) for peer, part in sent], received, kind, what)


def _reduce_scatter(t: Transfer, comm: Comm, g: Tensor, like: Tensor, what: str) -> Tensor:
    assert t.own is not None
    assert t.kept is not None
    boxes = dict(t.receives) | {comm.rank: t.kept}
    parts = torch.stack([_part(g, t.need, boxes[peer]).flatten() for peer in t.group])
    out = like.new_empty(parts.shape[1:])
    comm.reduce_scatter(out, parts, t.group, "transfers", what)
    if t.kept == t.own:
        return out.view(t.own.shape)
    total = like.new_zeros(t.own.shape)
    total[t.kept.slices(t.own)] = out.view(t.kept.shape)
    return total


def _part(x: Tensor | None, origin: Box | None, box: Box) -> Tensor:
    assert x is not None
    return x if box == origin else x[box.slices(origin)]


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
