"""Operands that an operator does not take: one sentence says why. A row an operator and what it is given."""

from __future__ import annotations

import pytest

from layerwise.errors import LayerwiseError
from layerwise.ops.base import Op
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.linear import Embedding, MatMul
from layerwise.ops.nn.loss import Loss
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, LayerNorm
from layerwise.ops.nn.pool import AdaptivePool
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.tensor.along import Concat, Gather, OneHot, Scatter, Softmax
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu
from layerwise.ops.tensor.reduce import PartialReduce, Reduce
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice
from layerwise.tensor import TensorSpec


def specs(*shapes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    return tuple(TensorSpec(shape, (None,) * len(shape)) for shape in shapes)


ROW, IMAGE, TOKENS = (
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
    (Pad(((1, 1),)), (IMAGE,), "pairs of pads"),
    (Pad(((0, 0), (0, 0), (0, 0), (5, 0)), "reflect"), (IMAGE,), "at most 4, not 5, 0"),
    (Pad(((0, 0), (0, 0), (0, 0), (-3, -2))), (IMAGE,), "leave nothing"),
    (Interpolate((1, 2, 3, 4)), (IMAGE,), "cannot resample 4"),
    (Binary("add"), (IMAGE, TensorSpec((3,), ("c",))), "do not broadcast"),
    (Binary("add", (3,)), (IMAGE,), r"do not broadcast.*\(3,\)"),
    (Prelu(3), (IMAGE,), "slopes"),
    (Dropout(1.5), (IMAGE,), "probability"),
    (Cast("complex32"), (IMAGE,), "element type"),
    (Reduce("sum", (4,)), (IMAGE,), "dimension 4"),
    (
        PartialReduce("sum", (1,), (4,)),
        (TensorSpec((2, 9), ("n", "l")),),
        r"1 of \(n=2, l=9\) cannot be .*4 equal",
    ),
    (Softmax(2), (ROW,), "dimension 2"),
    (Gather(1), (X, INDEX), r"positions \(n=2, 1, 3\) must have the same extents elsewhere"),
    (Scatter(1, value=1.0), (X, INDEX), r"must have its extents elsewhere, not \(n=2, 1, 3\)"),
    (OneHot(2, 5, "float32"), (INDEX,), "are no positions"),
    *((Loss(fn), (SCORES, TARGET), r"n=2, c=5, l=4\) does not fit a target \(n=2, l=5") for fn in ("nll", "mse")),
    (Loss("cross_entropy"), (SCORES, TARGET), r"n=2, c=5, l=4\) does not fit a target \(n=2, l=5"),
    (Reshape((7, 2)), (TOKENS,), "does not reshape"),
    (Permute((0, 0, 1)), (TOKENS,), "does not order"),
    (Permute((0, 1)), (TOKENS,), "does not order"),
    (Permute((0, 1, 5)), (TOKENS,), "dimension 5"),
    (Slice(1, 3, 3), (TOKENS,), "is empty"),
    (Slice(1, 0, 3, 0), (TOKENS,), "cannot be 0"),
    (Select(1, 5), (TOKENS,), "no index 5"),
    (Expand((4, 5, 7)), (TOKENS,), "does not expand"),
    (Concat(1), (ROW, TensorSpec((3, 3), ("n", "c"))), "differ elsewhere"),
    (Concat(1), (ROW, TensorSpec((2, 3, 1), ("n", "c", None))), "differ elsewhere"),
    (Concat(2), (ROW,), "dimension 2"),
    (Concat(0), (), "nothing"),
]


@pytest.mark.parametrize(("op", "given", "message"), REFUSED, ids=[f"{op.kind} {text}" for op, _, text in REFUSED])
def test_one_sentence_says_why(op: Op, given: tuple[TensorSpec, ...], message: str) -> None:
    with pytest.raises(LayerwiseError, match=message):
        op.output(*given)
