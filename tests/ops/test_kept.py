"""What operators say that their kernels keep, against what autograd is seen to save."""

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Op, space
from layerwise.ops.fused import undivided
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Embedding, Linear, MatMul
from layerwise.ops.nn.loss import Loss
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.tensor.along import Concat, Gather, OneHot, Scatter, Softmax
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu, Unary
from layerwise.ops.tensor.reduce import PartialReduce, Reduce
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice
from layerwise.tensor import TensorSpec

IMAGE = TensorSpec((4, 6, 16, 16), ("n", "c", "h", "w"))
HEADS = TensorSpec((2, 4, 32, 8), ("n", "c", "s", None))
SAME = ((1, 1), (1, 1))
LITTLE = 4096  # bytes: statistics and the like, which are not counted; an image has six times as many

FUNCTIONS = (
    "relu", "sigmoid", "tanh", "exp", "sqrt", "gelu", "silu", "elu", "leaky_relu", "relu6", "abs", "log", "neg",
    "square", "sin", "rsqrt", "reciprocal", "hardswish", "softplus", "mish", "clamp",
)  # fmt: skip
ARGUMENTS = {"elu": (1.0,), "leaky_relu": (0.1,), "softplus": (1.0, 20.0), "clamp": (-1.0, 1.0)}

OPS: list[tuple[Op, tuple[TensorSpec, ...]]] = [
    (Conv(8, (3, 3), (1, 1), SAME, (1, 1)), (IMAGE,)),
    (Conv(8, (3, 3), (2, 2), ((0, 1), (0, 1)), (1, 1)), (IMAGE,)),  # padded by hand
    (ConvTranspose(8, (2, 2), (2, 2), ((0, 0), (0, 0)), (0, 0), (1, 1)), (IMAGE,)),
    (Linear(10), (TensorSpec((8, 16), ("n", None)),)),
    (MatMul(), (HEADS, TensorSpec((2, 4, 8, 32), ("n", "c", None, None)))),
    (BatchNorm(), (IMAGE,)),
    (GroupNorm(2), (IMAGE,)),
    (InstanceNorm(), (IMAGE,)),
    (LayerNorm(1), (IMAGE,)),
    (Softmax(1), (IMAGE,)),
    (Softmax(-1, log=True), (IMAGE,)),
    (Pool("max", (2, 2), (2, 2), ((0, 0), (0, 0)), (1, 1)), (IMAGE,)),
    (Pool("average", (3, 3), (1, 1), SAME, (1, 1)), (IMAGE,)),
    (AdaptivePool("average", (4, 4)), (IMAGE,)),
    (AdaptivePool("max", (8, 8)), (IMAGE,)),
    (Reduce("mean", (2, 3)), (IMAGE,)),
    (Reduce("sum", (1,)), (IMAGE,)),
    (Interpolate((32, 32), "linear"), (IMAGE,)),
    (Pad(((0, 0), (0, 0), (1, 1), (1, 1))), (IMAGE,)),
    (Concat(1), (IMAGE, IMAGE)),
    (Dropout(0.5), (IMAGE,)),
    (Cast("float64"), (IMAGE,)),
    (Prelu(6), (IMAGE,)),
    (Permute((0, 2, 3, 1)), (IMAGE,)),
    (Reshape((4, 6 * 256)), (IMAGE,)),
    (Attention(), (HEADS, HEADS, HEADS)),
    *((Binary(fn), (IMAGE, IMAGE)) for fn in ("add", "sub", "mul", "div", "maximum", "minimum")),
    *((Unary(fn, ARGUMENTS.get(fn, ())), (IMAGE,)) for fn in FUNCTIONS),
    *((Unary(fn, (2.0,)), (IMAGE,)) for fn in ("add_scalar", "mul_scalar", "div_scalar", "pow_scalar", "rdiv_scalar")),
]


