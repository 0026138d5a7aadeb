"""Rows of the PyTorch importer's table: linear layers, matrix products, einsum; weights computed of parameters."""

from __future__ import annotations

from layerwise.importers.functions import einsum, is_matrix, linear_layer, product, scaled
from layerwise.importers.registry import Argument, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import permuted, reshaped, wrapped
from layerwise.importers.torch.ops.pointwise import binary
from layerwise.ops.nn.spectral import SpectralNorm
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.ops.tensor.reduce import Reduce


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
    if is_matrix(weight) and isinstance(bias, Operand) and bias.role == "parameter" and bias.shape == weight.shape[1:]:
        return linear_layer(x, weight, bias)
    made = product(x, weight)
    return made if bias is None else binary("add", made, bias)


def weight_norm(call: Call) -> Result:
    """g * v / |v|, the norm over all dimensions but `dim` (Salimans and Kingma, 2016)."""
    v, g = call.operand("v"), call.operand("g")
    rank = len(v.shape)
    kept = wrapped(call.integer("dim"), rank)
    norm = Built(Reduce("norm2", tuple(d for d in range(rank) if d != kept), True), (v,))
    return Built(Binary("mul"), (v, Built(Binary("div"), (g, norm))))


def standardised(x: Operand, eps: float, weight: Argument, bias: Argument) -> Tensor:
    """Weight standardisation (Qiao et al., 2019), which is written as a batch norm (1, c, ...) of parameters."""
    dims = tuple(d for d in range(len(x.shape)) if d != 1)
    away = Built(Binary("sub"), (x, Built(Reduce("mean", dims, True), (x,))))
    variance = Built(Reduce("mean", dims, True), (Built(Unary("square"), (away,)),))
    shifted = Built(Unary("add_scalar", (eps,)), (variance,))
    made: Built = Built(Binary("mul"), (away, Built(Unary("rsqrt"), (shifted,))))
    shape = (1, x.shape[1], *(1,) * (len(x.shape) - 2))
    if isinstance(weight, Operand):
        made = binary("mul", made, _as(weight, shape))
    return made if not isinstance(bias, Operand) else binary("add", made, _as(bias, shape))


def spectral_norm(call: Call) -> Result:
    """weight / sigma; u and v are buffers of the model (see `layerwise.importers.torch.calls.spectral`)."""
    steps, eps = call.integer("iterations"), call.number("eps")
    op = SpectralNorm(call.integer("dim"), steps, eps, call.flag("u_first"))
    return Built(op, (call.operand("weight"),), (call.operand("u"), call.operand("v")))


def _as(x: Operand, shape: tuple[int, ...]) -> Operand | Built:
    made = reshaped(x, shape)
    assert isinstance(made, (Operand, Built))
    return made


MATRICES: Table = (
    dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul)
    | dict.fromkeys(("addmm", "baddbmm", "addmv"), addmm)
    | {"linear": linear, "einsum": einsum, "_weight_norm": weight_norm}
)
