"""Buckets: the rule by which gradients travel together, on every member of a group alike."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from layerwise.partition.buckets import BUCKET_BYTES, CAPS, FIRST_BUCKET_BYTES, fill, flushed_after

MB = 2**20
GRADIENTS = st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 30 * MB)), max_size=20)


@given(GRADIENTS)
def test_each_gradient_travels_once_with_its_own_group(gradients: list[tuple[str, int]]) -> None:
    found = fill(gradients)
    assert sorted(i for bucket in found for i in bucket) == list(range(len(gradients)))
    assert all(len({gradients[i][0] for i in bucket}) == 1 for bucket in found)
    assert [bucket[0] for bucket in found] == sorted(bucket[0] for bucket in found)


@given(GRADIENTS, st.sampled_from([*CAPS, MB // 2]))
def test_a_bucket_ends_with_the_gradient_that_fills_it(gradients: list[tuple[str, int]], cap: int) -> None:
    """The first of its group at 1 MiB at most, the others at the plan's, 25 by default."""
    assert fill(gradients) == fill(gradients, BUCKET_BYTES)
    for group in "ab":
        mine = [bucket for bucket in fill(gradients, cap) if gradients[bucket[0]][0] == group]
        for number, bucket in enumerate(mine):
            limit = cap if number else min(FIRST_BUCKET_BYTES, cap)
            size = [gradients[i][1] for i in bucket]
            assert sum(size[:-1]) < limit
            assert sum(size) >= limit or number == len(mine) - 1


@given(GRADIENTS)
def test_what_else_a_device_has_does_not_matter(gradients: list[tuple[str, int]]) -> None:
    """Two members of group a fill its buckets alike, though one is in group b, too."""
    own = [number for number, (group, _) in enumerate(gradients) if group == "a"]
    alone = [[own[i] for i in bucket] for bucket in fill(gradients[i] for i in own)]
    assert [bucket for bucket in fill(gradients) if gradients[bucket[0]][0] == "a"] == alone


@given(GRADIENTS, st.lists(st.integers(1, 7), min_size=2, max_size=2))
def test_a_bucket_waits_for_those_before_it_on_each_of_its_devices(
    gradients: list[tuple[str, int]], devices: list[int]
) -> None:
    """Found device by device: each goes through its own buckets in order, as the runtime does."""
    buckets = fill(gradients)
    of = dict(zip("ab", devices, strict=True))  # bits: which of three devices are in a group
    inside = [[d for d in range(3) if of[gradients[numbers[0]][0]] >> d & 1] for numbers in buckets]
    masks = [np.isin(np.arange(3), here) for here in inside]
    reached = dict.fromkeys(range(3), 0)
    expected = list[int]()
    for numbers, here in zip(buckets, inside, strict=True):
        reached |= {d: max(reached[d], numbers[-1]) for d in here}
        expected.append(max(reached[d] for d in here))
    assert flushed_after(buckets, ["all"] * len(buckets), masks) == expected