def saved(op: Op, specs: tuple[TensorSpec, ...]) -> tuple[bool, bool, int]:
    """Whether autograd saves an input, the output, and how many bytes besides (parameters apart)."""
    where = space(op, specs)
    local = undivided(where, specs)
    inputs = [torch.rand(spec.shape).add_(0.5).requires_grad_() for spec in specs]
    parameters = {p.name: torch.rand(p.shape).requires_grad_(p.trainable) for p in where.parameters}
    packed: list[Tensor] = []

    def pack(t: Tensor) -> Tensor:
        packed.append(t)
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        out = op.run(local, inputs, parameters)
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in packed}
    for p in parameters.values():
        storages.pop(p.untyped_storage().data_ptr(), None)
    read = [storages.pop(x.untyped_storage().data_ptr(), None) is not None for x in inputs]
    made = storages.pop(out.untyped_storage().data_ptr(), None) is not None
    return any(read), made, sum(storages.values())


@pytest.mark.parametrize(("op", "specs"), OPS, ids=lambda value: getattr(value, "kind", ""))
def test_kernels_keep_what_they_say(op: Op, specs: tuple[TensorSpec, ...]) -> None:
    """Inputs of the first operator of a layer are kept anyway: that one is read matters to an element-wise epilogue."""
    extents = np.array([[d.extent for d in space(op, specs).dims]], np.int64)
    said = op.saved(specs, np.zeros_like(extents), extents)
    read, made, besides = saved(op, specs)
    assert said.output == made or op.view
    assert said.inputs == read or not op.pointwise
    assert abs(besides - float(np.max(said.extra))) <= LITTLE


def test_an_operator_of_which_nothing_is_known_keeps_all() -> None:
    said = Op.saved(Unary("unheard of"), (IMAGE,), np.zeros((1, 4), np.int64), np.ones((1, 4), np.int64))
    assert said.inputs
    assert said.output


def test_cells_at_a_border_keep_a_padded_copy() -> None:
    """Of a 3 x 3 convolution cut in height: the upper half lacks a row above only, so padding alike does not serve."""
    conv = Conv(8, (3, 3), (1, 1), SAME, (1, 1))
    lo, hi = np.array([[0, 0, 0, 0, 0], [0, 0, 8, 0, 0]]), np.array([[4, 8, 8, 16, 6], [4, 8, 16, 16, 6]])
    kept = conv.saved((IMAGE,), lo, hi)
    assert np.ravel(kept.extra).tolist() == [4 * 4 * 6 * 10 * 16] * 2


def specs(*shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(shape, (None,) * len(shape)) for shape in shapes)


ROW, PICTURE, TOKENS = (
    TensorSpec((2, 3), ("n", "c")),
    TensorSpec((3, 4, 2, 5), ("n", "c", "h", "w")),
    TensorSpec((4, 5, 6), ("n", "s", "c")),
)
MERGED = TensorSpec((2, 12, 3), ("n", "c", "l"), units=(1, 2, 1))
X, INDEX = TensorSpec((2, 3, 4), ("n", "s", "c")), TensorSpec((2, 1, 3), ("n", None, None), "int64")
SCORES, TARGET = TensorSpec((2, 5, 4), ("n", "c", "l")), TensorSpec((2, 5), ("n", "l"))
Q = (2, 3, 5, 4)
ATTENTION = r"does not (fit|broadcast)"

