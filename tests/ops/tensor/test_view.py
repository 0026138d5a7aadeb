"""Views and concatenations: what they read, their labels, and that cells make the whole."""

from collections.abc import Callable, Sequence
from itertools import pairwise

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional

from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local
from layerwise.ops.fused import Fused, needed_box, through_views, viewed_spec
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.pool import Pool
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.merge import reshaped
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice
from layerwise.tensor import TensorSpec
from tests.ops.harness import cells, check_needs, check_reduction, whole
from tests.ops.kernels import check_split

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
def test_a_view(data: st.DataObject) -> None:
    """It needs what it reads, and is itself, both ways, under every partition."""
    x = data.draw(specs())
    op = data.draw(views(x))
    check_split(data, op, [x], lambda t: look(op, t))


@given(st.data())
def test_cells_of_a_view_are_boxes_behind_it(data: st.DataObject) -> None:
    """The box that is gathered holds the elements of the cell, and no others (but what a slice steps over)."""
    x = data.draw(specs())
    chain = data.draw(chains(x))
    seen0 = viewed_spec(x, chain)
    where = space(Unary("relu"), (seen0,))
    cell = data.draw(cells(where))
    box = needed_box(through_views(where.needs[0], x, chain), cell)
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
    seen0 = viewed_spec(x, chain)
    where = space(Linear(1), (seen0,))
    cell = data.draw(cells(where, reductions=True))
    index = torch.arange(x.volume).reshape(x.shape)
    box = needed_box(through_views(where.needs[0], x, chain), cell)
    part = Box((*cell.lo[: len(seen0.shape) - 1], cell.lo[-1]), (*cell.hi[: len(seen0.shape) - 1], cell.hi[-1]))
    wanted = look_through(chain, index)[part.slices()]
    assert sorted(index[box.slices()].flatten().tolist()) == sorted(wanted.flatten().tolist())


def seen0(
    shape: tuple[int, ...], dims: tuple[str | None, ...], *chain: Op
) -> tuple[tuple[str | None, ...], tuple[int, ...]]:
    """Labels and units through a chain of views."""
    out = viewed_spec(TensorSpec(shape, dims), chain)
    return out.dims, out.units


def test_labels_of_reshapes() -> None:
    image = (8, 6, 5, 4)
    assert seen0(image, IMAGE, Reshape((8, 120))) == (("n", "c"), (1, 20))
    assert seen0(image, IMAGE, Reshape((8, 6, 20))) == (("n", "c", "h"), (1, 1, 4))
    assert seen0(image, IMAGE, Reshape((8, 120)), Reshape(image)) == (("n", "c", None, None), (1, 1, 5, 4))
    assert seen0(image, IMAGE, Reshape((1, 8, 6, 1, 5, 4))) == ((None, "n", "c", None, "h", "w"), (1,) * 6)
    assert seen0((8, 6, 1, 1), IMAGE, Reshape((8, 6))) == (("n", "c"), (1, 1))
    assert seen0((8, 1, 5, 4), IMAGE, Reshape((8, 20))) == (("n", "h"), (1, 4))
    assert seen0((8, 1, 5, 4), IMAGE, Reshape((8, 1, 20))) == (("n", "c", "h"), (1, 1, 4))
    assert seen0((1, 6, 5, 4), IMAGE, Reshape((1, 120))) == (("n", "c"), (1, 20))
    assert seen0((1, 6, 5, 4), IMAGE, Reshape((120,))) == (("c",), (20,))
    assert seen0((8, 6), ("n", "c"), Reshape((8, 6, 1, 1))) == (("n", "c", None, None), (1, 1, 1, 1))
    assert seen0((8, 6), ("n", "c"), Reshape((4, 12))) == (("n", None), (1, 12))
    assert seen0((4, 6), ("n", "c"), Reshape((8, 3))) == (("n", None), (2, 3))
    # A merged dimension splits at its unit: 15 channels of 4 into 5 blocks of 3 channels, or 30 half channels.
    assert seen0((2, 15, 4), ("n", "c", "h"), Reshape((2, 60)), Reshape((2, 5, 12))) == (("n", "c", None), (1, 1, 12))
    assert seen0((2, 15, 4), ("n", "c", "h"), Reshape((2, 60)), Reshape((2, 30, 2))) == (("n", "c", None), (1, 2, 2))


def test_channel_shuffle() -> None:
    """Shuffled channels cannot be cut, samples and space can."""
    dims, units = seen0((8, 6, 5, 4), IMAGE, Reshape((8, 2, 3, 5, 4)), Permute((0, 2, 1, 3, 4)), Reshape((8, 6, 5, 4)))
    assert dims == ("n", None, "h", "w")
    assert units == (1, 6, 1, 1)


