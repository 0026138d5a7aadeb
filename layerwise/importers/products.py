"""Products in a row of either table: linear layers, matrix products, einsum."""

from __future__ import annotations

from math import prod
from typing import TypeGuard

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Built, Call, Operand, Result, Tensor
from layerwise.importers.tensors import permuted, reshaped, turned
from layerwise.ops.nn.linear import Linear, MatMul
from layerwise.ops.tensor.reduce import Reduce


def linear_layer(x: Tensor, weight: Operand, *bias: Operand) -> Built:
    """x @ weight + bias. The matrix stays as it is stored: (in, out), or (out, in) where `weight` is its transpose."""
    op = Linear(weight.shape[1], bool(bias), transposed=not weight.transposed)
    return Built(op, (x,), (turned(weight) if weight.transposed else weight, *bias))


def product(x: Tensor, y: Tensor) -> Built:
    """x @ y: a linear layer where y is a matrix of parameters."""
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
    """The letters of each operand and of the result; an ellipsis becomes upper-case letters that are free."""
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
    """x without the dimensions that nobody else has."""
    gone = tuple(i for i, c in enumerate(letters) if c not in keep)
    return (Built(Reduce("sum", gone), (x,)) if gone else x), "".join(c for c in letters if c in keep)


def _product(first: Operand, a: str, second: Operand, b: str, result: str) -> Result:
    """Two operands: a matrix product, stacked over the letters that all three have."""
    sizes = dict(zip(b, second.shape, strict=True)) | dict(zip(a, first.shape, strict=True))
    if any(s != sizes[c] for c, s in zip(b, second.shape, strict=True)):
        raise LayerwiseError("einsum: extents of 1 that are broadcast are not supported")
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
        apart, order = bool(rows) and not stack, stack + rows + columns  # rows stay apart, so that their labels do
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
    """The dimensions of rows, and of columns, merged."""
    if len(rows) == len(columns) == 1:
        return x
    merged = [prod(sizes[c] for c in rows), prod(sizes[c] for c in columns)]
    return reshaped(x, [sizes[c] for c in stack] + merged)
