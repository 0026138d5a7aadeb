"""Pools: needs are what the real ones touch, as many windows, and cells of any configuration make the whole."""

import itertools
from itertools import product
from math import prod
from typing import Literal

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, each, images, pairs, sample, whole
from tests.ops.kernels import check_kernel, check_split

MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
ADAPTIVE = {
    "max": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "average": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
}


def test_number_of_windows() -> None:
    """PyTorch's rule, also that with ceil_mode the last window starts inside the input or the low padding."""
    left_out = 0
    for extent, kernel, stride, ceil in itertools.product(range(1, 10), range(1, 5), range(1, 6), (False, True)):
        for pad in range(kernel // 2 + 1):
            op = Pool("max", (kernel,), (stride,), ((pad, pad),), (1,), ceil)
            x = TensorSpec((1, 1, extent), ("n", "c", "l"))
            if extent + 2 * pad < kernel and not ceil:
                with pytest.raises(LayerwiseError, match="is larger than an input"):
                    op.output(x)
                continue
            try:
                real = F.max_pool1d(torch.zeros(x.shape), kernel, stride, pad, 1, ceil).shape[-1]
            except RuntimeError:
                continue  # larger than the padded input
            assert op.output(x).shape[-1] == real, op
            left_out += real < -(-(extent + 2 * pad - kernel) // stride) + 1 if ceil else 0
    assert left_out, "the rule was never put to use"


@given(st.integers(1, 40), st.integers(1, 40))
def test_adaptive_work(extent: int, size: int) -> None:
    """FLOPs are the elements of all windows."""
    windows = sum(-(-(i + 1) * extent // size) - i * extent // size for i in range(size))
    op, x = AdaptivePool("average", (size,)), TensorSpec((1, 1, extent), ("n", "c", "l"))
    assert op.flops((x,), np.array([1, 1, size])) == pytest.approx(windows)


def test_labels() -> None:
    """Merged positions are cut anywhere; samples, channels and what a view binds stay as they are; n may be missing."""
    merged = TensorSpec((2, 8, 12), ("n", "c", "l"), units=(1, 4, 3))
    pool = Pool("max", (2,), (2,), ((0, 0),), (1,))
    assert (pool.output(merged).dims, pool.output(merged).units) == (("n", "c", "l"), (1, 4, 1))
    bound = TensorSpec((2, 8, 12), ("n", "c", None), units=(1, 4, 12))
    assert (pool.output(bound).dims, pool.output(bound).units) == (("n", "c", None), (1, 4, 6))
    assert AdaptivePool("max", (1, 1)).output(TensorSpec((8, 4, 4), ("c", "h", "w"))).shape == (8, 1, 1)


@st.composite
def pools(draw: st.DrawFn) -> tuple[Pool, TensorSpec]:
    """As PyTorch has them (padding is symmetric, at most half a window) and as ONNX has them (any)."""
    rank, mode = draw(st.integers(1, 3)), draw(st.sampled_from(["max", "average", "lp"]))
    kernel, stride = each(draw, rank, 1, 5 - rank // 2), each(draw, rank, 1, 4)
    dilation = each(draw, rank, 1, 3)
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
    # The gradient of a maximum reaches one element of a window; the average of the same windows reaches all.
    inside = all(k > max(pad) for k, pad in zip(op.kernel, op.padding, strict=True))
    tight = op.mode != "max" and inside and max(op.dilation) == 1
    check_split(data, op, [x], lambda t: pooled(op, t), tight=tight)


def has_torch(op: Pool, x: TensorSpec) -> bool:
    """PyTorch's avg_pool1d has no divisor; its avg_pool3d takes no input (of ours: no part of it) below a window."""
    rank = len(op.kernel)
    if (
        op.mode == "average"
        and rank == 3
        and any(k > e for k, e in zip(op.kernel, whole(op, [x]).needs[0].shape[-3:], strict=True))
    ):
        return False
    symmetric = all(a == b <= k // 2 for (a, b), k in zip(op.padding, op.kernel, strict=True))
    spread = op.mode != "max" and max(op.dilation) > 1
    return op.mode != "lp" and not spread and symmetric and (op.divisor is None or rank > 1)


@given(st.data())
def test_one_device_pools_as_torch(data: st.DataObject) -> None:
    """Bit by bit, in float32."""
    op, x = data.draw(pools().filter(lambda pair: has_torch(*pair)))
    at, t = whole(op, [x]), sample(x)
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
    out = op.run(whole(op, [TensorSpec((1, 1, 4), IMAGES[1])]), [t], {})
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
    check_split(data, op, [x], lambda t: ADAPTIVE[op.mode][rank - 1](t, op.size), tight=op.mode != "max", inputs=[t])


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
