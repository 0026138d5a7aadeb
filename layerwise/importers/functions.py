"""Functions that rows of both tables share: element-wise, reductions, products.

A large reduction becomes two layers, so that each device reduces the part of a volume that it has.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import TypeGuard

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Tensor
from layerwise.importers.tensors import permuted, reshaped, turned
from layerwise.ops.nn.linear import Linear, MatMul
from layerwise.ops.nn.loss import Loss, LossSum
from layerwise.ops.tensor.pointwise import Unary
from layerwise.ops.tensor.reduce import Mode, PartialReduce, Reduce
from layerwise.tensor import TensorSpec


def unary(fn: str, *numbers: str) -> Build:
    """The row of a function of one tensor; `numbers` are the names of its numeric arguments."""
    return lambda call: Built(Unary(fn, tuple(call.number(n) for n in numbers)), (call.tensors[0],))


def scaled(x: Tensor, factor: float) -> Tensor:
    """factor * x."""
    return x if factor == 1 else Built(Unary("mul_scalar", (float(factor),)), (x,))


def gelu(call: Call) -> Result:
    return Built(Unary("gelu_tanh" if call.get("approximate") == "tanh" else "gelu"), (call.tensors[0],))


LARGE = 1 << 14  # positions of a sample that are reduced to one number; fewer are sent instead
MOST_PARTS = {0: 1, 1: 1024, 2: 32, 3: 16}  # parts of a dimension, if one, two or three are divided
MOST_CHANNELS = 8  # parts of the channels, beside those


def reduction(mode: Mode, x: Tensor, spec: TensorSpec, dims: Sequence[int], keepdim: bool = False) -> Built:
    """`x`, of spec `spec`, reduced over all positions of `dims`.

    A sum over a volume's voxels, or a batch's, is the sum of partial sums, each of which one device computes. So losses
    written by hand, such as a soft Dice, are split like the network in front of them.
    """
    dims = tuple(d % len(spec.shape) for d in dims)
    rest = tuple(d for d in dims if spec.dims[d] != "n" or spec.units[d] > 1)
    parts = _parts(spec, rest)
    if parts and mode != "max" and mode != "min" and (len(rest) < len(dims) or max(parts) > 1):
        x = Built(PartialReduce(mode, rest, parts), (x,))
    return Built(Reduce(mode, dims, keepdim), (x,))


def loss(op: Loss, *inputs: Operand) -> Built:
    """A loss of a prediction, a target and the weights that `op.weighted` names."""
    each = op.each(inputs[0].spec, inputs[1].spec)
    parts = _parts(each, range(1, len(each.shape)))
    if op.loss is None or not parts or max(parts) == 1:
        return Built(op, inputs)
    return Built(LossSum(op.loss), (Built(replace(op, parts=parts), inputs),))


def _parts(spec: TensorSpec, dims: Sequence[int]) -> tuple[int, ...]:
    """The number of parts of each of `dims`; () if all of them together are few positions."""
    if prod(spec.shape[d] for d in dims) < LARGE:
        return ()
    cut = [d for d in dims if spec.dims[d] and spec.units[d] == 1 and spec.shape[d] > 1]
    channels = [d for d in cut if spec.dims[d] == "c" and len(cut) > 1]
    most = MOST_PARTS.get(len(cut) - len(channels), MOST_CHANNELS)
    return tuple(_divisor(spec.shape[d], MOST_CHANNELS if d in channels else most) if d in cut else 1 for d in dims)


def _divisor(extent: int, most: int) -> int:
    """The largest divisor of `extent` that is at most `most`."""
    return next(d for d in range(min(extent, most), 0, -1) if extent % d == 0)


def linear_layer(x: Tensor, weight: Operand, *bias: Operand) -> Built:
    """x @ weight + bias. The matrix stays as stored: (in, out), or (out, in) if `weight` is its transpose."""
    op = Linear(weight.shape[1], bool(bias), transposed=not weight.transposed)
    return Built(op, (x,), (turned(weight) if weight.transposed else weight, *bias))


def attends_along_samples(sequences: int) -> LayerwiseError:
    """The error for several sequences whose positions lie along the samples, as without `batch_first`."""
    return LayerwiseError(
        f"the positions of its {sequences} sequences lie along the model's samples (dimension 0 of the inputs): build "
        "it with batch_first=True, or transpose within the model"
    )


def product(x: Tensor, y: Tensor) -> Built:
    """x @ y: a linear layer if y is a matrix of parameters."""
    return linear_layer(x, y) if is_matrix(y) else Built(MatMul(), (x, y))


def is_matrix(x: Tensor) -> TypeGuard[Operand]:
    """Whether x is a matrix of parameters."""
    return isinstance(x, Operand) and x.role == "parameter" and len(x.shape) == 2


def einsum(call: Call) -> Result:
    equation = call["equation"]
    assert isinstance(equation, str)
    terms, result = letters(equation, call.tensors)
    if any(len(set(term)) < len(term) for term in (*terms, result)):
        raise LayerwiseError(f"einsum {equation!r}: diagonals are not supported")
    if len(terms) == 1:
        x, left = _summed(call.tensors[0], terms[0], set(result))
        return permuted(x, [left.index(c) for c in result])
    if len(terms) > 2:
        raise LayerwiseError(f"einsum {equation!r}: more than two operands are not supported; multiply them in turn")
    return _product(call.tensors[0], terms[0], call.tensors[1], terms[1], result)


def letters(equation: str, tensors: tuple[Operand, ...]) -> tuple[list[str], str]:
    """The letters of each operand and of the result; an ellipsis becomes unused upper-case letters."""
    left, arrow, right = equation.replace(" ", "").partition("->")
    terms = left.split(",")
    free = [c for c in "ZYXWVUTSRQPONMLKJIHGFEDCBA" if c not in equation]
    most = max((len(t.shape) - len(s) + 3 for s, t in zip(terms, tensors, strict=True) if "..." in s), default=0)
    dots = "".join(reversed(free[:most]))
    terms = [
        s.replace("...", dots[most - (len(t.shape) - len(s) + 3) :] if "..." in s else "")
        for s, t in zip(terms, tensors, strict=True)
    ]
    once = sorted(c for c in set("".join(terms)) if "".join(terms).count(c) == 1 and c not in dots)
    right = right.replace("...", dots) if arrow else dots + "".join(once)
    return terms, right


def _summed(x: Tensor, letters: str, keep: set[str]) -> tuple[Tensor, str]:
    """x summed over the dimensions that occur nowhere else."""
    gone = tuple(i for i, c in enumerate(letters) if c not in keep)
    return (Built(Reduce("sum", gone), (x,)) if gone else x), "".join(c for c in letters if c in keep)


def _product(first: Operand, a: str, second: Operand, b: str, result: str) -> Result:
    """The product of two operands: a matrix product, batched over the letters that all three have."""
    sizes = dict(zip(b, second.shape, strict=True)) | dict(zip(a, first.shape, strict=True))
    if any(s != sizes[c] for c, s in zip(b, second.shape, strict=True)):
        raise LayerwiseError("einsum: broadcasting dimensions of size 1 is not supported")
    x, a = _summed(first, a, set(b) | set(result))
    y, b = _summed(second, b, set(a) | set(result))
    stack = [c for c in a if c in b and c in result]
    depth = [c for c in a if c in b and c not in result]
    rows, columns = [c for c in a if c not in b], [c for c in b if c not in a]
    if is_matrix(y) and len(depth) == len(columns) == 1:
        x = permuted(x, [a.index(c) for c in rows + depth])
        y = permuted(y, [b.index(c) for c in depth + columns])
        made: Tensor = product(x, y)
        order = rows + columns
    else:
        apart, order = bool(rows) and not stack, stack + rows + columns  # merged rows would lose their labels
        x = permuted(x, [a.index(c) for c in stack + rows + depth])
        if apart:
            x = reshaped(x, [*(sizes[c] for c in rows), prod(sizes[c] for c in depth)])
        else:
            x = _matrix(x, sizes, stack, rows, depth)
        y = _matrix(permuted(y, [b.index(c) for c in stack + depth + columns]), sizes, stack, depth, columns)
        made = Built(MatMul(), (x, y))
        if len(columns) != 1 or (len(rows) != 1 and not apart):
            made = reshaped(made, [sizes[c] for c in order])
    return permuted(made, [order.index(c) for c in result])


def _matrix(x: Tensor, sizes: dict[str, int], stack: list[str], rows: list[str], columns: list[str]) -> Tensor:
    """x with the dimensions of rows, and those of columns, merged."""
    if len(rows) == len(columns) == 1:
        return x
    merged = [prod(sizes[c] for c in rows), prod(sizes[c] for c in columns)]
    return reshaped(x, [sizes[c] for c in stack] + merged)
