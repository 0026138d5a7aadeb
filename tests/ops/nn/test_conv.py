"""Convolutions need what the real ones touch."""

from __future__ import annotations

import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.ops.base import space
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, check_reduction

LABELS = {1: ("n", "c", "l"), 2: ("n", "c", "h", "w"), 3: ("n", "c", "d", "h", "w")}


def _each(draw: st.DrawFn, rank: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(rank))


@st.composite
def convolutions(draw: st.DrawFn) -> tuple[Conv, TensorSpec]:
    rank = draw(st.integers(1, 3))
    groups = draw(st.sampled_from([1, 1, 2, 3]))
    kernel, dilation = _each(draw, rank, 1, 3), _each(draw, rank, 1, 2)
    padding = tuple((draw(st.integers(0, 2)), draw(st.integers(0, 2))) for _ in range(rank))
    x = TensorSpec((draw(st.integers(1, 3)), groups * draw(st.integers(1, 2)), *_each(draw, rank, 5, 8)), LABELS[rank])
    op = Conv(
        groups * draw(st.integers(1, 3)),
        kernel,
        _each(draw, rank, 1, 3),
        padding,
        dilation,
        groups,
        draw(st.booleans()),
    )
    return op, x


def run(op: Conv, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    pads = [p for pair in reversed(op.padding) for p in pair]
    f = (F.conv1d, F.conv2d, F.conv3d)[len(op.kernel) - 1]
    return f(F.pad(x, pads), weight, bias, op.stride, 0, op.dilation, op.groups)


@given(st.data())
def test_convolution_needs(data: st.DataObject) -> None:
    op, x = data.draw(convolutions())
    cell = data.draw(cells(space(op, (x,))))
    # Where taps skip positions (dilation) or windows fall into the padding, the hull of what is read may be smaller.
    tight = max(op.dilation) == 1 and all(k > max(pad) for k, pad in zip(op.kernel, op.padding, strict=True))
    check_needs(op, [x], cell, lambda *a, **k: run(op, *a, **k), tight=tight)


@given(st.data())
def test_convolution_reduces(data: st.DataObject) -> None:
    op, x = data.draw(convolutions().filter(lambda pair: pair[0].groups == 1))
    degree = data.draw(st.integers(1, x.shape[1]))
    check_reduction(op, [x], degree, lambda *a, **k: run(op, *a, **k))


@st.composite
def transposed(draw: st.DrawFn) -> tuple[ConvTranspose, TensorSpec]:
    rank, groups = draw(st.integers(1, 2)), draw(st.sampled_from([1, 2]))
    kernel, stride = _each(draw, rank, 1, 4), _each(draw, rank, 1, 3)
    padding = tuple((p, p) for p in (draw(st.integers(0, (k - 1) // 2)) for k in kernel))
    extra = tuple(draw(st.integers(0, s - 1)) for s in stride)
    x = TensorSpec((2, groups * draw(st.integers(1, 2)), *_each(draw, rank, 3, 5)), LABELS[rank])
    return ConvTranspose(groups * 2, kernel, stride, padding, extra, (1,) * rank, groups), x


@given(st.data())
def test_transposed_convolution_needs(data: st.DataObject) -> None:
    op, x = data.draw(transposed())
    cell = data.draw(cells(space(op, (x,))))
    f = (F.conv_transpose1d, F.conv_transpose2d)[len(op.kernel) - 1]
    low = [p for p, _ in op.padding]

    def reference(t: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return f(t, weight, bias, op.stride, low, op.output_padding, op.groups, op.dilation)

    check_needs(
        op,
        [x],
        cell,
        reference,
        tight=op.groups == 1 and all(k >= s for k, s in zip(op.kernel, op.stride, strict=True)),
    )
