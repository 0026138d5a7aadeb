"""Kernels of windows: the cells of any configuration make the whole operator, forward and backward."""

from __future__ import annotations

from dataclasses import replace
from itertools import product
from math import prod
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from layerwise.geometry import Box
from layerwise.ops.base import Local, Op, space
from layerwise.ops.conv import Conv, ConvTranspose
from layerwise.ops.pool import AdaptivePool, Pool
from layerwise.ops.resample import Interpolate, Pad
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, Reference, each, images, needed
from tests.ops.harness import parameters as random_parameters
from tests.ops.kernels import check_kernel, degrees

CONV = (F.conv1d, F.conv2d, F.conv3d)
CONV_TRANSPOSE = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
ADAPTIVE = {
    "max": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "average": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
}


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


# Convolution


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Conv, TensorSpec]:
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3, 4]))
    per_in, per_out = draw(st.integers(1, 5 if groups == 1 else 2)), draw(st.integers(1, 4))
    kernel, dilation = each(draw, rank, 1, 5 - rank), each(draw, rank, 1, 3)
    padding = pairs(draw, rank, 0, 4, symmetric=draw(st.booleans()))
    fits = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    spatial = tuple(max(draw(st.integers(1, 11 - 2 * rank)), f - sum(p)) for f, p in zip(fits, padding, strict=True))
    op = Conv(groups * per_out, kernel, each(draw, rank, 1, 4), padding, dilation, groups, draw(st.booleans()))
    return op, TensorSpec((draw(st.integers(1, 3)), groups * per_in, *spatial), IMAGES[rank])


def convolved(op: Conv, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    padded = F.pad(x, flat(op.padding))
    return CONV[len(op.kernel) - 1](padded, weight, bias, op.stride, 0, op.dilation, op.groups)


@given(st.data())
def test_convolution(data: st.DataObject) -> None:
    op, x = data.draw(convolutions())
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), lambda *a, **k: convolved(op, *a, **k))


def conv(out: int, kernel: int, stride: int = 1, padding: int = 0, dilation: int = 1, groups: int = 1) -> Conv:
    return Conv(out, (kernel,) * 2, (stride,) * 2, ((padding, padding),) * 2, (dilation,) * 2, groups)


@pytest.mark.parametrize(
    ("op", "shape", "cuts"),
    [
        (conv(6, 11, 4, 2), (2, 3, 67, 61), (1, 1, 5, 3, 1)),  # AlexNet
        (conv(6, 7, 2, 3), (2, 3, 33, 32), (2, 2, 4, 3, 1)),  # ResNet's stem
        (conv(4, 3, 1, 1), (1, 5, 14, 14), (1, 2, 7, 2, 3)),
        (conv(4, 1, 2), (2, 3, 9, 9), (1, 1, 5, 1, 3)),  # a shortcut
        (conv(4, 3, 1, 6, 6), (1, 2, 9, 9), (1, 1, 3, 3, 1)),  # atrous, cells that see little but padding
        (conv(8, 3, 1, 1, 1, 8), (2, 8, 7, 7), (1, 3, 2, 2)),  # depthwise
        (conv(16, 3, 1, 1, 1, 4), (2, 8, 5, 5), (1, 5, 1, 1)),  # cells of 3 and 4 channels, groups of 4
        (conv(12, 3, 1, 1, 1, 2), (2, 4, 5, 5), (1, 5, 2, 1)),
        (conv(4, 1, 3, 2), (1, 2, 5, 5), (1, 1, 3, 3, 1)),  # a cell of padding alone, smaller than a stride
    ],
)
def test_known_convolutions(op: Conv, shape: tuple[int, ...], cuts: tuple[int, ...]) -> None:
    check_kernel(op, [TensorSpec(shape, IMAGES[2])], cuts, lambda *a, **k: convolved(op, *a, **k))


def test_merged_channels_are_reduced_by_units() -> None:
    x = TensorSpec((2, 6, 5), IMAGES[1], units=(1, 3, 1))
    op = Conv(4, (3,), (1,), ((1, 1),), (1,))
    check_kernel(op, [x], (2, 2, 2, 2), lambda *a, **k: convolved(op, *a, **k))


# Transposed convolution


