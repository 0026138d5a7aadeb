"""What operators say that their kernels keep, against what autograd is seen to save."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor

from layerwise.geometry import Box
from layerwise.ops.base import Op, space
from layerwise.ops.facts import Local
from layerwise.ops.fused import needed_box
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Linear, MatMul
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.tensor.along import Concat, Softmax
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu, Unary
from layerwise.ops.tensor.reduce import Reduce
from layerwise.ops.tensor.view import Permute, Reshape
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
    cell = Box((0,) * len(where.dims), tuple(d.extent for d in where.dims))
    local = Local(where, specs, cell, tuple(needed_box(maps, cell) for maps in where.needs))
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
