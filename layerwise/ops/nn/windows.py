"""Helpers of window kernels: a cell's missing padding, and weighted sums over gathered positions."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import count
from typing import TYPE_CHECKING

import numpy as np

from layerwise.ops.base import Op
from layerwise.ops.facts import Local

if TYPE_CHECKING:
    import torch
    from torch import Tensor

Interval = tuple[int, int]  # half-open


class Windowed(Op):
    """An operator of windows over the last dimensions of its first input."""

    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]  # (low, high) a spatial dimension
    dilation: tuple[int, ...]

    def windows(self, lead: int) -> Iterator[tuple[int, int, int, int, tuple[int, int]]]:
        """For each spatial dimension, from `lead` on: its index, kernel, stride, dilation and padding."""
        return zip(count(lead), self.kernel, self.stride, self.dilation, self.padding, strict=False)


def interval(local: Local, dim: int) -> Interval:
    """The cell's interval in one dimension of the output."""
    return local.cell.lo[dim], local.cell.hi[dim]


def given(local: Local, dim: int, slot: int = 0) -> Interval:
    """The interval of an input's dimension that the kernel receives."""
    return local.needs[slot].lo[dim], local.needs[slot].hi[dim]


def margins(cell: Interval, need: Interval, stride: int, first: int, last: int) -> tuple[int, int]:
    """How many positions from lo*stride + first to (hi - 1)*stride + last are missing in `need`, low and high.

    These are padding, as all existing ones are received. If nothing is received, all count as low.
    """
    start, length = cell[0] * stride + first, (cell[1] - 1 - cell[0]) * stride + last - first + 1
    extent = need[1] - need[0]
    before = need[0] - start if extent else length
    return before, length - before - extent


def padded(
    x: Tensor, pads: Mapping[int, tuple[int, int]], value: float | None = None, mode: str = "constant"
) -> Tensor:
    """`x` with (low, high) more positions in these dimensions; a view if they are negative."""
    from torch.nn import functional

    for dim, (low, high) in pads.items():
        if low < 0 or high < 0:
            x = x.narrow(dim, max(-low, 0), x.shape[dim] + min(low, 0) + min(high, 0))
    more = {dim: (max(low, 0), max(high, 0)) for dim, (low, high) in pads.items() if low > 0 or high > 0}
    if not more:
        return x
    first = min(more) if mode == "constant" else min(*more, 2)  # torch then needs all spatial dimensions
    return functional.pad(x, [p for dim in reversed(range(first, x.dim())) for p in more.get(dim, (0, 0))], mode, value)


def along(t: Tensor, dim: int, rank: int) -> Tensor:
    """A vector as a tensor of `rank` dimensions, to multiply along `dim`."""
    return t.view(-1, *(1,) * (rank - dim - 1))


def constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A vector as a tensor."""
    import torch

    if torch.compiler.is_compiling():
        return torch.tensor(values, dtype=dtype, device=device)
    return _constant(values, dtype, device)


@lru_cache(maxsize=1024)
def _constant(values: tuple[float, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A small vector as a tensor, made once for every step, so that it is not sent to a device each time."""
    import torch

    with torch.inference_mode(False):  # otherwise it could not be used in training later
        return torch.tensor(values, dtype=dtype, device=device)


Taps = tuple[tuple[tuple[int, ...], tuple[float, ...] | None], ...]  # for each tap, (index, weight or None: all one)


def weighted(x: Tensor, dim: int, taps: Taps) -> Tensor:
    """Position y becomes the sum over taps of weight[y] times position index[y] of `x`."""
    import torch

    (first, weight), start = taps[0], taps[0][0][0]
    if len(taps) == 1 and weight is None and first == tuple(range(start, start + len(first))):
        return x.narrow(dim, start, len(first))
    wide = torch.float32 if x.dtype in (torch.float16, torch.bfloat16) else x.dtype  # as PyTorch's own kernels sum
    total: Tensor | None = None
    for index, weight in taps:
        term = x.index_select(dim, constant(index, torch.int64, x.device))
        if weight is not None:
            term = term * along(constant(weight, wide, x.device), dim, x.dim())
        total = term if total is None else total + term
    assert total is not None, "a position without taps"
    return total


def taps_of(matrix: np.ndarray) -> Taps:
    """The non-zero weights of `matrix` (inputs, outputs), as few taps as the widest column needs."""
    inputs, outputs = matrix.shape
    used = matrix != 0
    begin = used.argmax(0)
    width = int((inputs - used[::-1].argmax(0) - begin).max())
    if width == 1 and (matrix[begin, np.arange(outputs)] == 1).all():
        return ((tuple(begin.tolist()), None),)
    taps = []
    for tap in range(width):
        index = begin + tap
        weight = np.where(index < inputs, matrix[np.minimum(index, inputs - 1), np.arange(outputs)], 0.0)
        taps.append((tuple(np.minimum(index, inputs - 1).tolist()), tuple(weight.tolist())))
    return tuple(taps)
