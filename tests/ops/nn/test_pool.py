"""Pools need what the real ones touch, and have as many windows."""

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
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.tensor import TensorSpec
from tests.ops.harness import IMAGES, cells, check_needs, each, images

MAX = (F.max_pool1d, F.max_pool2d, F.max_pool3d)
AVERAGE = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)
LP = (F.lp_pool1d, F.lp_pool2d, F.lp_pool3d)
ADAPTIVE = {
    "max": (F.adaptive_max_pool1d, F.adaptive_max_pool2d, F.adaptive_max_pool3d),
    "average": (F.adaptive_avg_pool1d, F.adaptive_avg_pool2d, F.adaptive_avg_pool3d),
}


def run(op: Pool, x: Tensor) -> Tensor:
    """PyTorch's pool, whose padding is symmetric."""
    at, low = len(op.kernel) - 1, [p for p, _ in op.padding]
    if op.mode == "max":
        return MAX[at](x, op.kernel, op.stride, low, op.dilation, op.ceil_mode)
    if op.mode == "lp":
        kernel, stride = (op.kernel, op.stride) if at else (op.kernel[0], op.stride[0])  # 1-D takes numbers only
        return LP[at](x, op.power, kernel, stride, op.ceil_mode)
    divisor = {"divisor_override": op.divisor} if at else {}
    return AVERAGE[at](x, op.kernel, op.stride, low, op.ceil_mode, op.count_include_pad, **divisor)


@st.composite
def pools(draw: st.DrawFn) -> tuple[Pool, TensorSpec]:
    rank = draw(st.integers(1, 3))
    mode = draw(st.sampled_from(["max", "average", "lp"]))
    kernel = each(draw, rank, 1, 4)
    dilation = each(draw, rank, 1, 2) if mode == "max" else (1,) * rank
    low = [0 if mode == "lp" else draw(st.integers(0, k // 2)) for k in kernel]
    spatial = tuple(
        draw(st.integers(max(d * (k - 1) + 1, 2), 9 - 2 * (rank == 3))) for k, d in zip(kernel, dilation, strict=True)
    )
    op = Pool(
        mode,
        kernel,
        each(draw, rank, 1, 5),
        tuple((p, p) for p in low),
        dilation,
        ceil_mode=draw(st.booleans()),
        count_include_pad=draw(st.booleans()),
        divisor=draw(st.sampled_from([None, 3])) if rank > 1 else None,
    )
    return op, TensorSpec((draw(st.integers(1, 3)), draw(st.integers(1, 3)), *spatial), IMAGES[rank])


@given(st.data())
def test_pool_needs(data: st.DataObject) -> None:
    op, x = data.draw(pools())
    cell = data.draw(cells(space(op, (x,))))
    # The gradient of a maximum reaches one element of a window; the average of the same windows reaches all.
    check_needs(op, [x], cell, lambda t: run(op, t), tight=op.mode != "max")


@given(st.data())
def test_asymmetric_pads(data: st.DataObject) -> None:
    """As ONNX has them: any pads on either side."""
    x = data.draw(images(low=5))
    rank = len(x.shape) - 2
    mode = data.draw(st.sampled_from(["max", "average"]))
    pads = tuple((data.draw(st.integers(0, 2)), data.draw(st.integers(0, 2))) for _ in range(rank))
    kernel = each(data.draw, rank, 1, 3)
    op = Pool(mode, kernel, each(data.draw, rank, 1, 3), pads, (1,) * rank)
    cell = data.draw(cells(space(op, (x,))))

    def reference(t: Tensor) -> Tensor:
        flat = [p for pair in reversed(pads) for p in pair]
        padded = F.pad(t, flat, value=-torch.inf if mode == "max" else 0.0)
        return (MAX if mode == "max" else AVERAGE)[rank - 1](padded, kernel, op.stride)

    inside = all(k > max(pad) for k, pad in zip(kernel, pads, strict=True))  # no window lies in the padding alone
    check_needs(op, [x], cell, reference, tight=mode == "average" and inside)


def test_number_of_windows() -> None:
    """PyTorch's rule, also that with ceil_mode the last window starts inside the input or the low padding."""
    left_out = 0
    for extent, kernel, stride, ceil in itertools.product(range(1, 10), range(1, 5), range(1, 6), (False, True)):
        for pad in range(kernel // 2 + 1):
            op = Pool("max", (kernel,), (stride,), ((pad, pad),), (1,), ceil)
            x = TensorSpec((1, 1, extent), ("n", "c", "l"))
            if extent + 2 * pad < kernel and not ceil:
                with pytest.raises(LayerwiseError, match="does not fit"):
                    op.output(x)
                continue
            try:
                real = F.max_pool1d(torch.zeros(x.shape), kernel, stride, pad, 1, ceil).shape[-1]
            except RuntimeError:
                continue  # larger than the padded input
            assert op.output(x).shape[-1] == real, op
            left_out += real < -(-(extent + 2 * pad - kernel) // stride) + 1 if ceil else 0
    assert left_out, "the rule was never put to use"


@given(st.data())
def test_adaptive_pool_needs(data: st.DataObject) -> None:
    x = data.draw(images())
    rank = len(x.shape) - 2
    mode = data.draw(st.sampled_from(["max", "average"]))
    op = AdaptivePool(mode, each(data.draw, rank, 1, 10))
    cell = data.draw(cells(space(op, (x,))))
    check_needs(op, [x], cell, lambda t: ADAPTIVE[mode][rank - 1](t, op.size), tight=mode == "average")


@given(st.integers(1, 40), st.integers(1, 40))
def test_adaptive_work(extent: int, size: int) -> None:
    """FLOPs are the elements of all windows."""
    windows = sum(-(-(i + 1) * extent // size) - i * extent // size for i in range(size))
    op, x = AdaptivePool("average", (size,)), TensorSpec((1, 1, extent), ("n", "c", "l"))
    assert op.flops((x,), np.array([1, 1, size])) == pytest.approx(windows)


def test_labels() -> None:
    """A merged dimension is not cut through its windows; sample and channel stay as they are; n may be missing."""
    merged = TensorSpec((2, 8, 12), ("n", "c", "l"), units=(1, 4, 3))
    out = Pool("max", (2,), (2,), ((0, 0),), (1,)).output(merged)
    assert (out.dims, out.units) == (("n", "c", None), (1, 4, 1))
    assert AdaptivePool("max", (1, 1)).output(TensorSpec((8, 4, 4), ("c", "h", "w"))).shape == (8, 1, 1)
    with pytest.raises(LayerwiseError, match="2-D pooling needs"):
        AdaptivePool("max", (1, 1)).output(TensorSpec((8, 4), ("n", "c")))
