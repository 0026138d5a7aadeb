"""Padding and interpolation need what the real ones read."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, each, images

NAMES = {"linear": ("linear", "bilinear", "trilinear"), "cubic": ("", "bicubic", "")}


def flat(pads: tuple[tuple[int, int], ...]) -> list[int]:
    """As torch has them: last dimension first."""
    return [p for pair in reversed(pads) for p in pair]


@given(st.data())
def test_constant_pad_needs(data: st.DataObject) -> None:
    """Every dimension, also fewer positions than before."""
    x = data.draw(images(ranks=(0, 2), low=3, high=6))
    pads = tuple((data.draw(st.integers(-(e // 2), 3)), data.draw(st.integers(-((e - 1) // 2), 3))) for e in x.shape)
    op = Pad(pads, value=2.0)
    cell = data.draw(cells(space(op, (x,))))
    check_needs(op, [x], cell, lambda t: F.pad(t, flat(pads), value=2.0))


@given(st.data())
def test_other_pads_need(data: st.DataObject) -> None:
    x = data.draw(images(low=3, high=7))
    mode = data.draw(st.sampled_from(["reflect", "replicate", "circular"]))
    spatial = tuple((data.draw(st.integers(0, e - 1)), data.draw(st.integers(0, e - 1))) for e in x.shape[2:])
    op = Pad(((0, 0), (0, 0), *spatial), mode)
    cell = data.draw(cells(space(op, (x,))))
    check_needs(op, [x], cell, lambda t: F.pad(t, flat(spatial), mode), tight=False)


def test_pads_of_borders_need_a_halo_not_everything() -> None:
    x = TensorSpec((1, 1, 100), ("n", "c", "l"))
    for mode, need in (("constant", (47, 49)), ("replicate", (44, 52)), ("reflect", (41, 55)), ("circular", (0, 100))):
        op = Pad(((0, 0), (0, 0), (3, 3)), mode)
        lo, hi = space(op, (x,)).needs[0][2](np.array([50]), np.array([52]))
        assert (int(lo[0]), int(hi[0])) == need, mode


def test_pad_labels_and_limits() -> None:
    x = TensorSpec((4, 6, 10, 5), ("n", "c", "h", "w"), units=(1, 2, 5, 1))
    out = Pad(((1, 0), (0, 0), (0, 5), (1, 1))).output(x)
    assert out == TensorSpec((5, 6, 15, 7), (None, "c", None, "w"), units=(1, 2, 1, 1))
    with pytest.raises(LayerwiseError, match="pairs of pads"):
        Pad(((1, 1),)).output(x)
    with pytest.raises(LayerwiseError, match="at most 4, not 5, 0"):
        Pad(((0, 0), (0, 0), (0, 0), (5, 0)), "reflect").output(x)
    with pytest.raises(LayerwiseError, match="leave nothing"):
        Pad(((0, 0), (0, 0), (0, 0), (-3, -2))).output(x)


def interpolated(op: Interpolate, t: Tensor) -> Tensor:
    rank = len(op.size)
    name = {"nearest_exact": "nearest-exact"}.get(op.mode) or NAMES.get(op.mode, (op.mode,) * 3)[rank - 1]
    corners = op.align_corners if op.mode in NAMES else None
    if op.scales:
        return F.interpolate(t, scale_factor=list(op.scales), mode=name, align_corners=corners)
    return F.interpolate(t, list(op.size), mode=name, align_corners=corners)


@given(st.data())
def test_interpolation_needs(data: st.DataObject) -> None:
    mode = data.draw(st.sampled_from(["nearest", "nearest_exact", "linear", "cubic"]))
    x = data.draw(images(ranks=(2, 2) if mode == "cubic" else (1, 3), low=2, high=7))
    rank = len(x.shape) - 2
    align = mode in NAMES and data.draw(st.booleans())
    size, scales = each(data.draw, rank, 1, 15), ()
    if not align and data.draw(st.booleans()):
        scales = tuple(data.draw(st.sampled_from([0.5, 0.7, 1.3, 1.5, 2.0, 2.5, 3.0])) for _ in range(rank))
        size = tuple(int(np.floor(e * s)) for e, s in zip(x.shape[2:], scales, strict=True))
    op = Interpolate(size, mode, align, scales)
    cell = data.draw(cells(space(op, (x,))))
    # PyTorch reads neighbours also with weight zero, or of rounding errors; the cubic window is not the tightest.
    tight = mode != "cubic" and not scales
    check_needs(op, [x], cell, lambda t: interpolated(op, t), tight=tight, poison=10.0, resolution=1e-9)


@pytest.mark.parametrize("mode", ["nearest", "nearest_exact"])
def test_nearest_neighbours_as_rounded(mode: str) -> None:
    """PyTorch's index is a product in float32; what we declare has it, and is one element where that is exact."""
    wide = 0
    for extent, size in itertools.product(range(1, 12), range(1, 131)):
        op = Interpolate((size,), mode)
        real = interpolated(op, torch.arange(extent, dtype=torch.float32)[None, None]).flatten().numpy().astype(int)
        x = TensorSpec((1, 1, extent), ("n", "c", "l"))
        index = np.arange(size)
        lo, hi = space(op, (x,)).needs[0][2](index, index + 1)
        assert (lo <= real).all(), (extent, size)
        assert (real < hi).all(), (extent, size)
        wide += bool((hi - lo > 1).any())
    assert 0 < wide < 50


def test_interpolation_labels() -> None:
    x = TensorSpec((4, 6, 10, 5), ("n", "c", "h", "w"), units=(1, 2, 5, 1))
    assert Interpolate((20, 10)).output(x) == TensorSpec((4, 6, 20, 10), ("n", "c", None, "w"), units=(1, 2, 1, 1))
    with pytest.raises(LayerwiseError, match="cannot resample 4"):
        Interpolate((1, 2, 3, 4)).output(x)
