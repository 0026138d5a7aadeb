"""Linear layers and matrix products need what the real ones touch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode

from layerwise.errors import LayerwiseError
from layerwise.ops.base import space
from layerwise.ops.fused import Fused
from layerwise.ops.nn.linear import Linear, MatMul
from layerwise.ops.tensor.view import Reshape
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, check_reduction


@st.composite
def inputs(draw: st.DrawFn) -> TensorSpec:
    dims = draw(st.sampled_from([("c",), ("n", "c"), ("n", "s", "c"), ("n", "h", "w", "c"), ("s", None), ("c", None)]))
    return TensorSpec(tuple(draw(st.integers(1, 5)) for _ in dims), dims)


@given(st.data())
def test_linear_needs(data: st.DataObject) -> None:
    x, op = data.draw(inputs()), Linear(data.draw(st.integers(1, 5)), data.draw(st.booleans()))
    check_needs(op, [x], data.draw(cells(space(op, (x,)))), F.linear)


@given(st.data())
def test_linear_reduces(data: st.DataObject) -> None:
    x, op = data.draw(inputs()), Linear(3)
    check_reduction(op, [x], data.draw(st.integers(1, x.shape[-1])), F.linear)


@given(st.data())
def test_flatten_then_linear(data: st.DataObject) -> None:
    """The reduction is cut at whole channels of the image behind the flatten."""
    n, c, h, w = (data.draw(st.integers(low, 4)) for low in (1, 2, 1, 1))
    x = TensorSpec((n, c, h, w), ("n", "c", "h", "w"))
    op = Fused(Linear(3), ((Reshape((n, c * h * w)),),))
    where = space(op, (x,))
    depth = where.dims[-1]
    assert (depth.label, depth.unit, depth.max_degree) == ("k", h * w, c)
    (maps,) = where.needs
    for part in range(c):
        lo, hi = (m[0] for m in maps[1](np.array([part * h * w]), np.array([(part + 1) * h * w])))
        assert (lo, hi) == (part, part + 1)

    def reference(t: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return F.linear(t.flatten(1), weight, bias)

    check_needs(op, [x], data.draw(cells(where)), reference)
    check_reduction(op, [x], data.draw(st.integers(1, depth.max_degree)), reference)


def test_linear_labels_its_columns_where_the_label_is_free() -> None:
    assert Linear(7).output(TensorSpec((2, 3, 4), ("n", "s", "c"))).dims == ("n", "s", "c")
    assert Linear(7).output(TensorSpec((2, 3, 4), ("n", "c", "w"))).dims == ("n", "c", None)
    merged = TensorSpec((6, 4), ("n", "c"), units=(3, 2))
    assert Linear(7).output(merged).units == (3, 1)
    assert space(Linear(7), (merged,)).dims[-1].max_degree == 2


def test_linear_flops() -> None:
    x = TensorSpec((8, 5, 4), ("n", "s", "c"))
    (gemm,) = Linear(6).gemms((x,), np.array([[8, 5, 6, 4], [2, 5, 3, 2]]))
    assert gemm.flops.tolist() == [2 * 40 * 4 * 6, 2 * 10 * 2 * 3]


@st.composite
def products(draw: st.DrawFn) -> tuple[TensorSpec, TensorSpec]:
    """Two operands with labels wherever they may be, leading dimensions broadcast, one of them perhaps a vector."""
    m, k, p = (draw(st.integers(1, 4)) for _ in range(3))
    stack = [draw(st.integers(1, 3)) for _ in range(draw(st.integers(0, 2)))]

    def lead() -> tuple[int, ...]:
        return tuple(1 if draw(st.booleans()) else s for s in stack)[draw(st.integers(0, len(stack))) :]

    def spec(shape: tuple[int, ...]) -> TensorSpec:
        labels = draw(st.permutations(["n", "c", "s", "w", None, None]))
        units = tuple(draw(st.sampled_from([u for u in (1, 2, 4) if extent % u == 0])) for extent in shape)
        return TensorSpec(shape, tuple(labels[: len(shape)]), units=units)

    a = (k,) if draw(st.integers(0, 4)) == 0 else (*lead(), m, k)
    b = (k,) if draw(st.integers(0, 4)) == 0 else (*lead(), k, p)
    return spec(a), spec(b)


@given(st.data())
def test_matmul_needs(data: st.DataObject) -> None:
    a, b = data.draw(products())
    where = space(MatMul(), (a, b))
    check_needs(MatMul(), [a, b], data.draw(cells(where)), torch.matmul)
    check_reduction(MatMul(), [a, b], data.draw(st.integers(1, where.dims[-1].max_degree)), torch.matmul)


@given(st.data())
def test_matmul_flops(data: st.DataObject) -> None:
    """Counted on real tensors by torch's own counter."""
    a, b = data.draw(products())
    assume(len(a.shape) > 1 and len(b.shape) > 1)
    where = space(MatMul(), (a, b))
    gemms = MatMul().gemms((a, b), np.array([d.extent for d in where.dims]))
    with FlopCounterMode(display=False) as counter:
        torch.matmul(torch.zeros(a.shape), torch.zeros(b.shape))
    assert sum(float(g.flops) for g in gemms) == counter.get_total_flops()


def test_labels_of_products() -> None:
    q = TensorSpec((2, 3, 5, 4), ("n", "c", "s", None))
    k = TensorSpec((2, 3, 4, 7), ("n", "c", None, "s"))
    assert MatMul().output(q, k).dims == ("n", "c", "s", None)
    x, weight = TensorSpec((2, 5, 4), ("n", "s", "c")), TensorSpec((4, 6), (None, None))
    assert MatMul().output(x, weight).dims == ("n", "s", "c")
    bound = TensorSpec((4, 6), (None, None), units=(1, 6))
    assert MatMul().output(x, bound).dims == ("n", "s", None)
    cut = TensorSpec((12, 6), ("c", None), units=(4, 1))
    assert space(MatMul(), (TensorSpec((2, 12), ("n", "c"), units=(1, 6)), cut)).dims[-1].unit == 12


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [((2, 3), (4, 5), "inner dimensions"), ((2, 1, 3), (3, 3, 5), "broadcast"), ((), (3,), "inner dimensions")],
)
def test_products_that_do_not_fit(a: tuple[int, ...], b: tuple[int, ...], message: str) -> None:
    specs = (TensorSpec(a, (None,) * len(a)), TensorSpec(b, (None,) * len(b)))
    if message == "broadcast":
        specs = (TensorSpec((2, 1, 3), (None,) * 3), TensorSpec((3, 3, 5), (None,) * 3))
    with pytest.raises(LayerwiseError, match=message):
        MatMul().output(*specs)
