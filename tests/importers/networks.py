"""Networks built by hand: of the shapes that the searches and rewrites are about, and random ones."""

from collections.abc import Sequence
from math import prod

from hypothesis import strategies as st

from layerwise.graph.builder import GraphBuilder
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Op, space
from layerwise.ops.nn.conv import Conv
from layerwise.ops.nn.linear import Linear
from layerwise.ops.nn.norm import BatchNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.tensor.along import Concat
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu, Unary
from layerwise.ops.tensor.view import Permute, Reshape, Slice
from layerwise.tensor import TensorSpec

IMAGE = ("n", "c", "h", "w")


class Net(GraphBuilder):
    """A builder that names parameters after their layer."""

    def image(self, batch: int, channels: int = 4, side: int = 8) -> str:
        return self.input("x", TensorSpec((batch, channels, side, side), IMAGE))

    def put(self, name: str, op: Op, *inputs: str, tied: Sequence[str] = ()) -> str:
        names = [p.name for p in space(op, tuple(self.spec(i) for i in inputs)).parameters]
        return self.add(name, op, inputs, [*tied, *(f"{name}.{p}" for p in names[len(tied) :])])

    def conv(self, name: str, x: str, channels: int, kernel: int = 3) -> str:
        pad = (kernel // 2, kernel // 2)
        return self.put(name, Conv(channels, (kernel,) * 2, (1, 1), (pad, pad), (1, 1)), x)

    def head(self, x: str, classes: int = 10) -> LayerGraph:
        """Global pooling, flatten, and a linear layer."""
        pooled = self.put("pool", AdaptivePool("average", (1, 1)), x)
        flat = self.put("flatten", Reshape((self.spec(x).shape[0], self.spec(x).shape[1])), pooled)
        return self.finish([self.put("classifier", Linear(classes), flat)])


def chain(batch: int, depth: int = 4, width: int = 8) -> LayerGraph:
    """Convolutions one after the other, then two linear layers: VGG in small."""
    b = Net("chain")
    x = b.image(batch)
    for i in range(depth):
        x = b.put(f"relu{i}", Unary("relu"), b.conv(f"conv{i}", x, width))
    x = b.put("maxpool", Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)), x)
    x = b.put("flatten", Reshape((batch, prod(b.spec(x).shape[1:]))), x)
    x = b.put("drop", Dropout(0.0), b.put("relu", Unary("relu"), b.put("fc1", Linear(4096), x)))
    return b.finish([b.put("fc2", Linear(10), x)])


def residual(batch: int, blocks: int = 3, width: int = 8) -> LayerGraph:
    """ResNet in small: each block adds two convolutions to its input, which one block convolves as well."""
    b = Net("residual")
    x = b.conv("stem", b.image(batch), width)
    for i in range(blocks):
        y = b.put(f"bn{i}", BatchNorm(), b.conv(f"conv{i}a", x, width))
        y = b.conv(f"conv{i}b", b.put(f"relu{i}a", Unary("relu"), y), width)
        way = b.conv(f"down{i}", x, width, 1) if i == 1 else x
        x = b.put(f"relu{i}b", Unary("relu"), b.put(f"add{i}", Binary("add"), y, way))
    return b.head(x)


def inception(batch: int, modules: int = 2, width: int = 4) -> LayerGraph:
    """Modules of four branches, one of which forks again, joined by a concat."""
    b = Net("inception")
    x = b.conv("stem", b.image(batch), width)
    for i in range(modules):
        one = b.conv(f"m{i}.one", x, width, 1)
        three = b.conv(f"m{i}.three_b", b.conv(f"m{i}.three_a", x, width, 1), width)
        fork = b.conv(f"m{i}.fork", x, width, 1)
        left, right = b.conv(f"m{i}.left", fork, width), b.conv(f"m{i}.right", fork, width)
        x = b.put(f"m{i}.cat", Concat(1), one, three, left, right)
    return b.head(x)