def test_pixel_shuffle() -> None:
    dims, units = seen0(
        (2, 12, 5, 4), IMAGE, Reshape((2, 3, 2, 2, 5, 4)), Permute((0, 1, 4, 2, 5, 3)), Reshape((2, 3, 10, 8))
    )
    assert (dims, units) == (("n", "c", "h", "w"), (1, 1, 2, 2))


WINDOWS: dict[str, tuple[Op, Callable[[Tensor], Tensor]]] = {
    "pool": (Pool("max", (3,), (2,), ((1, 1),), (1,)), lambda t: functional.max_pool1d(t, 3, 2, 1)),
    "pad": (Pad(((0, 0), (0, 0), (2, 1)), "replicate"), lambda t: functional.pad(t, (2, 1), "replicate")),
    "interpolate": (Interpolate((31,)), lambda t: functional.interpolate(t, 31)),
}


@pytest.mark.parametrize("name", WINDOWS)
@pytest.mark.parametrize("sliced", [False, True])
@given(st.data())
def test_windows_end_amid_the_units_of_a_view(name: str, sliced: bool, data: st.DataObject) -> None:
    """Merged positions are cut anywhere: more is read there than a cell's part."""
    op, reference = WINDOWS[name]
    chain = (Reshape((2, 3, 20)), Slice(2, 3, 18))[: 1 + sliced]
    x, fused = TensorSpec((2, 3, 5, 4), IMAGE), Fused(op, (chain,))
    where = space(fused, (x,))
    assert where.max_degree("h") == where.out.shape[2]
    check_needs(fused, [x], data.draw(cells(where)), lambda t: reference(look_through(chain, t)), tight=False)


FRAMES = Reshape((2, 4, 3, 5, 2)), Permute((0, 2, 1, 3, 4))  # as many as units of the samples have


