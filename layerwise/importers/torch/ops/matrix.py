"""Rows of the PyTorch importer's table: linear layers, matrix products, einsum."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Argument, Build, Built, Call, Operand, Result
from layerwise.importers.torch.ops.pointwise import binary, scaled
from layerwise.importers.torch.ops.views import Tensor, permuted, reshaped
from layerwise.ops.linear import Linear, MatMul
from layerwise.ops.reduce import Reduce


def linear(call: Call) -> Result:
    return affine(call.operand("input"), permuted(call.operand("weight"), (1, 0)), call.get("bias"))


def matmul(call: Call) -> Result:
    """matmul, mm, bmm, mv, dot."""
    x, y = call.tensors
    return affine(x, y, None)


def addmm(call: Call) -> Result:
    """beta*self + alpha*(mat1 @ mat2), mat1 and mat2 perhaps stacked."""
    added, x, y = call.tensors
    beta, alpha = call.number("beta"), call.number("alpha")
    if beta == alpha == 1:
        return affine(x, y, added)
    product = scaled(affine(x, y, None), alpha)
    return product if beta == 0 else binary("add", product, scaled(added, beta))


def affine(x: Tensor, weight: Tensor, bias: Argument) -> Built:
    """x @ weight + bias: a linear layer where weight and bias are parameters."""
    if isinstance(weight, Operand) and weight.role == "parameter" and len(weight.shape) == 2:
        columns = weight.shape[1]
        own = isinstance(bias, Operand) and bias.role == "parameter" and bias.shape == (columns,)
        parameters = (weight, bias) if own and isinstance(bias, Operand) else (weight,)
        # PyTorch's linear layer stores (out, in): then `weight` is its transpose.
        made = Built(Linear(columns, own, transposed=not weight.transposed), (x,), _as_stored(parameters))
        return made if own or bias is None else binary("add", made, bias)
    made = Built(MatMul(), (x, weight))
    return made if bias is None else binary("add", made, bias)


def _as_stored(parameters: tuple[Operand, ...]) -> tuple[Operand, ...]:
    first, *rest = parameters
    if not first.transposed:
        return parameters
    back = permuted(first, (1, 0))
    assert isinstance(back, Operand)
    return (back, *rest)


def einsum(call: Call) -> Result:
    equation = call["equation"]
    assert isinstance(equation, str)
    terms, result = _letters(equation, call.tensors)
    if len(terms) == 1:
        x, letters = _summed(call.tensors[0], terms[0], set(result))
        return permuted(x, [letters.index(c) for c in result])
    if len(terms) > 2:
        raise LayerwiseError(f"einsum {equation!r}: more than two operands are not supported; multiply them in turn")
    return _product(call.tensors[0], terms[0], call.tensors[1], terms[1], result)


def _letters(equation: str, tensors: tuple[Operand, ...]) -> tuple[list[str], str]:
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
    if any(len(set(term)) < len(term) for term in (*terms, right)):
        raise LayerwiseError(f"einsum {equation!r}: diagonals are not supported")
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
    if isinstance(y, Operand) and y.role == "parameter" and len(b) == 2 and len(depth) == len(columns) == 1:
        x = permuted(x, [a.index(c) for c in rows + depth])
        y = permuted(y, [b.index(c) for c in depth + columns])
        made: Tensor = affine(x, y, None)
        order = rows + columns
    else:
        x = _matrix(permuted(x, [a.index(c) for c in stack + rows + depth]), sizes, stack, rows, depth)
        y = _matrix(permuted(y, [b.index(c) for c in stack + depth + columns]), sizes, stack, depth, columns)
        order = stack + rows + columns
        made = Built(MatMul(), (x, y))
        if len(rows) != 1 or len(columns) != 1:
            made = reshaped(made, [sizes[c] for c in order])
    return permuted(made, [order.index(c) for c in result])


def _matrix(x: Tensor, sizes: dict[str, int], stack: list[str], rows: list[str], columns: list[str]) -> Tensor:
    """The dimensions of rows, and of columns, merged."""
    if len(rows) == len(columns) == 1:
        return x
    merged = [prod(sizes[c] for c in rows), prod(sizes[c] for c in columns)]
    return reshaped(x, [sizes[c] for c in stack] + merged)


MATRICES: Mapping[str, Build] = (
    dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul)
    | dict.fromkeys(("addmm", "baddbmm", "addmv"), addmm)
    | {"linear": linear, "einsum": einsum}
)
