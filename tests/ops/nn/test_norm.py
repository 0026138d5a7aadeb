"""Norms need what the real ones touch; statistics that the cells add up make them the real ones."""

from __future__ import annotations

import itertools
from collections import defaultdict
from math import prod
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box, Grid
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Statistics
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RMSNorm
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, each, images, values


def along(t: Tensor, rank: int) -> Tensor:
    """A tensor of channels, to broadcast over (n, c, ...)."""
    return t.reshape(1, -1, *(1,) * (rank - 2))


@given(st.data())
def test_batch_norm_needs(data: st.DataObject) -> None:
    """By running statistics: those of the batch are tested below."""
    x = data.draw(images(ranks=(0, 3), low=2, high=5))
    op = BatchNorm(data.draw(st.booleans()))
    cell = data.draw(cells(space(op, (x,))))

    def reference(t: Tensor, running_mean: Tensor, running_var: Tensor, **affine: Tensor) -> Tensor:
        mean, var = running_mean, running_var.abs() + 1
        normal = (t - along(mean, t.ndim)) / (along(var, t.ndim) + op.eps).sqrt()
        result = normal * along(affine["weight"], t.ndim) + along(affine["bias"], t.ndim) if affine else normal
        with torch.no_grad():  # PyTorch's own has no gradient to the running statistics
            real = F.batch_norm(t, mean, var, eps=op.eps, **affine)
            torch.testing.assert_close(result.detach(), real, equal_nan=True)
        return result

    check_needs(op, [x], cell, reference)
    assert [p.name for p in op.parameters((x,), x) if p.trainable] == ["weight", "bias"] * op.affine


