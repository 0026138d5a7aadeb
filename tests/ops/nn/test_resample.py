"""Pads and interpolations: what they need, and that the cells of any configuration make the whole."""

import itertools
from dataclasses import replace
from itertools import product
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.geometry import Box
from layerwise.ops.base import space
from layerwise.ops.facts import Local
from layerwise.ops.fused import needed_box
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, Reference, cells, check_needs, each, flat, images, sample, whole
from tests.ops.kernels import check_kernel, check_split, degrees


def test_pads_of_borders_need_a_halo_not_everything() -> None:
    x = TensorSpec((1, 1, 100), ("n", "c", "l"))
    for mode, need in (("constant", (47, 49)), ("replicate", (47, 49)), ("reflect", (41, 55)), ("circular", (0, 100))):
        op = Pad(((0, 0), (0, 0), (3, 3)), mode)
        lo, hi = space(op, (x,)).needs[0][2](np.array([50]), np.array([52]))
        assert (int(lo[0]), int(hi[0])) == need, mode


def test_pads_that_repeat_the_border_need_what_is_inside_and_else_the_border() -> None:
    maps = space(Pad(((0, 0), (0, 0), (3, 2)), "replicate"), (TensorSpec((1, 1, 10), ("n", "c", "l")),)).needs[0][2]
    lo, hi = maps(np.array([0, 0, 4, 13, 0]), np.array([2, 5, 15, 15, 15]))
    assert list(zip(lo.tolist(), hi.tolist(), strict=True)) == [(0, 1), (0, 2), (1, 10), (9, 10), (0, 10)]


def test_pad_labels() -> None:
    x = TensorSpec((4, 6, 10, 5), ("n", "c", "h", "w"), units=(1, 2, 5, 1))
    out = Pad(((1, 0), (0, 0), (0, 5), (1, 1))).output(x)
    assert out == TensorSpec((5, 6, 15, 7), (None, "c", "h", "w"), units=(1, 2, 1, 1))
    channels = Pad(((0, 0), (0, 2), (0, 0), (0, 0))).output(x)
    assert channels == TensorSpec((4, 8, 10, 5), ("n", None, "h", "w"), units=(1, 1, 5, 1))


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
    assert Interpolate((20, 10)).output(x) == TensorSpec((4, 6, 20, 10), ("n", "c", "h", "w"), units=(1, 2, 1, 1))