@st.composite
def transposed(draw: st.DrawFn) -> tuple[ConvTranspose, TensorSpec]:
    rank, groups = draw(st.integers(1, 3)), draw(st.sampled_from([1, 1, 2, 3]))
    kernel, dilation, stride = each(draw, rank, 1, 5 - rank), each(draw, rank, 1, 2), each(draw, rank, 1, 4)
    extra = tuple(draw(st.integers(0, max(s, d) - 1)) for s, d in zip(stride, dilation, strict=True))
    padding = pairs(draw, rank, 0, 3, symmetric=draw(st.booleans()))
    spatial = tuple(  # such that something is left
        max(draw(st.integers(1, 6 - rank)), -(-(sum(p) - d * (k - 1) - e) // s) + 1)
        for p, k, d, e, s in zip(padding, kernel, dilation, extra, stride, strict=True)
    )
    x = TensorSpec((draw(st.integers(1, 2)), groups * draw(st.integers(1, 3)), *spatial), IMAGES[rank])
    out = groups * draw(st.integers(1, 3))
    return ConvTranspose(out, kernel, stride, padding, extra, dilation, groups, draw(st.booleans())), x


def deconvolved(op: ConvTranspose, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """All that the inputs reach, then cropped by the padding, then with some zeros, then with the bias."""
    full = CONV_TRANSPOSE[len(op.kernel) - 1](x, weight, None, op.stride, 0, 0, op.groups, op.dilation)
    room = F.pad(full, flat(tuple((0, extra) for extra in op.output_padding)))
    out = room[(..., *(slice(low, e - high) for (low, high), e in zip(op.padding, room.shape[2:], strict=True)))]
    return out if bias is None else out + bias.reshape(-1, *(1 for _ in op.kernel))


@given(st.data())
def test_transposed_convolution(data: st.DataObject) -> None:
    op, x = data.draw(transposed())
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), lambda *a, **k: deconvolved(op, *a, **k))


@pytest.mark.parametrize("module", [nn.Conv1d(6, 4, 3), nn.Conv2d(6, 4, (3, 5), groups=2), nn.ConvTranspose2d(6, 4, 5)])
def test_initial_values(module: nn.Conv2d) -> None:
    """As torch.nn draws them: uniform, and as wide."""
    transpose = isinstance(module, nn.ConvTranspose2d)
    rank = len(module.kernel_size)
    kind = (Conv, ConvTranspose)[transpose]
    extra = ((0,) * rank,) if transpose else ()
    op = kind(4, module.kernel_size, (1,) * rank, ((0, 0),) * rank, *extra, (1,) * rank, module.groups)
    where = space(op, (TensorSpec((1, 6, *(9,) * rank), IMAGES[rank]),))
    torch.manual_seed(0)
    drawn = []
    for _ in range(200):
        module.reset_parameters()
        drawn.append({k: t.detach().clone() for k, t in module.named_parameters()})
    for p in where.parameters:
        real = torch.cat([d[p.name].flatten() for d in drawn])
        assert tuple(drawn[0][p.name].shape) == p.shape
        assert p.initial == "uniform"
        assert real.abs().max().item() == pytest.approx(p.scale, rel=0.02)
        assert real.abs().max().item() <= p.scale
        assert real.std().item() == pytest.approx(p.scale / 3**0.5, rel=0.1)


@given(st.data())
def test_one_device_runs_plain_torch(data: st.DataObject) -> None:
    """Bit by bit, in float32: the same call on the same tensors."""
    op, x = data.draw(convolutions().filter(lambda pair: all(a == b for a, b in pair[0].padding)))
    at = whole(op, x)
    t = sample(x)
    held = {k: v.float() for k, v in random_parameters(at.space).items()}
    low = [a for a, _ in op.padding]
    wanted = CONV[len(op.kernel) - 1](t, held["weight"], held.get("bias"), op.stride, low, op.dilation, op.groups)
    assert torch.equal(op.run(at, [t[at.needs[0].slices()]], held), wanted)


# Pooling


@st.composite
def pools(draw: st.DrawFn) -> tuple[Pool, TensorSpec]:
    """As PyTorch has them (padding is symmetric, at most half a window) and as ONNX has them (any)."""
    rank, mode = draw(st.integers(1, 3)), draw(st.sampled_from(["max", "average", "lp"]))
    kernel, stride = each(draw, rank, 1, 5 - rank // 2), each(draw, rank, 1, 4)
    dilation = each(draw, rank, 1, 3) if mode == "max" else (1,) * rank
    if draw(st.booleans()):
        padding = tuple((p, p) for p in (draw(st.integers(0, k // 2)) for k in kernel))
    else:
        padding = pairs(draw, rank, 0, 3, symmetric=False)
    fits = [d * (k - 1) + 1 for k, d in zip(kernel, dilation, strict=True)]
    spatial = tuple(max(draw(st.integers(1, 10 - 2 * rank)), f - sum(p)) for f, p in zip(fits, padding, strict=True))
    op = Pool(
        mode,
        kernel,
        stride,
        padding,
        dilation,
        ceil_mode=draw(st.booleans()),
        count_include_pad=draw(st.booleans()),
        power=draw(st.sampled_from([1.0, 2.0, 3.0])),
        divisor=draw(st.sampled_from([None, None, 3])),
    )
    return op, TensorSpec((draw(st.integers(1, 2)), draw(st.integers(1, 3)), *spatial), IMAGES[rank])


def pooled(op: Pool, x: Tensor) -> Tensor:
    """One window after the other, from the definition."""
    rank = len(op.kernel)
    lead, extents = x.shape[:-rank], x.shape[-rank:]
    out = Pool.output(op, TensorSpec(tuple(x.shape), IMAGES[rank])).shape[-rank:]
    results = []
    for place in product(*map(range, out)):
        starts = [y * s - low for y, s, (low, _) in zip(place, op.stride, op.padding, strict=True)]
        taps = [range(a, a + d * (k - 1) + 1, d) for a, k, d in zip(starts, op.kernel, op.dilation, strict=True)]
        inside = [[t for t in row if 0 <= t < e] for row, e in zip(taps, extents, strict=True)]
        window = x[(..., *torch.meshgrid(*map(torch.tensor, inside), indexing="ij"))] if all(inside) else None
        values = x.new_zeros((*lead, 1)) if window is None else window.flatten(len(lead))
        if op.mode == "max":
            results.append(values.amax(-1) if window is not None else torch.full(lead, -torch.inf, dtype=x.dtype))
            continue
        if op.mode == "lp":
            results.append(torch.linalg.vector_norm(values, op.power, -1))
            continue
        counted = [
            [t for t in row if t < e + high] for row, e, (_, high) in zip(taps, extents, op.padding, strict=True)
        ]
        count = prod(map(len, counted if op.count_include_pad else inside))
        results.append(values.sum(-1) / (op.divisor or max(count, 1)))
    return torch.stack(results, -1).view(*lead, *out)


@given(st.data())
def test_pool(data: st.DataObject) -> None:
    op, x = data.draw(pools())
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), lambda t: pooled(op, t))


def has_torch(op: Pool, x: TensorSpec) -> bool:
    """PyTorch's avg_pool1d has no divisor; its avg_pool3d takes no input (of ours: no part of it) below a window."""
    rank = len(op.kernel)
    if (
        op.mode == "average"
        and rank == 3
        and any(k > e for k, e in zip(op.kernel, whole(op, x).needs[0].shape[-3:], strict=True))
    ):
        return False
    symmetric = all(a == b <= k // 2 for (a, b), k in zip(op.padding, op.kernel, strict=True))
    return op.mode != "lp" and symmetric and (op.divisor is None or rank > 1)


@given(st.data())
def test_one_device_pools_as_torch(data: st.DataObject) -> None:
    """Bit by bit, in float32."""
    op, x = data.draw(pools().filter(lambda pair: has_torch(*pair)))
    at, t = whole(op, x), sample(x)
    low, rank = [a for a, _ in op.padding], len(op.kernel)
    if op.mode == "max":
        wanted = MAX[rank - 1](t, op.kernel, op.stride, low, op.dilation, op.ceil_mode)
    else:
        divisor = (op.divisor,) if rank > 1 else ()
        wanted = AVERAGE[rank - 1](t, op.kernel, op.stride, low, op.ceil_mode, op.count_include_pad, *divisor)
    assert torch.equal(op.run(at, [t[at.needs[0].slices()]], {}), wanted)


@pytest.mark.parametrize("mode", ["max", "average"])
@pytest.mark.parametrize("ceil", [False, True])
def test_overlapping_pools(mode: Literal["max", "average"], ceil: bool) -> None:
    """AlexNet's and ResNet's."""
    for padding in (0, 1):
        op = Pool(mode, (3, 3), (2, 2), ((padding, padding),) * 2, (1, 1), ceil)
        for cuts in ((1, 1, 3, 2), (2, 1, 6, 1), (1, 3, 1, 5)):
            check_kernel(op, [TensorSpec((2, 3, 13, 14), IMAGES[2])], cuts, lambda t, op=op: pooled(op, t))


def test_a_window_of_padding_alone_averages_to_zero() -> None:
    """As PyTorch has it, though it divides by none."""
    op = Pool("average", (2,), (2,), ((2, 1),), (1,), count_include_pad=False)
    check_kernel(op, [TensorSpec((1, 2, 5), IMAGES[1])], (1, 1, 1), lambda t: pooled(op, t))


def test_pool_of_other_ranks() -> None:
    """Without samples, or with a sequence before the channels."""
    op = Pool("average", (2, 2), (2, 2), ((1, 0), (0, 1)), (1, 1), count_include_pad=False)
    check_kernel(op, [TensorSpec((3, 5, 6), ("c", "h", "w"))], (2, 2, 2), lambda t: pooled(op, t[None])[0])
    five = TensorSpec((2, 3, 2, 5, 6), ("n", "s", "c", "h", "w"))
    check_kernel(op, [five], (2, 1, 2, 3, 2), lambda t: pooled(op, t.flatten(0, 1)).view(2, 3, 2, 3, 3))


def test_the_norm_of_zeros_passes_no_gradient() -> None:
    op = Pool("lp", (2,), (2,), ((0, 0),), (1,))
    t = torch.tensor([[[0.0, 0.0, 3.0, 4.0]]], requires_grad=True)
    out = op.run(whole(op, TensorSpec((1, 1, 4), IMAGES[1])), [t], {})
    out.sum().backward()
    assert out.tolist() == [[[0.0, 5.0]]]
    assert t.grad is not None
    torch.testing.assert_close(t.grad, torch.tensor([[[0.0, 0.0, 0.6, 0.8]]]))


@given(st.data())
def test_adaptive_pool(data: st.DataObject) -> None:
    x = data.draw(images(low=1, high=9))
    rank = len(x.shape) - 2
    op = AdaptivePool(data.draw(st.sampled_from(["max", "average"])), each(data.draw, rank, 1, 11 - 2 * rank))
    ties = data.draw(st.booleans())  # torch passes the gradient of equal maxima to the first one
    t = (sample(x) * 2).round().double() if ties else sample(x).double()
    cuts = data.draw(degrees(space(op, (x,))))
    check_kernel(op, [x], cuts, lambda t: ADAPTIVE[op.mode][rank - 1](t, op.size), inputs=[t])


@pytest.mark.parametrize(
    ("extents", "size"), [((13, 13), (6, 6)), ((7, 9), (1, 1)), ((12, 8), (4, 2)), ((3, 5), (7, 7))]
)
def test_known_adaptive_pools(extents: tuple[int, int], size: tuple[int, int]) -> None:
    for mode in ("max", "average"):
        for cuts in ((2, 2, 1, 1), (1, 1, min(3, size[0]), min(2, size[1]))):
            op, x = AdaptivePool(mode, size), TensorSpec((2, 3, *extents), IMAGES[2])
            check_kernel(op, [x], cuts, lambda t, op=op: ADAPTIVE[op.mode][1](t, op.size))


def test_equal_maxima_of_two_dimensions() -> None:
    """The first row with a maximum, in it the first column: not the other way around."""
    op, x = AdaptivePool("max", (4, 3)), TensorSpec((1, 1, 7, 7), IMAGES[2])
    t = torch.eye(7, dtype=torch.float64).flip(1)[None, None]
    check_kernel(op, [x], (1, 1, 2, 1), lambda t: F.adaptive_max_pool2d(t, op.size), inputs=[t])


# Padding


@given(st.data())
def test_constant_pad(data: st.DataObject) -> None:
    """Every dimension, also by fewer positions than before."""
    x = data.draw(images(ranks=(0, 3), low=1, high=6))
    padding = tuple((data.draw(st.integers(-(e // 2), 4)), data.draw(st.integers(-((e - 1) // 2), 4))) for e in x.shape)
    op = Pad(padding, value=2.5)
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), lambda t: F.pad(t, flat(padding), value=2.5))


@given(st.data())
def test_other_pads(data: st.DataObject) -> None:
    x = data.draw(images(low=1, high=7))
    mode = data.draw(st.sampled_from(["reflect", "replicate", "circular"]))
    spatial = tuple(each(data.draw, 2, 0, max(e - 1, 0)) for e in x.shape[2:])
    op = Pad(((0, 0), (0, 0), *spatial), mode)
    cuts = data.draw(degrees(space(op, (x,))))
    check_kernel(op, [x], cuts, lambda t: F.pad(t, flat(spatial), mode))


def test_pads_that_torch_has_not() -> None:
    """Of channels, and of fewer positions, by reflection."""
    x = TensorSpec((2, 5, 6), IMAGES[1])
    for mode in ("reflect", "replicate", "circular"):
        op = Pad(((0, 0), (2, -1), (-1, 3)), mode)
        for cuts in ((1, 1, 1), (2, 3, 2), (1, 1, 8), (1, 6, 1)):
            check_kernel(
                op, [x], cuts, lambda t, mode=mode: F.pad(F.pad(t[None], (0, 3, 2, 0), mode)[0, :, :-1], (-1, 0))
            )


# Interpolation

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
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), reference(op, x))


@given(st.data())
def test_one_device_interpolates_as_torch(data: st.DataObject) -> None:
    """Bit by bit, in float32."""
    op, x = data.draw(interpolations().filter(lambda pair: pair[0].mode != "cubic" or len(pair[0].size) == 2))
    at, t = whole(op, x), sample(x)
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
    need = needed(where.needs[0], cell)
    out = op.run(Local(where, (x,), cell, (need,)), [t[need.slices()]], {})
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out, interpolated(op, t)[:, :, 4:8], rtol=0.01, atol=0.01)