@given(st.data())
def test_group_and_instance_norm_need(data: st.DataObject) -> None:
    """By given statistics."""
    block = data.draw(st.integers(1, 3))
    x = data.draw(images(ranks=(0, 3), low=2, high=5, block=block))
    affine, eps = data.draw(st.booleans()), 1e-3
    op: Op = GroupNorm(x.shape[1] // block, affine, eps) if block > 1 else InstanceNorm(affine, eps)
    where = space(op, (x,))
    assert where.dims[1].max_degree == x.shape[1] // block
    cell = data.draw(cells(where))
    grouped = values([x])[0].reshape(x.shape[0], x.shape[1] // block, -1)
    mean, var = (t.repeat_interleave(block, 1).reshape(*x.shape[:2], *(1,) * (len(x.shape) - 2))
                 for t in (grouped.mean(2), grouped.var(2, correction=0)))  # fmt: skip

    def reference(t: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        normal = (t - mean + 0.1) / (var + eps).sqrt()  # the mean of one element would be itself: no gradient
        return normal if weight is None or bias is None else normal * along(weight, t.ndim) + along(bias, t.ndim)

    check_needs(op, [x], cell, reference)


def split(data: st.DataObject, op: Op, x: TensorSpec) -> Grid:
    dims = space(op, (x,)).dims
    degrees = tuple(data.draw(st.integers(1, min(d.max_degree, 3))) for d in dims)
    return Grid(x.shape, degrees, tuple(d.unit for d in dims))


def normalised(x: Tensor, grid: Grid, statistics: Statistics, eps: float) -> Tensor:
    """Every cell adds up its sums; those that differ only along `over` share them; then every cell normalises."""
    rank, keys, block = x.ndim, statistics.keys, statistics.block
    boxes = list(grid)
    index = itertools.product(*map(range, grid.degrees))
    group = [tuple(0 if i in statistics.over else at for i, at in enumerate(cell)) for cell in index]
    sums: dict[tuple[int, ...], Tensor | float] = defaultdict(float)

    def blocked(box: Box) -> Tensor:
        """Keys first: (n, c/block, elements) or (1, c/block, elements)."""
        t = x[box.slices()]
        if 0 not in keys:
            t = t.transpose(0, 1).flatten(1)[None]
        return t.reshape(t.shape[0], t.shape[1] // block, -1)

    for g, box in zip(group, boxes, strict=True):
        t = blocked(box)
        partial = torch.stack([t.sum(-1), t.square().sum(-1)])
        assert partial.numel() == statistics.per_key * prod(box.shape[i] for i in keys) // block
        sums[g] += partial
    count = prod(x.shape[i] for i in range(rank) if i not in keys) * block
    out = torch.empty_like(x)
    for g, box in zip(group, boxes, strict=True):
        mean, square = sums[g] / count
        var = square - mean**2
        mean, var = (t.repeat_interleave(block, 1).reshape(*t.shape[:1], -1, *(1,) * (rank - 2)) for t in (mean, var))
        out[box.slices()] = (x[box.slices()] - mean) / (var + eps).sqrt()
    return out


@given(st.data())
def test_statistics_add_up(data: st.DataObject) -> None:
    """The cells' all-reduced sums give what the whole operator gives, in training, for every way to split."""
    block, eps = data.draw(st.integers(1, 3)), 1e-3
    x = data.draw(images(ranks=(1, 3), low=2, high=5, block=block))
    (t,) = values([x])
    groups = x.shape[1] // block
    kinds: list[tuple[Op, tuple[int, ...], int, Any]] = [
        (BatchNorm(False, eps), (1,), 1, lambda: F.batch_norm(t, None, None, training=True, eps=eps)),
        (GroupNorm(groups, False, eps), (0, 1), block, lambda: F.group_norm(t, groups, eps=eps)),
        (InstanceNorm(False, eps), (0, 1), 1, lambda: F.instance_norm(t, eps=eps)),
    ]
    op, keys, size, real = data.draw(st.sampled_from(kinds))
    statistics = op.statistics((x,), op.output(x))
    assert statistics is not None
    assert (statistics.keys, statistics.block, statistics.per_key) == (keys, size, 2)
    assert sorted((*statistics.over, *keys)) == list(range(len(x.shape)))
    result = normalised(t, split(data, op, x), statistics, eps)
    torch.testing.assert_close(result, real(), rtol=1e-9, atol=1e-9)


def test_statistics_only_over_what_can_be_split() -> None:
    x = TensorSpec((2, 4, 6, 6), ("n", "c", None, "w"))
    assert BatchNorm().statistics((x,), x) == Statistics((0, 3), (1,), 2)
    assert GroupNorm(2).statistics((x,), x) == Statistics((3,), (0, 1), 2, 2)
    flat = TensorSpec((2, 4), ("n", "c"))
    assert BatchNorm().statistics((flat,), flat) == Statistics((0,), (1,), 2)
    assert GroupNorm(2).statistics((flat,), flat) is None
    merged = TensorSpec((2, 12, 3), ("n", "c", "l"), units=(1, 2, 1))
    assert GroupNorm(4).output(merged).units == (1, 6, 1)
    with pytest.raises(LayerwiseError, match="groups"):
        GroupNorm(5).output(merged)
    with pytest.raises(LayerwiseError, match="needs an input"):
        BatchNorm().output(TensorSpec((3,), ("n",)))


@given(st.data())
def test_layer_and_rms_norm_need(data: st.DataObject) -> None:
    shape = each(data.draw, 4, 3, 5)
    x = TensorSpec(shape, ("n", "s", "h", "c"))
    rank = data.draw(st.integers(1, 3))
    weight, bias = data.draw(st.booleans()), data.draw(st.booleans())
    op: Op = LayerNorm(rank, weight, bias) if data.draw(st.booleans()) else RMSNorm(rank, weight, 1e-6)
    where = space(op, (x,))
    assert [d.label for d in where.dims] == [*x.dims[:-rank], *[None] * rank]
    assert where.out == x
    cell = data.draw(cells(where))

    def reference(t: Tensor, weight: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        if isinstance(op, RMSNorm):
            return F.rms_norm(t, shape[-rank:], weight, op.eps)
        return F.layer_norm(t, shape[-rank:], weight, bias)

    check_needs(op, [x], cell, reference)


def test_layer_norm_of_too_few_dimensions() -> None:
    with pytest.raises(LayerwiseError, match="last 3 dimensions"):
        LayerNorm(3).output(TensorSpec((3, 4), ("n", "c")))


@given(st.data())
def test_local_response_norm_needs(data: st.DataObject) -> None:
    x = data.draw(images(low=1, high=3, block=2))
    size = data.draw(st.integers(1, 5))
    op = LocalResponseNorm(size, 0.5, 0.75, 1.5, data.draw(st.sampled_from([None, (size - 1) // 2])))
    cell = data.draw(cells(space(op, (x,))))
    before = size // 2 if op.before is None else op.before

    def reference(t: Tensor) -> Tensor:
        padded = F.pad(t.square(), (0,) * (2 * t.ndim - 4) + (before, size - 1 - before))
        return t / (op.k + op.alpha * padded.unfold(1, size, 1).mean(-1)) ** op.beta

    if op.before is None or size % 2:
        (t,) = values([x])
        torch.testing.assert_close(reference(t), F.local_response_norm(t, size, op.alpha, op.beta, op.k))
    check_needs(op, [x], cell, reference)


def test_merged_channels_have_no_window() -> None:
    merged = TensorSpec((2, 12, 3), ("n", "c", "l"), units=(1, 2, 1))
    out = LocalResponseNorm(5).output(merged)
    assert (out.dims, out.units) == (("n", None, "l"), (1, 1, 1))