@given(st.data())
def test_constant_pad(data: st.DataObject) -> None:
    """Every dimension, also by fewer positions than before."""
    x = data.draw(images(ranks=(0, 3), low=1, high=6))
    padding = tuple((data.draw(st.integers(-(e // 2), 4)), data.draw(st.integers(-((e - 1) // 2), 4))) for e in x.shape)
    op = Pad(padding, value=2.5)
    check_split(data, op, [x], lambda t: F.pad(t, flat(padding), value=2.5))


@given(st.data())
def test_other_pads(data: st.DataObject) -> None:
    x = data.draw(images(low=1, high=7))
    mode = data.draw(st.sampled_from(["reflect", "replicate", "circular"]))
    spatial = tuple(each(data.draw, 2, 0, max(e - 1, 0)) for e in x.shape[2:])
    op = Pad(((0, 0), (0, 0), *spatial), mode)
    check_split(data, op, [x], lambda t: F.pad(t, flat(spatial), mode), tight=False)


def test_pads_that_torch_has_not() -> None:
    """Of channels, and of fewer positions, by reflection."""
    x = TensorSpec((2, 5, 6), IMAGES[1])
    for mode in ("reflect", "replicate", "circular"):
        op = Pad(((0, 0), (2, -1), (-1, 3)), mode)
        for cuts in ((1, 1, 1), (2, 3, 2), (1, 1, 8), (1, 6, 1)):
            check_kernel(
                op, [x], cuts, lambda t, mode=mode: F.pad(F.pad(t[None], (0, 3, 2, 0), mode)[0, :, :-1], (-1, 0))
            )


MODES = {"nearest": "nearest", "nearest_exact": "nearest-exact", "cubic": "bicubic"}


def interpolated(op: Interpolate, t: Tensor) -> Tensor:
    rank = len(op.size)
    if op.mode == "cubic" and rank == 1:
        up = replace(op, size=(1, *op.size), scales=(1.0, *op.scales) if op.scales else ())
        return interpolated(up, t[:, :, None])[:, :, 0]
    name = MODES.get(op.mode) or ("linear", "bilinear", "trilinear")[rank - 1]
    corners = None if "nearest" in name else op.align_corners
    if op.scales:
        return F.interpolate(t, scale_factor=list(op.scales), mode=name, align_corners=corners)
    return F.interpolate(t, list(op.size), mode=name, align_corners=corners)


@st.composite
def interpolations(draw: st.DrawFn) -> tuple[Interpolate, TensorSpec]:
    mode = draw(st.sampled_from(["nearest", "nearest_exact", "linear", "cubic"]))
    x = draw(images(ranks=(1, 2) if mode == "cubic" else (1, 3), low=2, high=7))
    rank = len(x.shape) - 2
    align = mode in ("linear", "cubic") and draw(st.booleans())
    size, scales = each(draw, rank, 1, 15 - 3 * rank), ()
    how = draw(st.sampled_from(["size", "times", "scales"]))
    if how == "times":
        size = tuple(e * f for e, f in zip(x.shape[2:], each(draw, rank, 1, 4), strict=True))
    elif how == "scales" and not align:
        scales = tuple(draw(st.sampled_from([0.5, 0.7, 1.1, 1.3, 1.5, 2.0, 2.5, 3.0])) for _ in range(rank))
        size = tuple(int(np.floor(e * s)) for e, s in zip(x.shape[2:], scales, strict=True))
    return Interpolate(size, mode, align, scales), x


def reference(op: Interpolate, x: TensorSpec) -> Reference:
    """PyTorch's, without a gradient where its backward is not the adjoint of its forward.

    Such are bicubic that is given a scale but keeps the size, and nearest where float32 and float64 round differently.
    """
    t = sample(x).double().requires_grad_()
    out = interpolated(op, t)
    slope = sample(op.output(x)).double()
    (grad,) = torch.autograd.grad(out, t, slope)
    adjoint = torch.isclose((out * slope).sum(), (t * grad).sum(), rtol=1e-9, atol=1e-9)
    return lambda t: interpolated(op, t if adjoint else t.detach())


@given(st.data())
def test_interpolation(data: st.DataObject) -> None:
    op, x = data.draw(interpolations())
    where = space(op, (x,))
    # PyTorch reads neighbours also with weight zero, or of rounding errors; the cubic window is not the tightest.
    tight = op.mode != "cubic" and not op.scales
    check_needs(
        op, [x], data.draw(cells(where)), lambda t: interpolated(op, t), tight=tight, poison=10.0, resolution=1e-9
    )
    check_kernel(op, [x], data.draw(degrees(where)), reference(op, x))


@given(st.data())
def test_one_device_interpolates_as_torch(data: st.DataObject) -> None:
    """Bit by bit, in float32."""
    op, x = data.draw(interpolations().filter(lambda pair: pair[0].mode != "cubic" or len(pair[0].size) == 2))
    at, t = whole(op, [x]), sample(x)
    assert torch.equal(op.run(at, [t[at.needs[0].slices()]], {}), interpolated(op, t))


@pytest.mark.parametrize("mode", ["nearest", "nearest_exact"])
def test_nearest_rounds_as_torch(mode: Literal["nearest", "nearest_exact"]) -> None:
    """Its index is a product in float32: of 2 -> 82, position 41 is not 1 but 0."""
    for extent, size in product((2, 3, 5, 7), range(1, 131, 3)):
        op, x = Interpolate((size,), mode), TensorSpec((1, 1, extent), IMAGES[1])
        check_kernel(op, [x], (1, 1, min(size, 3)), reference(op, x))


def test_nearest_rounds_elsewhere_in_a_part() -> None:
    """In float32, position 123 of 4 -> 164 is 2; as position 82 of 3 -> 123 (one position further on), it were 3."""
    op, x = Interpolate((164,), "nearest"), TensorSpec((1, 1, 4), IMAGES[1])
    check_kernel(op, [x], (1, 1, 2), lambda t: interpolated(op, t), inputs=[sample(x)], tolerance=1e-5)


def test_reduced_precision_adds_in_float32() -> None:
    op, x = Interpolate((12, 12), "linear", align_corners=True), TensorSpec((1, 2, 8, 8), IMAGES[2])
    t = sample(x).bfloat16()
    where = space(op, (x,))
    cell = Box((0, 0, 4, 0), (1, 2, 8, 12))
    need = needed_box(where.needs[0], cell)
    out = op.run(Local(where, (x,), cell, (need,)), [t[need.slices()]], {})
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, interpolated(op, t)[:, :, 4:8], rtol=0.01, atol=0.01)
