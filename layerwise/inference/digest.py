"""Digest: identifies a model's values, whatever plan splits them, so that results of other values are not reused."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator

import torch
from torch import Tensor

from layerwise.comm.together import agree
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.state.state import Shard

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element
CHUNK = 1 << 20  # elements read together
FACTORS = (0x2545F4914F6CDD1D, 0x369DEA0F31A53F85, 0x27BB2EE687B0B0FD)  # odd, below 2^63 (Steele and Vigna, 2021)


def values_digest(model: ParallelModule, *settings: object) -> str:
    """Returns a digest of all parameters, buffers, autocast, and the text of `settings`. Every rank must call it.

    It is the sum, modulo 2^64, of a number for each element and its position in the full tensor, so boxes add up.
    """

    def act() -> tuple[None, dict[str, int]]:
        return None, {
            f"{s.name} {s.shape} {s.tensor.dtype}": _sum(s) for s in model.shards() if s.first and s.tensor.numel()
        }

    total: Counter[str] = Counter()
    for sums in agree(of(model).comm, act)[1]:
        total.update(sums)
    values = {name: value % (1 << 64) for name, value in sorted(total.items())}
    text = json.dumps([values, str(of(model).runtime_options.autocast), *map(str, settings)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@torch.no_grad()
def _sum(shard: Shard) -> int:
    total = 0
    for bits, places in zip(torch.split(_bits(shard.tensor), CHUNK), _places(shard), strict=True):
        mixed = bits.long() * FACTORS[0] + places * FACTORS[1]
        mixed = (mixed ^ (mixed >> 29)) * FACTORS[2]
        total += int((mixed ^ (mixed >> 32)).sum())
    return total


def _bits(tensor: Tensor) -> Tensor:
    """Returns a tensor's elements as integers, in a row; both parts of complex ones."""
    values = torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()
    return values.contiguous().reshape(-1).view(BITS[values.element_size()])


def _places(shard: Shard) -> Iterator[Tensor]:
    """Yields the positions in the full tensor of the elements of `_bits`, row-major, chunk by chunk."""
    shape, lo, extents = shard.shape, shard.box.lo, shard.box.shape
    if shard.tensor.is_complex():
        shape, lo, extents = (*shape, 2), (*lo, 0), (*extents, 2)
    count = torch.Size(extents).numel()
    for begin in range(0, count, CHUNK):
        inside = torch.arange(begin, min(begin + CHUNK, count), device=shard.tensor.device)
        places, inner, stride = torch.zeros_like(inside), 1, 1
        for full, first, extent in zip(reversed(shape), reversed(lo), reversed(extents), strict=True):
            places += (inside // inner % extent + first) * stride
            inner, stride = inner * extent, stride * full
        yield places
