"""Dimensions that a reshape merges and splits, and the boxes of both shapes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, pairwise
from math import prod
from operator import mul
from typing import TYPE_CHECKING

from layerwise.geometry import Box
from layerwise.tensor import TensorSpec

if TYPE_CHECKING:
    from torch import Tensor


def starts(shape: Sequence[int]) -> list[int]:
    """How often each dimension restarts in memory: the product of the extents outside it."""
    return list(accumulate(shape[:-1], mul, initial=1)) if shape else []


def heads(source: tuple[int, ...], target: tuple[int, ...]) -> Iterator[tuple[int, int, int, int]]:
    """Pairs (i, j) of dimensions longer than 1 that begin together, and the elements inside i and inside j.

    Inside: up to the next pair. So all dimensions between two pairs are merged and split among themselves.
    """
    begins = {start: i for i, start in enumerate(starts(source)) if source[i] > 1}
    to = {start: j for j, start in enumerate(starts(target)) if target[j] > 1}
    for start, stop in pairwise([*sorted(begins.keys() & to.keys()), prod(source)]):
        i, j, size = begins[start], to[start], stop // start
        yield i, j, size // source[i], size // target[j]


def ones(x: TensorSpec, target: tuple[int, ...]) -> dict[int, int]:
    """Pairs of size-1 dimensions of the input and the target: in order, those at the same place in memory.

    The samples (a batch of 1) stay as long as there is any such dimension.
    """
    pairs: dict[int, int] = {}
    begins, ends = starts(x.shape), starts(target)
    for i, start in enumerate(begins):
        if x.shape[i] == 1:
            before = sum(x.shape[other] == 1 and begins[other] == start for other in range(i))
            there = [j for j, extent in enumerate(target) if extent == 1 and ends[j] == start]
            if before < len(there):
                pairs[i] = there[before]
            elif there and x.dims[i] == "n":
                pairs[i] = there[-1]
    return pairs


def reshaped(x: Tensor, source: tuple[int, ...], given: Box, target: tuple[int, ...], wanted: Box) -> Tensor:
    """The box `wanted` of a tensor of shape `source` seen as `target`, where x is its box `given`.

    It is a view of x if torch can make one. Raises AssertionError if `wanted` is not in `given`.
    """
    if x.numel() == wanted.volume:
        return x.reshape(wanted.shape)  # the same elements, in the same order
    boxes = f"{given} of {source} does not hold {wanted} of {target}"
    if wanted.volume == 0:
        return x.flatten()[:0].view(wanted.shape)
    # More than `wanted`; a slice follows. Between two pairs of heads, x is a run of elements ...
    pairs = list(heads(source, target))
    runs = [(given.hi[i] - given.lo[i]) * inner for i, _, inner, _ in pairs]
    assert x.numel() == prod(runs), boxes
    x = x.reshape(runs)
    whole = list(target)
    for position, (i, j, inner, out_inner) in enumerate(pairs):
        start = wanted.lo[j] * out_inner - given.lo[i] * inner
        whole[j] = wanted.hi[j] - wanted.lo[j]
        assert 0 <= start <= runs[position] - whole[j] * out_inner, boxes
        x = x.narrow(position, start, whole[j] * out_inner)
    # ... and so is what the target's outermost dimension takes of it, whose inner dimensions are then cut.
    x = x.reshape(whole)
    outer = {j for _, j, _, _ in pairs}
    inner_ends = zip(wanted.lo, wanted.hi, strict=True)
    return x[tuple(slice(None) if j in outer else slice(*ends) for j, ends in enumerate(inner_ends))]
