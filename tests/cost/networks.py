"""Random small networks: two or three layers each, of the kinds whose transfers differ."""

from collections.abc import Sequence

from hypothesis import assume
from hypothesis import strategies as st

from layerwise.graph.builder import GraphBuilder
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Maps
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Embedding, Linear, MatMul
from layerwise.ops.nn.loss import Loss
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, LocalResponseNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.tensor.along import Concat, Softmax
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu, Unary
from layerwise.ops.tensor.reduce import Reduce
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice
from layerwise.tensor import TensorSpec

SPATIAL = {1: ("l",), 2: ("h", "w")}


def add(b: GraphBuilder, name: str, op: Op, inputs: Sequence[str], tied: Sequence[str] = ()) -> str:
    """Adds a layer with parameters of its own, but for the `tied` ones, which come first."""
    names = [p.name for p in space(op, tuple(b.spec(i) for i in inputs)).parameters]
    return b.add(name, op, inputs, [*tied, *(f"{name}.{p}" for p in names[len(tied) :])])


def pointwise_conv(channels: int, rank: int, bias: bool = False) -> Conv:
    return Conv(channels, (1,) * rank, (1,) * rank, ((0, 0),) * rank, (1,) * rank, bias=bias)


def each(draw: st.DrawFn, rank: int, low: int, high: int) -> tuple[int, ...]:
    return tuple(draw(st.integers(low, high)) for _ in range(rank))


@st.composite
def images(draw: st.DrawFn, low: int = 1, high: int = 7) -> TensorSpec:
    rank = draw(st.sampled_from([1, 1, 2]))
    channels = draw(st.sampled_from([1, 2, 4, 6]))
    shape = (draw(st.integers(1, 5)), channels, *each(draw, rank, low, high))
    return TensorSpec(shape, ("n", "c", *SPATIAL[rank]), draw(st.sampled_from(["float32", "float16", "float64"])))