REFUSED: list[tuple[Op, tuple[TensorSpec, ...], str]] = [
    (MatMul(), specs((2, 3), (4, 5)), "inner dimensions"),
    (MatMul(), specs((), (3,)), "inner dimensions"),
    (MatMul(), specs((2, 1, 3), (3, 3, 5)), "broadcast"),
    (Embedding(10, 4), (TensorSpec((2, 3), ("n", "s")),), "integer ids"),
    (Attention(), specs(Q, (2, 2, 5, 4), (2, 2, 5, 4)), ATTENTION),
    (Attention(), specs(Q, (2, 3, 5, 6), (2, 3, 5, 6)), ATTENTION),
    (Attention(), specs(Q, (2, 3, 6, 4), Q), ATTENTION),
    (Attention(), specs(Q, (3, 5, 4), (3, 5, 4)), ATTENTION),
    (Attention(), specs((5, 4), (5, 4), (5, 4)), ATTENTION),
    (Attention(), specs(Q, (3, 3, 5, 4), (3, 3, 5, 4)), ATTENTION),
    (Attention(mask=True), specs(Q, Q, Q, (4, 5)), ATTENTION),
    (Attention(mask=True), specs(Q, Q, Q, (1, 2, 3, 5, 5)), ATTENTION),
    (LayerNorm(3), (ROW,), "last 3 dimensions"),
    (GroupNorm(5), (MERGED,), "groups"),
    (BatchNorm(), (TensorSpec((3,), ("n",)),), "needs an input"),
    (AdaptivePool("max", (1, 1)), (ROW,), "2-D pooling needs"),
    (Pad(((1, 1),)), (PICTURE,), "pairs of pads"),
    (Pad(((0, 0), (0, 0), (0, 0), (5, 0)), "reflect"), (PICTURE,), "pads 5, 0 exceed 4"),
    (Pad(((0, 0), (0, 0), (0, 0), (-3, -2))), (PICTURE,), "remove all of"),
    (Interpolate((1, 2, 3, 4)), (PICTURE,), "cannot resample 4"),
    (Binary("add"), (PICTURE, TensorSpec((3,), ("c",))), "do not broadcast"),
    (Binary("add", (3,)), (PICTURE,), r"do not broadcast.*\(3,\)"),
    (Prelu(3), (PICTURE,), "slopes"),
    (Dropout(1.5), (PICTURE,), "probability"),
    (Cast("complex32"), (PICTURE,), "element type"),
    (Reduce("sum", (4,)), (PICTURE,), "dimension 4"),
    (PartialReduce("sum", (1,), (4,)), (TensorSpec((2, 9), ("n", "l")),), r"1 of \(n=2, l=9\) cannot be .*4 equal"),
    (Softmax(2), (ROW,), "dimension 2"),
    (Gather(1), (X, INDEX), r"positions \(n=2, 1, 3\) must have the same sizes in all other dimensions"),
    (Scatter(1, value=1.0), (X, INDEX), r"must have the same sizes in all other dimensions, not \(n=2, 1, 3\)"),
    (OneHot(2, 5, "float32"), (INDEX,), "needs a tensor of positions"),
    *((Loss(fn), (SCORES, TARGET), r"n=2, c=5, l=4\) does not fit a target \(n=2, l=5") for fn in ("nll", "mse")),
    (Loss("cross_entropy"), (SCORES, TARGET), r"n=2, c=5, l=4\) does not fit a target \(n=2, l=5"),
    (Reshape((7, 2)), (TOKENS,), "do not reshape"),
    (Permute((0, 0, 1)), (TOKENS,), "is not a permutation of"),
    (Permute((0, 1)), (TOKENS,), "is not a permutation of"),
    (Permute((0, 1, 5)), (TOKENS,), "dimension 5"),
    (Slice(1, 3, 3), (TOKENS,), "is empty"),
    (Slice(1, 0, 3, 0), (TOKENS,), "cannot be 0"),
    (Select(1, 5), (TOKENS,), "index 5 is out of range"),
    (Expand((4, 5, 7)), (TOKENS,), "cannot be expanded"),
    (Concat(1), (ROW, TensorSpec((3, 3), ("n", "c"))), "differ in other dimensions"),
    (Concat(1), (ROW, TensorSpec((2, 3, 1), ("n", "c", None))), "differ in other dimensions"),
    (Concat(2), (ROW,), "dimension 2"),
    (Concat(0), (), "at least one input"),
]


@pytest.mark.parametrize(("op", "given", "message"), REFUSED, ids=[f"{op.kind} {text}" for op, _, text in REFUSED])
def test_one_sentence_says_why(op: Op, given: tuple[TensorSpec, ...], message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        op.output(*given)
