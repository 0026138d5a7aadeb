"""Rows of the ONNX importer's table: normalisation. https://onnx.ai/onnx/operators/"""

from __future__ import annotations

from layerwise.errors import LayerwiseError
from layerwise.importers.onnx.call import axis, optional, recast, weights
from layerwise.importers.registry import Built, Call, Operand, Result, Table
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RMSNorm
from layerwise.ops.tensor.pointwise import Binary, Unary
from layerwise.ops.tensor.reduce import Reduce


def batch_norm(call: Call) -> Result:
    x = call.operand("X")
    if call.get("spatial", 1) != 1:
        raise LayerwiseError("spatial=0 (separate statistics for every position) is not supported")
    names = [name for name in call.arguments if name not in ("X", "input")]
    stored = tuple(weights(call, name) for name in names if isinstance(call.get(name), Operand))
    # ONNX's `momentum` weights the old statistics, PyTorch's the new ones.
    op = BatchNorm(affine=True, eps=call.number("epsilon"), momentum=1 - call.number("momentum"), track=True)
    return (Built(op, (x,), stored), None, None)


def layer_norm(call: Call) -> Result:
    x = call.operand("X")
    shape = x.shape[axis(call, len(x.shape)) :]
    stored = tuple(recast(w, shape) for w in optional(call, "Scale", "B"))
    op = LayerNorm(len(shape), weight=True, bias=len(stored) == 2, eps=call.number("epsilon"))
    return (Built(op, (x,), stored), None, None)


def rms_norm(call: Call) -> Result:
    x = call.operand("X")
    shape = x.shape[axis(call, len(x.shape)) :]
    scale = recast(weights(call, "scale"), shape)
    return Built(RMSNorm(len(shape), weight=True, eps=call.number("epsilon")), (x,), (scale,))


def group_norm(call: Call) -> Result:
    x, groups = call.operand("X"), call.integer("num_groups")
    scale, bias = optional(call, "scale", "bias")
    channels, eps = x.shape[1], call.number("epsilon")
    return Built(GroupNorm(groups, affine=True, eps=eps), (x,), (recast(scale, (channels,)), recast(bias, (channels,))))


def instance_norm(call: Call) -> Result:
    op = InstanceNorm(affine=True, eps=call.number("epsilon"))
    return Built(op, (call.operand("input"),), optional(call, "scale", "B"))


def local_response_norm(call: Call) -> Result:
    size = call.integer("size")
    alpha, beta, k = (call.number(name) for name in ("alpha", "beta", "bias"))
    return Built(LocalResponseNorm(size, alpha, beta, k, before=(size - 1) // 2), (call.operand("X"),))


def lp_normalization(call: Call) -> Result:
    x = call.tensors[0]
    dims = (axis(call, len(x.shape)),)
    if call.integer("p") == 2:
        norm = Built(Reduce("norm2", dims, keepdim=True), (x,))
    else:
        norm = Built(Reduce("sum", dims, keepdim=True), (Built(Unary("abs"), (x,)),))
    return Built(Binary("div"), (x, norm))


NORMS: Table = {
    "BatchNormalization": batch_norm,
    "LayerNormalization": layer_norm,
    "RMSNormalization": rms_norm,
    "GroupNormalization": group_norm,
    "InstanceNormalization": instance_norm,
    "LRN": local_response_norm,
    "LpNormalization": lp_normalization,
}