@given(st.data())
def test_a_convolution_names_what_a_view_binds(data: st.DataObject) -> None:
    op = Fused(Conv(2, (3, 1, 1), (1, 1, 1), ((1, 1), (0, 0), (0, 0)), (1, 1, 1)), (FRAMES,))
    x = TensorSpec((8, 3, 5, 2), IMAGE, units=(4, 1, 1, 1))
    where = space(op, (x,))
    assert where.max_degree("d") == 4

    def reference(t: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return functional.conv3d(look_through(FRAMES, t), weight, bias, padding=(1, 0, 0))

    check_needs(op, [x], data.draw(cells(where)), reference, tight=False)


@given(st.data())
def test_a_sum_is_cut_as_the_operand_that_no_view_binds(data: st.DataObject) -> None:
    op, apart = Fused(Binary("add"), (FRAMES, ())), TensorSpec((2, 3, 4, 5, 2), ("n", "c", "d", "h", "w"))
    specs = [TensorSpec((8, 3, 5, 2), IMAGE, units=(4, 1, 1, 1)), apart]
    where = space(op, tuple(specs))
    assert where.max_degree("d") == 4
    check_needs(op, specs, data.draw(cells(where)), lambda a, b: look_through(FRAMES, a) + b, tight=False)


def test_windows_of_a_shifted_window_transformer() -> None:
    windows = (Reshape((2, 4, 7, 2, 7, 6)), Permute((0, 1, 3, 2, 4, 5)), Reshape((16, 49, 6)))
    back = (Reshape((2, 4, 2, 7, 7, 6)), Permute((0, 1, 3, 2, 4, 5)), Reshape((2, 28, 14, 6)))
    start = ((2, 28, 14, 6), ("n", "h", "w", "c"))
    assert seen0(*start, *windows) == (("n", None, "c"), (8, 49, 1))
    assert seen0(*start, *windows, *back)[0] == ("n", None, None, "c")


def test_heads_of_attention() -> None:
    heads = (Reshape((2, 5, 3, 4)), Permute((0, 2, 1, 3)))
    assert seen0((2, 5, 12), TOKENS, *heads) == (("n", "c", "s", None), (1, 1, 1, 4))
    assert seen0((2, 5, 12), TOKENS, *heads, Permute((0, 2, 1, 3)), Reshape((2, 5, 12))) == (TOKENS, (1, 1, 4))
    # Key and value heads repeated for each group of queries.
    grouped = (Reshape((2, 3, 1, 5, 4)), Expand((2, 3, 2, 5, 4)), Reshape((2, 6, 5, 4)))
    assert seen0((2, 5, 12), TOKENS, *heads, *grouped) == (("n", "c", "s", None), (1, 2, 1, 4))


def test_samples_inside_a_merged_dimension_cannot_be_cut() -> None:
    """nn.MultiheadAttention merges (s, n) before its last linear layer: importers reshape after it, not before."""
    back = Permute((2, 0, 1, 3))
    start = ((2, 3, 5, 4), ("n", "c", "s", None))
    assert seen0(*start, back, Reshape((10, 12)), Reshape((5, 2, 12))) == (("s", None, "c"), (1, 2, 4))
    assert seen0(*start, back, Reshape((5, 2, 12))) == (("s", "n", "c"), (1, 1, 4))


def test_labels_of_slices() -> None:
    flat = Reshape((8, 120))
    assert seen0((8, 6, 5, 4), IMAGE, flat, Slice(1, 40, 80)) == (("n", "c"), (1, 20))
    assert seen0((8, 6, 5, 4), IMAGE, flat, Slice(1, 30, 80)) == (("n", None), (1, 50))
    rows = Permute((0, 2, 3, 1)), Reshape((8, 20, 6))
    assert seen0((8, 6, 5, 4), IMAGE, *rows, Slice(1, 2, 12)) == (("n", "h", "c"), (1, 2, 1))
    assert seen0((8, 6, 5, 4), IMAGE, Slice(-1, 0, 4, 2)) == (IMAGE, (1, 1, 1, 1))
    assert seen0((8, 6, 5, 4), IMAGE, Slice(2, -1, -99, -1)) == (("n", "c", None, "w"), (1, 1, 5, 1))
    assert seen0((8, 6, 5, 4), IMAGE, Select(1, -1)) == (("n", "h", "w"), (1, 1, 1))


@given(st.data())
def test_concat_of_flattened_images(data: st.DataObject) -> None:
    """Cells end between the channels of every image, or nowhere."""
    images = []
    for _ in range(data.draw(st.integers(1, 3))):
        images.append(TensorSpec((2, *(data.draw(st.integers(1, 3)) for _ in range(3))), IMAGE))
    op = Fused(Concat(1), tuple((Reshape((2, x.volume // 2)),) for x in images))
    where = space(op, tuple(images))
    check_needs(op, images, data.draw(cells(where)), lambda *t: torch.cat([x.flatten(1) for x in t], 1))


def test_labels_of_concats() -> None:
    def joined(*rows: tuple[int, str | None, int]) -> tuple[str | None, int]:
        out = Concat(1).output(*(TensorSpec((2, s), ("n", d), units=(1, u)) for s, d, u in rows))
        return out.dims[1], out.units[1]

    assert joined((4, "c", 1), (6, "c", 1)) == ("c", 1)
    assert joined((4, "c", 2), (6, "c", 1)) == ("c", 2)
    assert joined((4, "c", 2), (3, "c", 1)) == (None, 1)
    assert joined((4, "c", 2), (6, "c", 3)) == (None, 1)
    assert joined((6, "c", 2), (6, "c", 3)) == ("c", 6)
    assert joined((1, None, 1), (6, "s", 1)) == ("s", 1)  # a class token
    assert joined((1, None, 1), (6, "h", 3)) == ("h", 1)  # more is read than a cell's part
    samples = Concat(0).output(TensorSpec((2, 3), ("n", "c")), TensorSpec((1, 3), ("n", "c")))
    assert samples.dims == ("n", "c")
    mixed = Concat(1).output(TensorSpec((2, 3), ("n", "c"), "float16"), TensorSpec((2, 3), ("n", "c"), "float32"))
    assert mixed.dtype == "float32"


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
    box = needed_box(maps, asked)
    return box.lo, box.hi


def check_view(chain: Sequence[Op], x: TensorSpec, cell: Box) -> None:
    maps = space(Unary("relu"), (viewed_spec(x, chain),)).needs[0]
    gathered = needed_box(through_views(maps, x, chain), cell)
    index = torch.arange(x.volume).reshape(x.shape)
    mine = seen(chain, x, cell, gathered, index[gathered.slices()])
    assert torch.equal(mine, look_through(chain, index)[cell.slices()]), f"{chain} of {x.describe()}, {cell}"


@given(st.data())
def test_chains_of_views_on_any_box(data: st.DataObject) -> None:
    """Also on boxes that no plan has: what is gathered holds them."""
    x = data.draw(specs())
    chain = data.draw(chains(x))
    out = viewed_spec(x, chain)
    lo = tuple(data.draw(st.integers(0, s - 1)) for s in out.shape)
    check_view(chain, x, Box(lo, tuple(data.draw(st.integers(a + 1, s)) for a, s in zip(lo, out.shape, strict=True))))
    if out.shape:  # a concatenation has inputs of which a cell needs nothing
        dim = data.draw(st.integers(0, len(out.shape) - 1))
        at = data.draw(st.integers(0, out.shape[dim]))
        none = [(at, at) if i == dim else (0, s) for i, s in enumerate(out.shape)]
        check_view(chain, x, Box(*zip(*none, strict=True)))


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
    assert space(op, tuple(parts)).out.dims == IMAGE[:rank]
    check_split(data, op, parts, lambda *t: torch.cat(t, dim))


def test_concat_of_several_types() -> None:
    x, y = TensorSpec((2,), ("n",), "int64"), TensorSpec((3,), ("n",), "float32")
    op = Concat(0)
    out = op.run(whole(op, [x, y]), [torch.arange(2), torch.rand(3)], {})
    assert str(out.dtype) == f"torch.{op.output(x, y).dtype}"