def dense(batch: int, layers: int = 5, width: int = 4) -> LayerGraph:
    """A block of DenseNet: every layer reads the concat of all before it."""
    b = Net("dense")
    made = [b.conv("stem", b.image(batch), width)]
    for i in range(1, layers):
        joined = b.put(f"cat{i}", Concat(1), *made) if i > 1 else made[0]
        made.append(b.conv(f"conv{i}", joined, width))
    return b.head(b.put("last", Concat(1), *made))


def crossing(batch: int, layers: int = 4, width: int = 4) -> LayerGraph:
    """As `dense`, each concat in another order, so that no beginning is shared: K stays large."""
    b = Net("crossing")
    made = [b.conv("stem", b.image(batch), width)]
    for i in range(1, layers):
        joined = b.put(f"cat{i}", Concat(1), *made[i % 2 :: -1], *made[i % 2 + 1 :]) if i > 1 else made[0]
        made.append(b.conv(f"conv{i}", joined, width))
    return b.head(b.put("last", Concat(1), *made[::-1]))


@st.composite
def networks(draw: st.DrawFn, batch: int = 2, size: int = 9) -> LayerGraph:
    """Any small network of what fusing rewrites: views, epilogues, additions, concats, a parameter used twice."""
    b = Net("random")
    values = [b.image(batch, channels=3, side=2)]
    if draw(st.booleans()):
        values.append(b.input("second", TensorSpec((batch, 6), ("n", "c"))))
    kinds = st.sampled_from(["linear", "follow", "follow", "view", "view", "add", "concat", "tied"])
    for i in range(draw(st.integers(1, size))):
        x = draw(st.sampled_from(values[-4:]))
        spec, kind = b.spec(x), draw(kinds)
        alike = [v for v in values if b.spec(v).shape == spec.shape]
        if kind == "linear":
            values.append(b.put(f"linear{i}", Linear(draw(st.integers(1, 3))), x))
        elif kind == "follow":
            norm = [BatchNorm(track=False)] if len(spec.shape) >= 2 and prod(spec.shape[2:]) * spec.shape[0] > 1 else []
            ops = [Unary("tanh"), Dropout(0.0), Cast("float64"), Binary("mul", parameter=spec.shape[-1:]), *norm]
            values.append(b.put(f"follow{i}", draw(st.sampled_from(ops)), x))
        elif kind == "view":
            values.append(b.put(f"view{i}", _view(draw, spec), x))
        elif kind == "add":
            values.append(b.put(f"add{i}", Binary("add"), x, draw(st.sampled_from(alike))))
        elif kind == "concat":
            joined = draw(st.lists(st.sampled_from(alike), min_size=1, max_size=4))
            values.append(b.put(f"concat{i}", Concat(draw(st.integers(1, len(spec.shape) - 1))), *joined))
        elif draw(st.booleans()):
            weight = b.tied(f"weight{i}", TensorSpec((2, spec.shape[-1]), (None, None)))
            values += [b.put(f"linear{i}{use}", Linear(2), x, tied=[weight]) for use in "ab"]
        else:
            slope = b.tied(f"slope{i}", TensorSpec((1,), (None,)))
            for use in "ab":
                x = b.put(f"prelu{i}{use}", Prelu(), b.put(f"linear{i}{use}", Linear(2), x), tied=[slope])
                values.append(x)
    return b.finish(draw(st.lists(st.sampled_from(values[-3:]), min_size=1, max_size=2)))


def _view(draw: st.DrawFn, x: TensorSpec) -> Op:
    """The samples stay in front: what the networks that we rewrite do."""
    rank = len(x.shape)
    kind = draw(st.integers(0, 3))
    if kind == 0:
        return Permute((0, *draw(st.permutations(range(1, rank)))))
    if kind == 1:
        at = draw(st.integers(1, rank - 1))
        return Slice(at, 0, draw(st.integers(1, x.shape[at])))
    rest = prod(x.shape[1:])
    factor = draw(st.sampled_from([f for f in range(1, rest + 1) if rest % f == 0]))
    return Reshape((x.shape[0], rest) if kind == 2 else (x.shape[0], factor, rest // factor))
