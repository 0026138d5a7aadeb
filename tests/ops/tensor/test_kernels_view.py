"""Kernels of views: from the box that is gathered, the box that is wanted, and without a copy where there need be none.

Chains run view by view, as the runtime does: each is asked for what the next one needs.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local
from layerwise.ops.fused import through_views, viewed_spec
from layerwise.ops.tensor.combine import Concat
from layerwise.ops.tensor.merge import reshaped
from layerwise.ops.tensor.pointwise import Unary
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, needed
from tests.ops.kernels import check_kernel, degrees
from tests.ops.tensor.test_view import IMAGE, chains, look, look_through, specs, views
from tests.ops.whole import whole


def seen(chain: Sequence[Op], x: TensorSpec, wanted: Box, gathered: Box, t: Tensor) -> Tensor:
    """The box `wanted` of x seen through a chain of views, where t is its box `gathered`."""
    inputs = [x]
    for op in chain:
        inputs.append(op.output(inputs[-1]))
    boxes = [wanted]
    for op, (before, after) in reversed(list(zip(chain, pairwise(inputs), strict=True))):
        boxes.append(Box(*ends(op, before, after, boxes[-1])))
    boxes.reverse()
    assert boxes[0] == gathered, f"{chain}: view by view {boxes[0]}, at once {gathered}"
    for op, before, (held, asked) in zip(chain, inputs, pairwise(boxes), strict=False):
        t = op.run(Local(space(op, (before,)), (before,), asked, (held,)), [t], {})
        assert tuple(t.shape) == asked.shape, f"{op}: {tuple(t.shape)} for {asked}"
    return t


def ends(op: Op, before: TensorSpec, after: TensorSpec, asked: Box) -> tuple[tuple[int, ...], tuple[int, ...]]:
    (maps,) = op.needs((before,), after)
    box = needed(maps, asked)
    return box.lo, box.hi


def check_view(chain: Sequence[Op], x: TensorSpec, cell: Box) -> None:
    maps = space(Unary("relu"), (viewed_spec(x, chain),)).needs[0]
    gathered = needed(through_views(maps, x, chain), cell)
    index = torch.arange(x.volume).reshape(x.shape)
    mine = seen(chain, x, cell, gathered, index[gathered.slices()])
    assert torch.equal(mine, look_through(chain, index)[cell.slices()]), f"{chain} of {x.describe()}, {cell}"


@given(st.data())
def test_a_view(data: st.DataObject) -> None:
    """Forward and backward, for every partition."""
    x = data.draw(specs())
    op = data.draw(views(x))
    check_kernel(op, [x], data.draw(degrees(space(op, (x,)))), lambda t: look(op, t))


@given(st.data())
def test_chains_of_views(data: st.DataObject) -> None:
    x = data.draw(specs())
    chain = data.draw(chains(x))
    check_view(chain, x, data.draw(cells(space(Unary("relu"), (viewed_spec(x, chain),)))))


@given(st.data())
def test_chains_of_views_on_any_box(data: st.DataObject) -> None:
    """Also on boxes that no plan has: what is gathered holds them."""
    x = data.draw(specs())
    chain = data.draw(chains(x))
    out = viewed_spec(x, chain)
    lo = tuple(data.draw(st.integers(0, s - 1)) for s in out.shape)
    check_view(chain, x, Box(lo, tuple(data.draw(st.integers(a + 1, s)) for a, s in zip(lo, out.shape, strict=True))))


@given(st.data())
def test_chains_of_views_that_see_nothing(data: st.DataObject) -> None:
    """A concatenation has inputs of which a cell needs nothing."""
    x = data.draw(specs())
    chain = data.draw(chains(x))
    out = viewed_spec(x, chain)
    assume(out.shape)
    dim = data.draw(st.integers(0, len(out.shape) - 1))
    at = data.draw(st.integers(0, out.shape[dim]))
    lo = tuple(at if i == dim else 0 for i in range(len(out.shape)))
    check_view(chain, x, Box(lo, tuple(at if i == dim else s for i, s in enumerate(out.shape))))


@pytest.mark.parametrize(
    ("shape", "chain", "lo", "hi"),
    [
        # A slice that begins amid a channel: two channels are gathered, one and a half is wanted.
        ((2, 6, 5, 4), (Reshape((2, 120)), Slice(1, 30, 60)), (0, 0), (2, 30)),
        ((2, 6, 5, 4), (Reshape((2, 120)), Slice(1, 110, 10, -3)), (1, 5), (2, 20)),
        # Rows of 8 from rows of 6: what is gathered is no box of the view.
        ((4, 6), (Reshape((3, 8)), Slice(0, 1, 2)), (0, 0), (1, 8)),
        ((4, 6), (Reshape((3, 2, 4)), Select(1, 1), Slice(0, 1, 2)), (0, 1), (1, 3)),
        ((2, 3, 4, 5), (Reshape((6, 20)), Permute((1, 0)), Select(0, 7)), (1,), (4,)),
        ((8, 6, 5), (Reshape((8, 2, 3, 5)), Permute((0, 2, 1, 3)), Reshape((8, 6, 5))), (2, 0, 1), (7, 6, 3)),
    ],
)
def test_known_chains(shape: tuple[int, ...], chain: tuple[Op, ...], lo: tuple[int, ...], hi: tuple[int, ...]) -> None:
    check_view(chain, TensorSpec(shape, (*IMAGE, None)[: len(shape)]), Box(lo, hi))


def test_what_is_not_gathered_is_not_there() -> None:
    with pytest.raises(AssertionError, match="does not hold"):
        reshaped(torch.arange(12).reshape(2, 6), (4, 6), Box((0, 0), (2, 6)), (24,), Box((10,), (13,)))


@pytest.mark.parametrize(
    "op",
    [
        Reshape((6, 4, 5)),
        Reshape((2, 3, 20)),
        Reshape((2, 3, 2, 2, 5)),
        Permute((0, 2, 3, 1)),
        Slice(2, 1, 4, 2),
        Select(1, -1),
        Expand((7, 2, 3, 4, 5)),
    ],
)
def test_views_copy_nothing(op: Op) -> None:
    x = TensorSpec((2, 3, 4, 5), IMAGE)
    t = torch.rand(x.shape)
    at = whole(op, [x])
    out = op.run(at, [t[at.needs[0].slices()]], {})
    assert out.untyped_storage().data_ptr() == t.untyped_storage().data_ptr()
    assert torch.equal(out, look(op, t))


@given(st.data())
def test_concat(data: st.DataObject) -> None:
    rank = data.draw(st.integers(1, 4))
    shape = [data.draw(st.integers(1, 3)) for _ in range(rank)]
    dim = data.draw(st.integers(-rank, rank - 1))
    parts = []
    for _ in range(data.draw(st.integers(1, 4))):
        shape[dim] = data.draw(st.integers(1, 4))
        parts.append(TensorSpec(tuple(shape), IMAGE[:rank]))
    op = Concat(dim)
    cuts = data.draw(degrees(space(op, tuple(parts))))
    check_kernel(op, parts, cuts, lambda *t: torch.cat(t, dim))


def test_concat_of_several_types() -> None:
    x, y = TensorSpec((2,), ("n",), "int64"), TensorSpec((3,), ("n",), "float32")
    op = Concat(0)
    out = op.run(whole(op, [x, y]), [torch.arange(2), torch.rand(3)], {})
    assert str(out.dtype) == f"torch.{op.output(x, y).dtype}"