def window_op(draw: st.DrawFn, x: TensorSpec) -> Op:
    """Anything that reads a window of its input: halos where that is split."""
    rank, channels = len(x.shape) - 2, x.shape[1]
    kernel, stride, dilation = each(draw, rank, 1, 3), each(draw, rank, 1, 3), each(draw, rank, 1, 2)
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    out = groups * draw(st.integers(1, 3))
    pads = tuple((draw(st.integers(0, k // 2)), draw(st.integers(0, k // 2))) for k in kernel)
    ones = (1,) * rank
    kind = draw(st.integers(0, 6))
    if kind <= 1:
        return Conv(out, kernel, stride, pads, dilation, groups, bias=draw(st.booleans()))
    if kind == 2:
        return ConvTranspose(out, kernel, stride, ((0, 0),) * rank, (0,) * rank, ones, groups)
    if kind == 3:
        return Pool("max", kernel, stride, pads, dilation, ceil_mode=draw(st.booleans()))
    if kind == 4:
        return AdaptivePool("average", each(draw, rank, 1, 4))
    if kind == 5:
        return Interpolate(each(draw, rank, 1, 9), "linear")
    if draw(st.booleans()):
        return LocalResponseNorm(draw(st.integers(1, 3)))
    return Pad(((0, 0), (0, 0), *((draw(st.integers(-1, 2)), draw(st.integers(0, 2))) for _ in range(rank))))


@st.composite
def windows(draw: st.DrawFn) -> LayerGraph:
    """A convolution (whose k may be split), then a window over it."""
    b = GraphBuilder("windows")
    x = b.input("x", draw(images(low=5)))
    x = add(b, "first", pointwise_conv(draw(st.sampled_from([1, 2, 4, 6])), len(b.spec(x).shape) - 2), [x])
    return b.finish([add(b, "second", window_op(draw, b.spec(x)), [x])])


def view(draw: st.DrawFn, x: TensorSpec) -> Op:
    """Any view of a tensor."""
    rank = len(x.shape)
    at = draw(st.integers(0, rank - 1))
    kind = draw(st.integers(0, 5))
    if kind == 0:
        return Permute(tuple(draw(st.permutations(range(rank)))))
    if kind == 1:
        start = draw(st.integers(0, x.shape[at] - 1))
        return Slice(at, start, draw(st.integers(start + 1, x.shape[at])), draw(st.integers(1, 2)))
    if kind == 2 and rank > 2:
        return Select(at, draw(st.integers(0, x.shape[at] - 1)))
    if kind == 3:
        return Expand((draw(st.integers(1, 3)), *x.shape) if draw(st.booleans()) else x.shape)
    last = draw(st.integers(at, rank - 1))  # merge, then perhaps split at another place
    merged = 1
    for extent in x.shape[at : last + 1]:
        merged *= extent
    factor = draw(st.sampled_from([f for f in range(1, merged + 1) if merged % f == 0]))
    middle = draw(st.sampled_from([(merged,), (factor, merged // factor)]))
    return Reshape((*x.shape[:at], *middle, *x.shape[last + 1 :]))


@st.composite
def views(draw: st.DrawFn) -> LayerGraph:
    """Views between two layers, fused into the second."""
    b = GraphBuilder("views")
    x = b.input("x", draw(images(high=4)))
    x = add(b, "first", pointwise_conv(draw(st.sampled_from([2, 3, 4])), len(b.spec(x).shape) - 2), [x])
    for i in range(draw(st.integers(1, 3))):
        x = add(b, f"view{i}", view(draw, b.spec(x)), [x])
    last = draw(st.sampled_from([Linear(4, bias=True), Softmax(-1), Reduce("sum", (0,)), Unary("relu")]))
    network = fuse(b.finish([add(b, "last", last, [x])]))
    assume(all(one_to_one(maps) for layer in network.layers for maps in layer.space.needs))
    return network


def one_to_one(maps: Maps) -> bool:
    """Whether each dimension drives one of an input's. See test_transfer: a reshape of ones may break that."""
    sources = [m.source for m in maps if m.source is not None]
    return len(set(sources)) == len(sources)


@st.composite
def branches(draw: st.DrawFn) -> LayerGraph:
    """Concats, residual and broadcast epilogues, norms."""
    b = GraphBuilder("branches")
    spec = draw(images(high=4))
    rank, ends = len(spec.shape) - 2, []
    x = b.input("x", spec)
    for i in range(draw(st.integers(2, 3))):
        ends.append(add(b, f"branch{i}", pointwise_conv(draw(st.integers(1, 4)), rank), [x]))
    joined = add(b, "concat", Concat(1), ends)
    channels = b.spec(joined).shape[1]
    y = add(b, "conv", pointwise_conv(channels, rank, bias=True), [joined])
    groups = draw(st.sampled_from([g for g in range(1, channels + 1) if channels % g == 0]))
    y = add(b, "norm", draw(st.sampled_from([BatchNorm(), GroupNorm(groups), Prelu(channels)])), [y])
    y = add(b, "add", Binary("add"), draw(st.permutations([y, joined])))
    scale = add(b, "scale", Reduce("mean", tuple(range(2, 2 + rank)), keepdim=True), [joined])
    y = add(b, "gate", Binary("mul"), [y, scale])
    y = add(b, "drop", Dropout(0.5), [y])
    graph = b.finish([y])
    return fuse(graph) if draw(st.booleans()) else graph


@st.composite
def sequences(draw: st.DrawFn) -> LayerGraph:
    """Integer ids, a tied embedding, attention, mixed element types, and a scalar loss."""
    b = GraphBuilder("sequences")
    n, s, vocabulary, width = draw(st.integers(1, 4)), draw(st.integers(1, 5)), draw(st.integers(2, 6)), 2
    ids = b.input("ids", TensorSpec((n, s), ("n", "s"), "int64"))
    weight = b.tied("weight", TensorSpec((vocabulary, width), (None, "c"), "float32"))
    x = add(b, "embed", Embedding(vocabulary, width), [ids], [weight])
    if draw(st.booleans()):
        x = add(b, "attend", Attention(), [x, x, x])
    else:
        scores = add(b, "scores", MatMul(), [x, add(b, "turn", Permute((0, 2, 1)), [x])])
        x = add(b, "mix", MatMul(), [add(b, "softmax", Softmax(-1), [scores]), x])
    if draw(st.booleans()):
        x = add(b, "cast", Cast("float16"), [x])
    x = add(b, "decode", Linear(vocabulary, bias=draw(st.booleans())), [x], [weight])
    flat = add(b, "flat", Reshape((n * s, vocabulary)), [x])
    target = add(b, "target", Reshape((n * s,)), [ids])
    loss = add(b, "loss", Loss("cross_entropy"), [flat, target])
    positive = add(b, "positive", Unary("gt_scalar", (0.0,)), [x])
    graph = b.finish([add(b, "mean", Reduce("mean", (0,)), [loss]), positive])
    return fuse(graph) if draw(st.booleans()) else graph
