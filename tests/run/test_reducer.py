"""Buckets of gradients: the same on every rank of a group, whatever else a rank has."""

import torch
from torch import nn

from layerwise.partition.buckets import BUCKET_BYTES, FIRST_BUCKET_BYTES
from layerwise.run.execute.reducer import GradientReducer


def test_all_ranks_of_a_group_fill_the_same_buckets() -> None:
    """Ranks 0 and 2 alone have the last layer; the others' first gradients are of the layers before it."""
    names = ["last", "third", "second", "first"]
    items = FIRST_BUCKET_BYTES // 4 + 1
    parameters = {name: nn.Parameter(torch.empty(items, device="meta")) for name in names}
    everyone = (0, 1, 2, 3)

    def shared(rank: int) -> list[list[str]]:
        own = names if rank in (0, 2) else names[1:]
        groups = {name: (0, 2) if name == "last" else everyone for name in own}
        made = GradientReducer({name: parameters[name] for name in own}, own, groups)
        return [bucket.names for bucket in made.buckets if bucket.group == everyone]

    assert shared(0) == shared(1) == [["third"], ["second", "first"]]


def test_buckets_are_full_at_what_the_plan_says() -> None:
    names = [f"w{i}" for i in range(8)]
    parameters = {name: nn.Parameter(torch.empty(2**16, device="meta")) for name in names}  # 256 KiB each
    groups = dict.fromkeys(names, (0, 1))
    sizes = {}
    for cap in (BUCKET_BYTES, 2**19, 2**16):
        sizes[cap] = [len(b.names) for b in GradientReducer(parameters, names, groups, bucket_bytes=cap).buckets]
    assert sizes == {BUCKET_BYTES: [4, 4], 2**19: [2] * 4, 2**16: [1] * 8}
