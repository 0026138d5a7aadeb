"""Every rank has built the model by itself; where the values differ, rank 0's win, as with DDP."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import torch
from torch import Tensor

from layerwise.comm.base import Comm, CommError


def broadcast_values(held: Mapping[str, Tensor], comm: Comm) -> None:
    """Writes rank 0's parameters and buffers into those `held` by the others, where theirs differ.

    A model on the meta device has no values: they are drawn by position, alike on all ranks. CommError where the ranks
    have built different models.
    """
    if comm.size == 1:
        return
    facts = {name: [list(t.shape), str(t.dtype), None if t.is_meta else digest(t)] for name, t in held.items()}
    ranks = comm.all_gather_object(facts)
    for rank, theirs in enumerate(ranks):
        for name in dict.fromkeys((*ranks[0], *theirs)):
            ours, other = ranks[0].get(name), theirs.get(name)
            if ours is None or other is None or ours[:2] != other[:2] or (ours[2] is None) != (other[2] is None):
                what = "is missing" if ours is None or other is None else "has another shape, type or kind of device"
                raise CommError(
                    f"the ranks have built different models: {name!r} {what} on one of the ranks 0 and {rank}; build "
                    "the same model on every rank"
                )
    with torch.no_grad():
        for name, tensor in held.items():
            unlike = [rank for rank, theirs in enumerate(ranks) if theirs[name] != ranks[0][name]]
            _send(tensor, unlike, comm, f"the value of {name}")


def _send(tensor: Tensor, to: list[int], comm: Comm, what: str) -> None:
    if comm.rank == 0 and to:
        value = tensor.detach().to(comm.device).contiguous()
        comm.exchange([(rank, value) for rank in to], [], "io", what).wait()
    elif comm.rank in to:
        value = torch.empty(tensor.shape, dtype=tensor.dtype, device=comm.device)
        comm.exchange([], [(0, value)], "io", what).wait()
        tensor.detach().copy_(value)


def digest(tensor: Tensor) -> int:
    """Returns a checksum of its elements' bits."""
    flat = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
    return zlib.crc32(flat.numpy().data)
