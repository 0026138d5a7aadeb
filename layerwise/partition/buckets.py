"""Buckets: which gradients are sent together, by DistributedDataParallel's rule."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence

import numpy as np

from layerwise.geometry.arrays import Ints, Mask

BUCKET_BYTES = 25 * 2**20  # DistributedDataParallel's default bucket_cap_mb
CAPS = tuple(mib * 2**20 for mib in (25, 10, 5, 2, 1))  # the bucket sizes that a plan may have
FIRST_BUCKET_BYTES = 2**20  # so that communication begins early: DistributedDataParallel's _DEFAULT_FIRST_BUCKET_BYTES


ALONE = 0.0  # bytes of gradients that fill no bucket: all of one group share one


def fill(gradients: Iterable[tuple[Hashable, float]], cap_bytes: float = BUCKET_BYTES) -> list[list[int]]:
    """The indices in `gradients` of each bucket; buckets are in the order in which they begin.

    gradients: for each, in the order of the backward pass, the group that shares it (only one group's gradients share a
    bucket), and its bytes. A bucket takes gradients until it has `cap_bytes`, and is sent with its last one. The first
    bucket of a group is small: of the group, not of the device, as all members must fill buckets alike.
    """
    buckets: list[list[int]] = []
    filling: dict[Hashable, tuple[list[int], float]] = {}  # by group: the bucket, and its remaining room
    for number, (group, size_bytes) in enumerate(gradients):
        bucket, room = filling.get(group, (None, 0.0))
        if bucket is None or room <= 0:
            room = min(FIRST_BUCKET_BYTES, cap_bytes) if bucket is None else cap_bytes
            bucket = []
            buckets.append(bucket)
        bucket.append(number)
        filling[group] = bucket, room - size_bytes
    return buckets


def flushed_after(buckets: Sequence[Sequence[int]], queues: Sequence[Hashable], members: Sequence[Mask]) -> list[int]:
    """The index of the gradient after which each bucket of `fill` is flushed.

    A device begins the sums of a queue in the order of its buckets: a full one waits for those before it. A bucket is
    flushed when all its members, (N,) flags, have reached it.
    """
    last: dict[Hashable, Ints] = {}
    found: list[int] = []
    for numbers, queue, mask in zip(buckets, queues, members, strict=True):
        reached = last.setdefault(queue, np.zeros(len(mask), np.int64))
        reached[mask] = np.maximum(reached[mask], max(numbers))
        found.append(int(reached[mask].max()))
    return found
