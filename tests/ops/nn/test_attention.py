"""Attention needs its queries, and all keys and values of its heads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.fused import Fused
from layerwise.ops.nn.attention import Attention
from layerwise.ops.tensor.view import Expand, Permute, Reshape
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, needed

DIMS = ("n", "c", "s", None)


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Attention, list[TensorSpec]]:
    n, groups, group, s, s_k, e, e_v = (draw(st.integers(1, 3)) for _ in range(7))
    causal = draw(st.booleans())
    s_k = s if causal else s_k
    mask = None
    if not causal and draw(st.booleans()):
        full = (n, groups * group, s, s_k)
        mask = tuple(1 if draw(st.booleans()) else x for x in full)[draw(st.integers(0, 2)) :]
    specs = [
        TensorSpec((n, groups * group, s, e), DIMS),
        TensorSpec((n, groups, s_k, e), DIMS),
        TensorSpec((n, groups, s_k, e_v), DIMS),
    ]
    if mask:
        specs.append(TensorSpec(mask, (None,) * len(mask)))
    return Attention(causal, mask is not None, draw(st.sampled_from([None, 0.7]))), specs


def run(op: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    return F.scaled_dot_product_attention(
        q, k, v, mask, is_causal=op.causal, scale=op.scale, enable_gqa=k.shape[1] != q.shape[1]
    )


@given(st.data())
def test_attention_needs(data: st.DataObject) -> None:
    op, specs = data.draw(attentions())
    where = space(op, tuple(specs))
    assert where.out.dims == DIMS
    # Where all keys count the same (there is one, or the mask is the same for all), no gradient reaches the rest.
    tight = specs[1].shape[2] > 1 and not op.causal and (not op.mask or specs[3].shape[-1] > 1)
    check_needs(op, specs, data.draw(cells(where)), lambda *t: run(op, *t), tight=tight)


@given(st.data())
def test_a_cell_computed_alone(data: st.DataObject) -> None:
    """The whole operator on the gathered boxes only: groups stay whole, causal masks go by the global position."""
    op, specs = data.draw(attentions())
    where = space(op, tuple(specs))
    cell = data.draw(cells(where))
    g = torch.Generator().manual_seed(0)
    tensors = [torch.randn(s.shape, generator=g, dtype=torch.float64) for s in specs]
    local = [t[needed(m, cell).slices()] for t, m in zip(tensors, where.needs, strict=True)]
    first = cell.lo[2]
    if op.causal:
        rows, columns = torch.arange(first, cell.hi[2])[:, None], torch.arange(specs[1].shape[2])
        part = run(Attention(scale=op.scale), *local, mask=columns <= rows)  # type: ignore[arg-type]
    else:
        part = run(op, *local)
    torch.testing.assert_close(part, run(op, *tensors)[cell.slices()], rtol=1e-10, atol=1e-10)


@given(st.data())
def test_self_attention_without_heads(data: st.DataObject) -> None:
    n, s, e = (data.draw(st.integers(2, 3)) for _ in range(3))
    x = TensorSpec((n, s, e), ("n", "s", "c"))
    op = Attention()
    where = space(op, (x, x, x))
    assert where.out.dims == ("n", "s", "c")
    check_needs(op, [x, x, x], data.draw(cells(where)), F.scaled_dot_product_attention)


@given(st.data())
def test_heads_through_views(data: st.DataObject) -> None:
    """From (n, s, c), with key and value heads repeated by an expand, as transformers are written."""
    n, s, heads, group, e = 2, 3, 2, data.draw(st.integers(1, 3)), 2
    q = TensorSpec((n, s, heads * group * e), ("n", "s", "c"))
    kv = TensorSpec((n, s, heads * e), ("n", "s", "c"))
    order = Permute((0, 2, 1, 3))
    repeated = (
        Reshape((n, s, heads, e)), order, Reshape((n, heads, 1, s, e)),
        Expand((n, heads, group, s, e)), Reshape((n, heads * group, s, e)),
    )  # fmt: skip
    op = Fused(Attention(causal=True), ((Reshape((n, s, heads * group, e)), order), repeated, repeated))
    where = space(op, (q, kv, kv))
    assert [d.max_degree for d in where.dims] == [n, heads, s, 1]

    def reference(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
        split = [t.unflatten(-1, (-1, e)).transpose(1, 2) for t in (a, b, c)]
        keys, values = (t.repeat_interleave(group, 1) for t in split[1:])
        return F.scaled_dot_product_attention(split[0], keys, values, is_causal=True)

    check_needs(op, [q, kv, kv], data.draw(cells(where)), reference, tight=False)


def test_units_of_heads() -> None:
    def heads(queries: int, keys: int, unit: int = 1) -> int:
        q = TensorSpec((2, queries, 5, 4), DIMS, units=(1, unit, 1, 4))
        k = TensorSpec((2, keys, 5, 4), DIMS)
        return Attention().output(q, k, k).units[1]

    assert heads(8, 8) == 1
    assert heads(8, 2) == 4
    assert heads(8, 1) == 1  # one for all: every device has it whole
    assert heads(12, 4, unit=2) == 6


def test_attention_flops() -> None:
    q, k, v = (TensorSpec((2, 3, s, e), DIMS) for s, e in ((5, 4), (7, 4), (7, 6)))
    gemms = Attention().gemms((q, k, v), np.array([2, 3, 5, 6]))
    with FlopCounterMode(display=False) as counter:
        a, b, c = (torch.zeros(x.shape) for x in (q, k, v))
        torch.matmul(torch.matmul(a, b.mT).softmax(-1), c)
    assert sum(float(g.flops) for g in gemms) == counter.get_total_flops()


@pytest.mark.parametrize(
    "shapes",
    [
        [(2, 3, 5, 4), (2, 2, 5, 4), (2, 2, 5, 4)],
        [(2, 3, 5, 4), (2, 3, 5, 6), (2, 3, 5, 6)],
        [(2, 3, 5, 4), (2, 3, 6, 4), (2, 3, 5, 4)],
        [(2, 3, 5, 4), (3, 5, 4), (3, 5, 4)],
        [(5, 4), (5, 4), (5, 4)],
        [(2, 3, 5, 4), (3, 3, 5, 4), (3, 3, 5, 4)],
        [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), (4, 5)],
        [(2, 3, 5, 4), (2, 3, 5, 4), (2, 3, 5, 4), (1, 2, 3, 5, 5)],
    ],
)
def test_shapes_that_do_not_fit(shapes: list[tuple[int, ...]]) -> None:
    specs = [TensorSpec(s, (None,) * len(s)) for s in shapes]
    with pytest.raises(LayerwiseError, match=r"does not (fit|broadcast)"):
        Attention(mask=len(shapes) > 3).output(*specs)
