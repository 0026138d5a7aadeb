"""Products (linear layers, matrices, attention, embeddings): what they need; cells make the whole, both ways."""

from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local
from layerwise.ops.fused import Fused, needed_box
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.linear import Embedding, Learned, Linear, MatMul
from layerwise.ops.random import uniform
from layerwise.ops.tensor.view import Expand, Permute, Reshape
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_identical, check_needs, check_reduction, each, values, whole
from tests.ops.kernels import check_kernel, check_split, degrees


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


DIMS = ("n", "c", "s", None)


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


def linear(op: Linear, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return F.linear(x, weight.T if op.transposed else weight, bias)


@st.composite
def rows(draw: st.DrawFn) -> TensorSpec:
    """Inputs of a linear layer, some of merged dimensions."""
    dims = draw(st.sampled_from([("c",), ("n", "c"), ("n", "s", "c"), ("n", "h", "w", "c"), ("s", None), ("c", None)]))
    units = each(draw, len(dims), 1, 3)
    shape = tuple(u * draw(st.integers(1, 5)) for u in units)
    return TensorSpec(shape, dims, units=units)


@given(st.data())
def test_linear(data: st.DataObject) -> None:
    x = data.draw(rows())
    op = Linear(data.draw(st.integers(1, 5)), data.draw(st.booleans()), data.draw(st.booleans()))
    check_split(data, op, [x], lambda *a, **k: linear(op, *a, **k))


@st.composite
def products(draw: st.DrawFn) -> list[TensorSpec]:
    """Operands of a matrix product whose leading dimensions broadcast, some of one dimension."""
    m, k, p = each(draw, 3, 1, 5)
    lead = each(draw, draw(st.integers(0, 2)), 1, 3)

    def stack() -> tuple[int, ...]:
        return tuple(1 if draw(st.booleans()) else s for s in lead[draw(st.integers(0, len(lead))) :])

    shapes = [(k,) if draw(st.integers(0, 4)) == 0 else (*stack(), m, k)]
    shapes.append((k,) if draw(st.integers(0, 4)) == 0 else (*stack(), k, p))

    def labelled(shape: tuple[int, ...]) -> TensorSpec:
        labels = draw(st.permutations(["n", "c", "s", "h", None, None]))
        units = tuple(draw(st.sampled_from([u for u in (1, 2, 4) if extent % u == 0])) for extent in shape)
        return TensorSpec(shape, tuple(labels[: len(shape)]), units=units)

    return [labelled(shape) for shape in shapes]


@given(st.data())
def test_matmul(data: st.DataObject) -> None:
    check_split(data, MatMul(), data.draw(products()), torch.matmul)


@st.composite
def attentions(draw: st.DrawFn) -> tuple[Attention, list[TensorSpec]]:
    """With and without heads, heads for groups of queries, one head or one sample for all, masks that broadcast."""
    n, groups, group, s, s_k, e, e_v = each(draw, 7, 1, 4)
    heads = draw(st.booleans())
    causal, masked = draw(st.booleans()), draw(st.booleans())
    lead = (n, groups * group) if heads else (groups * group,)
    shared = [1 if draw(st.integers(0, 4)) == 0 else n, draw(st.sampled_from([groups, groups * group, 1]))]
    if not heads:
        shared = [draw(st.sampled_from([1, groups * group]))]
    dims = DIMS if heads else ("n", "s", None)
    out = "h" if draw(st.booleans()) else None  # the columns of v, too, may be cut
    specs = [
        TensorSpec((*lead, s, e), dims),
        TensorSpec((*shared, s_k, e), dims),
        TensorSpec((*shared, s_k, e_v), (*dims[:-1], out)),
    ]
    if masked:
        full = (*lead, s, s_k)
        mask = tuple(1 if draw(st.booleans()) else x for x in full)[draw(st.integers(0, len(full) - 1)) :]
        specs.append(TensorSpec(mask, (None,) * len(mask), draw(st.sampled_from(["bool", "float32"]))))
    return Attention(causal, masked, draw(st.sampled_from([None, 0.7]))), specs


def attended(
    op: Attention, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, zeroed: Tensor | None = None
) -> Tensor:
    """Written out. `zeroed`: what is dropped of the softmax's results."""
    k, v = (t.expand(*(a if b == 1 else b for a, b in zip(q.shape[:-2], t.shape[:-2], strict=True)), *t.shape[-2:])
            for t in (k, v))  # fmt: skip
    k, v = (t.repeat_interleave(q.shape[-3] // t.shape[-3], -3) for t in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if op.scale is None else op.scale)
    if mask is not None:
        scores = scores + mask if mask.is_floating_point() else scores.masked_fill(~mask.bool(), -torch.inf)
    if op.causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    blind = scores.detach().isneginf().all(-1, keepdim=True)
    weights = scores.masked_fill(blind, 0).softmax(-1).masked_fill(blind, 0)
    return (weights if zeroed is None else weights.masked_fill(zeroed, 0) / (1 - op.dropout)) @ v


def tensors(specs: list[TensorSpec]) -> list[Tensor]:
    return [t.bool() if s.dtype == "bool" else t for s, t in zip(specs, values(specs), strict=True)]


@given(st.data())
def test_attention(data: st.DataObject) -> None:
    op, specs = data.draw(attentions())
    assert space(op, tuple(specs)).out.dims[:-1] == specs[0].dims[:-1]
    # Where all keys count the same (there is one, or the mask is the same for all), no gradient reaches the rest.
    keys = specs[1].shape[-2]
    tight = keys > 1 and not op.causal and (not op.mask or (specs[3].shape[-1] > 1 and specs[3].differentiable))
    check_split(data, op, specs, lambda *a: attended(op, *a), tight=tight, inputs=tensors(specs))


@given(st.data())
def test_attention_with_dropout(data: st.DataObject) -> None:
    """What is zeroed depends on the place in the whole tensor of scores only; nothing is in evaluation."""
    plain, specs = data.draw(attentions())
    op = Attention(plain.causal, plain.mask, plain.scale, data.draw(st.floats(0.05, 0.95)))
    shape, training = (*specs[0].shape[:-1], specs[1].shape[-2]), data.draw(st.booleans())
    zeroed = uniform(5, Box((0,) * len(shape), shape), shape, dtype=torch.float64) < op.dropout

    def reference(*t: Tensor) -> Tensor:
        return attended(op, *t[:3], t[3] if op.mask else None, zeroed if training else None)

    cuts = data.draw(degrees(space(op, tuple(specs))))
    check_kernel(op, specs, cuts, reference, inputs=tensors(specs), training=training, seed=5)


@pytest.mark.parametrize("dropout", [0.0, 0.4])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("cuts", [(2, 2, 3, 1), (1, 1, 5, 1), (1, 1, 1, 1)])
def test_groups_of_queries(dropout: float, causal: bool, cuts: tuple[int, ...]) -> None:
    q, kv = TensorSpec((2, 6, 5, 3), DIMS), TensorSpec((2, 2, 7, 3), DIMS)
    op, shape = Attention(causal, dropout=dropout), (2, 6, 5, 7)
    zeroed = uniform(5, Box((0,) * 4, shape), shape, dtype=torch.float64) < dropout
    check_kernel(op, [q, kv, kv], cuts, lambda *t: attended(op, *t, None, zeroed), seed=5)


@pytest.mark.parametrize("dtype", ["bool", "float32"])
def test_a_mask_of_one_dimension(dtype: str) -> None:
    """Of keys (padding): PyTorch's own wants two."""
    x, mask = TensorSpec((2, 2, 4, 3), DIMS), TensorSpec((4,), (None,), dtype)
    seen = torch.tensor([True, True, False, True])
    given = seen if dtype == "bool" else torch.where(seen, 0.5, -torch.inf).double()
    for op in (Attention(mask=True), Attention(True, True)):
        check_kernel(
            op, [x, x, x, mask], (1, 2, 2, 1), lambda *t, o=op: attended(o, *t), inputs=[*values([x] * 3), given]
        )


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("groups", [1, 2, 8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_device_calls_pytorchs_own_attention(causal: bool, groups: int, dtype: torch.dtype) -> None:
    q, kv = TensorSpec((2, 8, 40, 16), DIMS), TensorSpec((2, groups, 40, 16), DIMS)
    grouped = 1 < groups < 8

    def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k, v = (t.expand(2, 8, -1, -1) if groups == 1 else t for t in (k, v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)

    check_identical(Attention(causal, dropout=0.0), [q, kv, kv], reference, dtype=dtype)


def test_queries_that_see_nothing_get_zeros() -> None:
    """As PyTorch's do; with dropout, too, and their gradients are none."""
    spec = TensorSpec((1, 1, 3, 4), DIMS)
    for op in (Attention(mask=True), Attention(mask=True, dropout=0.5)):
        specs = [spec, spec, spec, TensorSpec((3, 3), (None, None), "bool")]
        inputs = [t.requires_grad_() for t in values(specs[:3])]
        mask = torch.tensor([[True, True, False], [False] * 3, [True] * 3])
        out = op.run(whole(op, specs), [*inputs, mask], {})
        assert (out[..., 1, :] == 0).all()
        out.sum().backward()  # type: ignore[no-untyped-call]
        assert all(t.grad is not None and t.grad.isfinite().all() for t in inputs)


@given(st.data())
def test_embedding(data: st.DataObject) -> None:
    dims = data.draw(st.sampled_from([(), ("n",), ("n", "s"), ("n", "c"), ("n", "h", "w")]))
    ids = TensorSpec(each(data.draw, len(dims), 1, 4), dims, data.draw(st.sampled_from(["int64", "int32"])))
    count = data.draw(st.integers(3, 9))  # (the harness draws ids below 3)
    padding = data.draw(st.none() | st.integers(0, count - 1))
    op = Embedding(count, data.draw(st.integers(1, 5)), padding=padding)
    where, cell = space(op, (ids,)), data.draw(cells(space(op, (ids,))))
    assert (where.out.dims[-1], where.out.dtype) == (None if "c" in dims else "c", "float32")
    check_needs(op, [ids], cell, F.embedding, tight=False)
    # Which rows are read depends on the ids, which columns does not.
    (table,) = where.parameters
    columns = needed_box(table.maps, cell)
    assert (columns.lo[1], columns.hi[1]) == (cell.lo[len(dims)], cell.hi[len(dims)])
    rows = torch.randint(0, op.count, ids.shape, generator=torch.Generator().manual_seed(0))
    real = partial(F.embedding, padding_idx=padding)
    check_kernel(op, [ids], data.draw(degrees(where)), real, inputs=[rows.to(getattr(torch, ids.dtype))])


def test_rows_that_are_elsewhere_stay_untouched() -> None:
    """Also where those that are here are not finite."""
    op, ids = Embedding(6, 2), TensorSpec((4,), ("n",), "int64")
    where = space(op, (ids,))
    cell = Box((0, 0, 2), (4, 2, 4))
    at = Local(where, (ids,), cell, tuple(needed_box(m, cell) for m in where.needs))
    weight = torch.tensor([[torch.inf, torch.nan], [1.0, 2.0]])
    assert op.run(at, [torch.tensor([0, 3, 5, 3])], {"weight": weight}).tolist() == [[0, 0], [1, 2], [0, 0], [1, 2]]


@pytest.mark.parametrize(
    ("op", "specs", "reference"),
    [
        (Linear(33), [TensorSpec((17, 65), ("n", "c"))], F.linear),
        (Linear(33, False), [TensorSpec((3, 17, 65), ("n", "s", "c"))], F.linear),
        (MatMul(), [TensorSpec((3, 1, 9, 7), DIMS), TensorSpec((4, 7, 5), DIMS[:3])], torch.matmul),
        (Embedding(9, 5), [TensorSpec((3, 4), ("n", "s"), "int64")], F.embedding),
    ],
)
def test_one_device_calls_pytorchs_own(op: Op, specs: list[TensorSpec], reference) -> None:  # type: ignore[no-untyped-def]
    check_identical(op, specs, reference)


def test_initial_values_are_pytorchs() -> None:
    """The same bounds of what is uniform, the same deviation of what is normal."""
    torch.manual_seed(0)
    layer = nn.Linear(400, 300)
    for transposed in (False, True):
        weight, bias = space(Linear(300, True, transposed), (TensorSpec((2, 400), ("n", "c")),)).parameters
        for mine, real in ((weight, layer.weight.detach()), (bias, layer.bias.detach())):
            assert mine.initial == "uniform"
            assert float(real.abs().max()) == pytest.approx(mine.scale, rel=2e-2)
            assert float(real.std()) == pytest.approx(mine.scale / 3**0.5, rel=5e-2)
    (table,) = space(Embedding(500, 40), (TensorSpec((2,), ("n",), "int64"),)).parameters
    assert (table.initial, table.scale) == ("normal", 1.0)
    assert float(nn.Embedding(500, 40).weight.detach().std()) == pytest.approx(table.scale, rel=2e-2)


@pytest.mark.parametrize("cuts", [(1, 1, 1), (3, 1, 1), (2, 1, 2), (1, 1, 4)])
def test_every_cell_has_its_part(cuts: tuple[int, ...]) -> None:
    op = Learned((1, 1, 4), (3, 2, 4))
    assert space(op, ()).out.dims == ("n", None, "c")

    def expanded(value: Tensor) -> Tensor:
        return value.expand(3, 2, 4)

    check_kernel(op, [], cuts, expanded)


def test_it_follows_the_batch() -> None:
    assert Learned((1, 1, 4), (3, 2, 4)).at_batch(3, 7) == Learned((1, 1, 4), (7, 2, 4))
