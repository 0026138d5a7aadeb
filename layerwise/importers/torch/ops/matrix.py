"""Rows of the PyTorch importer's table: linear layers, matrix products, einsum."""

from __future__ import annotations

from layerwise.importers.functions import scaled
from layerwise.importers.products import einsum, is_matrix, linear_layer, product
from layerwise.importers.registry import Argument, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import permuted
from layerwise.importers.torch.ops.pointwise import binary


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


MATRICES: Table = (
    dict.fromkeys(("matmul", "mm", "bmm", "mv", "dot"), matmul)
    | dict.fromkeys(("addmm", "baddbmm", "addmv"), addmm)
    | {"linear": linear, "einsum": einsum}
)
