"""Views need what the real ones read, cells of a view are boxes behind it."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.fused import Fused, through_views, viewed_spec
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.pointwise import Unary
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, check_reduction, needed

IMAGE, TOKENS = ("n", "c", "h", "w"), ("n", "s", "c")


def look(op: Op, t: Tensor) -> Tensor:
    """The real view."""
    match op:
        case Reshape(shape):
            return t.reshape(shape)
        case Permute(order):
            return t.permute(order)
        case Slice(dim, start, stop, step) if step > 0:
            at = dim % t.ndim
            return t[(slice(None),) * at + (slice(start, stop, step),)]
        case Slice(dim, start, stop, step):
            index = torch.arange(t.shape[dim])[torch.tensor(range(*slice(start, stop, step).indices(t.shape[dim])))]
            return t.index_select(dim, index)
        case Select(dim, index):
            return t.select(dim, index)
        case Expand(shape):
            return t.expand(torch.broadcast_shapes(t.shape, tuple(1 if s == -1 else s for s in shape)))
    raise AssertionError(op)


def look_through(chain: Sequence[Op], t: Tensor) -> Tensor:
    for op in chain:
        t = look(op, t)
    return t


@st.composite
def factorised(draw: st.DrawFn, volume: int) -> tuple[int, ...]:
    """A shape of `volume` elements, with some extents of 1."""
    shape = []
    while volume > 1 and len(shape) < 4:
        divisor = draw(st.sampled_from([d for d in range(1, volume + 1) if volume % d == 0]))
        shape.append(divisor)
        volume //= divisor
    return (*shape, volume)


@st.composite
def reshapes(draw: st.DrawFn, x: TensorSpec) -> Reshape:
    """Merge some neighbours, split a dimension, add or drop extents of 1; sometimes anything that fits."""
    if draw(st.integers(0, 3)) == 0:
        return Reshape(draw(factorised(x.volume)))
    shape = list(x.shape) or [1]
    for _ in range(draw(st.integers(1, 3))):
        i = draw(st.integers(0, len(shape) - 1))
        match draw(st.sampled_from(["merge", "split", "one"])):
            case "merge" if i + 1 < len(shape):
                shape[i : i + 2] = [shape[i] * shape[i + 1]]
            case "split":
                outer = draw(st.sampled_from([d for d in range(1, shape[i] + 1) if shape[i] % d == 0]))
                shape[i : i + 1] = [outer, shape[i] // outer]
            case _:
                shape = [1, *shape] if draw(st.booleans()) else [s for s in shape if s > 1] or [1]
    return Reshape(tuple(shape))


@st.composite
def views(draw: st.DrawFn, x: TensorSpec) -> Op:
    rank = len(x.shape)
    kinds = ["reshape", "reshape", "expand"] + (["permute", "slice", "select"] if rank else [])
    match draw(st.sampled_from(kinds)):
        case "permute":
            order = draw(st.permutations(range(rank)))
            return Permute(tuple(i - rank if draw(st.booleans()) else i for i in order))
        case "slice":
            dim = draw(st.integers(0, rank - 1))
            start = draw(st.integers(0, x.shape[dim] - 1))
            stop = draw(st.integers(start + 1, x.shape[dim] + 2))
            if draw(st.booleans()):
                return Slice(dim - rank, start - x.shape[dim], stop, draw(st.integers(1, 3)))
            return Slice(dim, stop - 1, start - 1 if start else -99, -draw(st.integers(1, 2)))
        case "select":
            dim = draw(st.integers(-rank, rank - 1))
            return Select(dim, draw(st.integers(-x.shape[dim], x.shape[dim] - 1)))
        case "expand":
            shape = tuple(draw(st.integers(2, 3)) if s == 1 and draw(st.booleans()) else -1 for s in x.shape)
            return Expand((2, *(1 if s == -1 else s for s in shape)) if draw(st.booleans()) else shape)
    return draw(reshapes(x))


@st.composite
def specs(draw: st.DrawFn) -> TensorSpec:
    dims = draw(st.sampled_from([IMAGE, TOKENS, ("s", "n", "c")]))
    shape = tuple(draw(st.sampled_from([1, 2, 3, 4, 6] if len(dims) == 3 else [1, 2, 3, 4])) for _ in dims)
    return TensorSpec(shape, dims)


@st.composite
def chains(draw: st.DrawFn, x: TensorSpec, longest: int = 4) -> tuple[Op, ...]:
    chain: list[Op] = []
    for _ in range(draw(st.integers(1, longest))):
        op = draw(views(x))
        out = op.output(x)
        if out.volume <= 500 and len(out.shape) <= 6:
            x = out
            chain.append(op)
    return tuple(chain)


@given(st.data())
def test_a_view_needs_what_it_reads(data: st.DataObject) -> None:
    x = data.draw(specs())
    op = data.draw(views(x))
    check_needs(op, [x], data.draw(cells(space(op, (x,)))), lambda t: look(op, t))


@given(st.data())
def test_cells_of_a_view_are_boxes_behind_it(data: st.DataObject) -> None:
    """The box that is gathered holds the elements of the cell, and no others (but what a slice steps over)."""
    x = data.draw(specs())
    chain = data.draw(chains(x))
    seen = viewed_spec(x, chain)
    where = space(Unary("relu"), (seen,))
    cell = data.draw(cells(where))
    box = needed(through_views(where.needs[0], x, chain), cell)
    index = torch.arange(x.volume).reshape(x.shape)
    gathered = set(index[box.slices()].flatten().tolist())
    wanted = set(look_through(chain, index)[cell.slices()].flatten().tolist())
    # A slice steps over elements, and what is taken from an inner part of a dimension is gathered with all of it.
    assert wanted == gathered & set(look_through(chain, index).flatten().tolist())
    if all(isinstance(op, (Reshape, Permute)) for op in chain):
        assert wanted == gathered


@given(st.data())
def test_chains_of_views_into_a_linear_layer(data: st.DataObject) -> None:
    """Composed maps against the truth: poison whatever is not in the box of the tensor behind all views."""
    x = data.draw(specs())
    chain = data.draw(chains(x))
    assume(len(viewed_spec(x, chain).shape) > 0)
    op = Fused(Linear(4), (chain,))

    def reference(t: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return torch.nn.functional.linear(look_through(chain, t), weight, bias)

    where = space(op, (x,))
    # What is taken from the inner part of a split dimension is gathered with all of that part.
    taken = [i for i, view in enumerate(chain) if isinstance(view, (Slice, Select))]
    tight = not any(isinstance(view, Reshape) for view in chain[: max(taken, default=0)])
    check_needs(op, [x], data.draw(cells(where)), reference, tight=tight)
    check_reduction(op, [x], data.draw(st.integers(1, where.dims[-1].max_degree)), reference)


@given(st.data())
def test_parts_of_a_reduction_over_a_view_are_boxes(data: st.DataObject) -> None:
    x = data.draw(specs())
    chain = (data.draw(reshapes(x)),)
    seen = viewed_spec(x, chain)
    where = space(Linear(1), (seen,))
    cell = data.draw(cells(where, reductions=True))
    index = torch.arange(x.volume).reshape(x.shape)
    box = needed(through_views(where.needs[0], x, chain), cell)
    part = Box((*cell.lo[: len(seen.shape) - 1], cell.lo[-1]), (*cell.hi[: len(seen.shape) - 1], cell.hi[-1]))
    wanted = look_through(chain, index)[part.slices()]
    assert sorted(index[box.slices()].flatten().tolist()) == sorted(wanted.flatten().tolist())


def seen(
    shape: tuple[int, ...], dims: tuple[str | None, ...], *chain: Op
) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """Labels and units through a chain of views."""
    out = viewed_spec(TensorSpec(shape, dims), chain)
    return out.dims, out.units


def test_labels_of_reshapes() -> None:
    image = (8, 6, 5, 4)
    assert seen(image, IMAGE, Reshape((8, 120))) == (("n", "c"), (1, 20))
    assert seen(image, IMAGE, Reshape((8, 6, 20))) == (("n", "c", "h"), (1, 1, 4))
    assert seen(image, IMAGE, Reshape((8, 120)), Reshape(image)) == (("n", "c", None, None), (1, 1, 5, 4))
    assert seen(image, IMAGE, Reshape((1, 8, 6, 1, 5, 4))) == ((None, "n", "c", None, "h", "w"), (1,) * 6)
    assert seen((8, 6, 1, 1), IMAGE, Reshape((8, 6))) == (("n", "c"), (1, 1))
    assert seen((8, 1, 5, 4), IMAGE, Reshape((8, 20))) == (("n", "h"), (1, 4))
    assert seen((8, 1, 5, 4), IMAGE, Reshape((8, 1, 20))) == (("n", "c", "h"), (1, 1, 4))
    assert seen((1, 6, 5, 4), IMAGE, Reshape((1, 120))) == (("n", "c"), (1, 20))
    assert seen((1, 6, 5, 4), IMAGE, Reshape((120,))) == (("c",), (20,))
    assert seen((8, 6), ("n", "c"), Reshape((8, 6, 1, 1))) == (("n", "c", None, None), (1, 1, 1, 1))
    assert seen((8, 6), ("n", "c"), Reshape((4, 12))) == (("n", None), (1, 12))
    assert seen((4, 6), ("n", "c"), Reshape((8, 3))) == (("n", None), (2, 3))
    # A merged dimension splits at its unit: 15 channels of 4 into 5 blocks of 3 channels, or 30 half channels.
    assert seen((2, 15, 4), ("n", "c", "h"), Reshape((2, 60)), Reshape((2, 5, 12))) == (("n", "c", None), (1, 1, 12))
    assert seen((2, 15, 4), ("n", "c", "h"), Reshape((2, 60)), Reshape((2, 30, 2))) == (("n", "c", None), (1, 2, 2))


def test_channel_shuffle() -> None:
    """Shuffled channels cannot be cut, samples and space can."""
    dims, units = seen((8, 6, 5, 4), IMAGE, Reshape((8, 2, 3, 5, 4)), Permute((0, 2, 1, 3, 4)), Reshape((8, 6, 5, 4)))
    assert dims == ("n", None, "h", "w")
    assert units == (1, 6, 1, 1)


def test_pixel_shuffle() -> None:
    dims, units = seen(
        (2, 12, 5, 4), IMAGE, Reshape((2, 3, 2, 2, 5, 4)), Permute((0, 1, 4, 2, 5, 3)), Reshape((2, 3, 10, 8))
    )
    assert (dims, units) == (("n", "c", "h", "w"), (1, 1, 2, 2))


def test_windows_of_a_shifted_window_transformer() -> None:
    windows = (Reshape((2, 4, 7, 2, 7, 6)), Permute((0, 1, 3, 2, 4, 5)), Reshape((16, 49, 6)))
    back = (Reshape((2, 4, 2, 7, 7, 6)), Permute((0, 1, 3, 2, 4, 5)), Reshape((2, 28, 14, 6)))
    start = ((2, 28, 14, 6), ("n", "h", "w", "c"))
    assert seen(*start, *windows) == (("n", None, "c"), (8, 49, 1))
    assert seen(*start, *windows, *back)[0] == ("n", None, None, "c")


def test_heads_of_attention() -> None:
    heads = (Reshape((2, 5, 3, 4)), Permute((0, 2, 1, 3)))
    assert seen((2, 5, 12), TOKENS, *heads) == (("n", "c", "s", None), (1, 1, 1, 4))
    assert seen((2, 5, 12), TOKENS, *heads, Permute((0, 2, 1, 3)), Reshape((2, 5, 12))) == (TOKENS, (1, 1, 4))
    # Key and value heads repeated for each group of queries.
    grouped = (Reshape((2, 3, 1, 5, 4)), Expand((2, 3, 2, 5, 4)), Reshape((2, 6, 5, 4)))
    assert seen((2, 5, 12), TOKENS, *heads, *grouped) == (("n", "c", "s", None), (1, 2, 1, 4))


def test_samples_inside_a_merged_dimension_cannot_be_cut() -> None:
    """nn.MultiheadAttention merges (s, n) before its last linear layer: importers reshape after it, not before."""
    back = Permute((2, 0, 1, 3))
    start = ((2, 3, 5, 4), ("n", "c", "s", None))
    assert seen(*start, back, Reshape((10, 12)), Reshape((5, 2, 12))) == (("s", None, "c"), (1, 2, 4))
    assert seen(*start, back, Reshape((5, 2, 12))) == (("s", "n", "c"), (1, 1, 4))


def test_labels_of_slices() -> None:
    flat = Reshape((8, 120))
    assert seen((8, 6, 5, 4), IMAGE, flat, Slice(1, 40, 80)) == (("n", "c"), (1, 20))
    assert seen((8, 6, 5, 4), IMAGE, flat, Slice(1, 30, 80)) == (("n", None), (1, 50))
    assert seen((8, 6, 5, 4), IMAGE, Slice(-1, 0, 4, 2)) == (IMAGE, (1, 1, 1, 1))
    assert seen((8, 6, 5, 4), IMAGE, Slice(2, -1, -99, -1)) == (("n", "c", None, "w"), (1, 1, 5, 1))
    assert seen((8, 6, 5, 4), IMAGE, Select(1, -1)) == (("n", "h", "w"), (1, 1, 1))


@pytest.mark.parametrize(
    ("op", "message"),
    [
        (Reshape((7, 2)), "does not reshape"),
        (Permute((0, 0, 1)), "does not order"),
        (Permute((0, 1)), "does not order"),
        (Permute((0, 1, 5)), "dimension 5"),
        (Slice(1, 3, 3), "is empty"),
        (Slice(1, 0, 3, 0), "cannot be 0"),
        (Select(1, 5), "no index 5"),
        (Expand((4, 5, 7)), "does not expand"),
    ],
)
def test_views_that_do_not_fit(op: Op, message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        op.output(TensorSpec((4, 5, 6), TOKENS))
