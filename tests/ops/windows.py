"""What the tests of kernels with windows have in common."""

from __future__ import annotations

import torch
from hypothesis import strategies as st
from torch import Tensor

from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local
from layerwise.tensor import TensorSpec
from tests.ops.harness import each, needed


def flat(pads: tuple[tuple[int, int], ...]) -> list[int]:
    """As torch has them: last dimension first."""
    return [p for pair in reversed(pads) for p in pair]


def pairs(draw: st.DrawFn, rank: int, low: int, high: int, *, symmetric: bool) -> tuple[tuple[int, int], ...]:
    firsts = each(draw, rank, low, high)
    return tuple(zip(firsts, firsts if symmetric else each(draw, rank, low, high), strict=True))


def whole(op: Op, *specs: TensorSpec, training: bool = True) -> Local:
    """The cell of one device."""
    where = space(op, specs)
    cell = Box((0,) * len(where.dims), tuple(d.extent for d in where.dims))
    return Local(where, specs, cell, tuple(needed(m, cell) for m in where.needs), training)


def sample(x: TensorSpec) -> Tensor:
    return torch.randn(x.shape, generator=torch.Generator().manual_seed(1))
