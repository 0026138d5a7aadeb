"""Rows of the PyTorch importer's table: linear layers, matrix products, einsum, reductions; computed weights."""

from __future__ import annotations

from math import prod

from layerwise.errors import LayerwiseError
from layerwise.importers import functions
from layerwise.importers.functions import (
    attends_along_samples,
    einsum,
    is_matrix,
    linear_layer,
    product,
    scaled,
)
from layerwise.importers.registry import Argument, Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import named_dims, permuted, reshaped, wrapped
from layerwise.importers.torch.ops.pointwise import binary
from layerwise.ops.tensor.along import Cumsum
from layerwise.ops.tensor.pointwise import Binary, Cast, Unary
from layerwise.ops.tensor.reduce import Mode, Reduce


def linear(call: Call) -> Result:
    return affine(call.operand("input"), permuted(call.operand("weight"), (1, 0)), call.get("bias"))


def matmul(call: Call) -> Result:
    """matmul, mm, bmm, mv, dot."""
    x, y = call.tensors
    if x.spec.dims[:2] == ("s", "n") and len(y.shape) == 3 and y.spec.dims[::2] == ("s", "n"):
        raise attends_along_samples(x.shape[0])
    return affine(x, y, None)


def addmm(call: Call) -> Result:
    """beta*self + alpha*(mat1 @ mat2); mat1 and mat2 may be batched."""
    added, x, y = call.tensors
    beta, alpha = call.number("beta"), call.number("alpha")
    if beta == alpha == 1:
        return affine(x, y, added)
    product = scaled(affine(x, y, None), alpha)
    return product if beta == 0 else binary("add", product, scaled(added, beta))


def affine(x: Tensor, weight: Tensor, bias: Argument) -> Built:
    """x @ weight + bias: a linear layer if weight and bias are parameters."""
    if is_matrix(weight) and isinstance(bias, Operand) and bias.role == "parameter" and bias.shape == weight.shape[1:]:
        return linear_layer(x, weight, bias)
    made = product(x, weight)
    return made if bias is None else binary("add", made, bias)


def weight_norm(call: Call) -> Result:
    """g * v / |v|, the norm over all dimensions but `dim`, or over all if dim is -1 (Salimans and Kingma, 2016)."""
    v, g = call.operand("v"), call.operand("g")
    rank, dim = len(v.shape), call.integer("dim")
    kept = None if dim == -1 else wrapped(dim, rank)
    norm = Built(Reduce("norm2", tuple(d for d in range(rank) if d != kept), True), (v,))
    return Built(Binary("mul"), (v, Built(Binary("div"), (g, norm))))


def standardised(x: Operand, eps: float, weight: Argument, bias: Argument) -> Tensor:
    """Weight standardization (Qiao et al., 2019), which models write as a batch norm (1, c, ...) of parameters."""
    dims = tuple(d for d in range(len(x.shape)) if d != 1)
    away = Built(Binary("sub"), (x, Built(Reduce("mean", dims, True), (x,))))
    variance = Built(Reduce("mean", dims, True), (Built(Unary("square"), (away,)),))
    shifted = Built(Unary("add_scalar", (eps,)), (variance,))
    made: Built = Built(Binary("mul"), (away, Built(Unary("rsqrt"), (shifted,))))
    shape = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    if isinstance(weight, Operand):
        made = binary("mul", made, reshaped(weight, shape))
    return made if not isinstance(bias, Operand) else binary("add", made, reshaped(bias, shape))


MATRICES: Table = (
    dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul)
    | dict.fromkeys(("addmm", "baddbmm", "addmv"), addmm)
    | {"linear": linear, "einsum": einsum, "_weight_norm": weight_norm}
)


def reduction(mode: Mode) -> Build:
    def build(call: Call) -> Result:
        x = call.operand("self")
        if len(call.tensors) > 1:  # max(x, y)
            return binary({"max": "maximum", "min": "minimum"}[mode], *call.tensors)
        if mode == "norm2" and call.number("ord") != 2:
            raise LayerwiseError(f"a norm of order {call['ord']} is not supported: write it as powers and sums")
        made = functions.reduction(mode, x, x.spec, named_dims(call), call.flag("keepdim"))
        return (made, None) if len(call.outputs) > 1 else made  # max and min also return positions

    return build


def variance(call: Call) -> Result:
    """var and std, as sums of squares."""
    x = call.operand("self")
    dims = named_dims(call)
    away = Built(Binary("sub"), (x, functions.reduction("mean", x, x.spec, dims, keepdim=True)))
    mean = functions.reduction("mean", Built(Unary("square"), (away,)), x.spec, dims, call.flag("keepdim"))
    count, less = prod(x.shape[d] for d in dims), call.get("correction", call.get("unbiased", 1))
    assert isinstance(less, (int, float))
    if count <= less:
        raise LayerwiseError(f"the variance of {count} numbers with correction {less} is not defined")
    result = scaled(mean, count / (count - less))
    return Built(Unary("sqrt"), (result,)) if "std" in call.target else result


def cumsum(call: Call) -> Result:
    x, dtype = call.operand("self"), call.outputs[0].dtype
    given = x if x.spec.dtype == dtype or "int" in dtype else Built(Cast(dtype), (x,))
    made = Built(Cumsum(wrapped(call.integer("dim"), len(x.shape))), (given,))
    return Built(Cast(dtype), (made,)) if dtype not in ("int64", x.spec.dtype) and "int" in dtype else made


def argmax(call: Call) -> Result:
    x = call.operand("self")
    if call.get("dim") is None and len(x.shape) > 1:
        raise LayerwiseError("argmax over all dimensions is not supported: pass dim=")
    return Built(Reduce("argmax", named_dims(call), call.flag("keepdim")), (x,))


REDUCTIONS: Table = (
    dict.fromkeys(("max", "amax"), reduction("max"))
    | dict.fromkeys(("min", "amin"), reduction("min"))
    | dict.fromkeys(("var", "std"), variance)
    | {
        "mean": reduction("mean"),
        "sum": reduction("sum"),
        "prod": reduction("prod"),
        "linalg_vector_norm": reduction("norm2"),
        "cumsum": cumsum,
        "argmax": argmax,
    }
)
