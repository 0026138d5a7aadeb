"""Rows of the PyTorch importer's table: weights that are computed of parameters in the forward pass."""

from __future__ import annotations

from layerwise.importers.registry import Argument, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import reshaped, wrapped
from layerwise.importers.torch.ops.pointwise import binary
from layerwise.ops.nn.spectral import SpectralNorm
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.ops.tensor.reduce import Reduce


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


WEIGHTS: Table = {"_weight_norm": weight_norm}
