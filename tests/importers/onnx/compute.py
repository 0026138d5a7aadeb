"""Runs an imported ONNX graph: what layerwise says that it computes must be what ONNX says.

As `evaluate`, but as a model runs it for inference (running statistics, no dropout), and with what only ONNX has:
padding that differs on both sides, windows of an even size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import onnx
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from onnx import helper, numpy_helper
from torch import Tensor

from layerwise.graph.layer import LayerGraph
from layerwise.ops.base import Op, Role
from layerwise.ops.nn.conv import ConvTranspose
from layerwise.ops.nn.norm import BatchNorm, LocalResponseNorm
from layerwise.ops.nn.pool import Pool
from layerwise.ops.nn.recurrent import Recurrent
from layerwise.ops.nn.resample import Pad
from layerwise.ops.tensor.pointwise import Binary, Dropout
from layerwise.ops.tensor.reduce import Reduce
from layerwise.ops.tensor.view import Slice
from layerwise.tensor import TensorSpec
from tests.importers.evaluate import run
from tests.ops.harness import whole

Array = NDArray[np.generic]


def compute(graph: LayerGraph, inputs: Sequence[Array], weights: Mapping[str, Array]) -> list[Array]:
    """The outputs of the graph; a loss as the number that it is in ONNX."""
    fed = iter(inputs)
    values: dict[str, Tensor] = {}
    for layer in graph.layers:
        if layer.role is Role.SINK:
            return [values[name].numpy() for name in layer.inputs]
        if layer.role is Role.INPUT:
            out = torch.tensor(next(fed))
        elif layer.role in (Role.TIED, Role.CONSTANT):
            out = torch.tensor(weights[layer.name])
        else:
            given = [values[name] for name in layer.inputs[: len(layer.specs)]]
            edges = dict(zip(layer.tied, layer.inputs[len(layer.specs) :], strict=True))
            stored = {
                p.name: values[edges[i]] if i in edges else torch.tensor(weights[name])
                for i, (p, name) in enumerate(zip(layer.space.parameters, layer.parameters, strict=True))
            }
            out = _run(layer.op, given, stored)
        assert tuple(out.shape) == layer.out.shape, f"{layer.name}: {tuple(out.shape)} for {layer.out.shape}"
        if layer.op.kind != "input":
            assert str(out.dtype) == f"torch.{layer.out.dtype}", f"{layer.name}: {out.dtype} for {layer.out.dtype}"
        values[layer.name] = out
    raise AssertionError("a graph ends with its sink")


def _run(op: Op, inputs: list[Tensor], p: dict[str, Tensor]) -> Tensor:
    if not inputs:  # a parameter of its own
        return run(op, inputs, p)
    x = inputs[0]
    match op:
        case Pool():
            return _pool(op, x)
        case ConvTranspose():
            f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(op.kernel) - 1]
            full = f(x, p["weight"], p.get("bias"), op.stride, 0, op.output_padding, op.groups, op.dilation)
            low = [a for a, _ in op.padding]
            high = [full.shape[i + 2] - b for i, (_, b) in enumerate(op.padding)]
            return full[(..., *(slice(a, b) for a, b in zip(low, high, strict=True)))]
        case BatchNorm():
            mean, variance = p["running_mean"], p["running_var"]
            return F.batch_norm(x, mean, variance, p["weight"], p["bias"], False, 0.0, op.eps)
        case LocalResponseNorm():
            before = op.size // 2 if op.before is None else op.before
            squares = F.pad(x.square().movedim(1, -1), (before, op.size - 1 - before)).unfold(-1, op.size, 1).sum(-1)
            return x / (op.k + op.alpha / op.size * squares.movedim(-1, 1)) ** op.beta
        case Reduce(mode="prod"):
            for dim in sorted(op.dims, reverse=True):
                x = x.prod(dim, op.keepdim)
            return x
        case Reduce(mode="max" | "min") if x.dtype == torch.bool:
            return run(op, [x.int()], p).bool()
        case Pad(mode="constant"):
            return run(op, inputs, p)
        case Pad():
            named = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}[op.mode]
            return torch.tensor(np.pad(x.numpy(), op.pads, named))  # type: ignore[call-overload]
        case Slice() if op.step < 0:
            at = (slice(None),) * op.dim + (slice(op.start, op.stop, op.step),)
            return torch.tensor(x.numpy()[at].copy())
        case Recurrent():  # the kernel itself: ONNX says what it gives
            specs = [TensorSpec(tuple(t.shape), (None,) * t.dim(), str(t.dtype).removeprefix("torch.")) for t in inputs]
            return op.run(whole(op, specs, training=False), inputs, p)
        case Dropout():
            return x
        case Binary(fn="prelu"):
            slope = p["operand"] if op.parameter is not None else inputs[1]
            return torch.where(x >= 0, x, x * slope)
    return run(op, inputs, p)


def _pool(op: Pool, x: Tensor) -> Tensor:
    """Windows of the padded input, one by one; padding is no element of an average that does not include it."""
    fill = {"max": -torch.inf, "average": 0.0, "lp": 0.0}[op.mode]
    rank = len(op.kernel)
    windows = [
        (size - 1) * s + (k - 1) * d + 1  # how far the last window reaches
        for size, s, k, d in zip(_sizes(op, x), op.stride, op.kernel, op.dilation, strict=True)
    ]
    low = [a for a, _ in op.padding]
    high = [w - e - a for w, e, a in zip(windows, x.shape[2:], low, strict=True)]
    flat = [n for pair in reversed(list(zip(low, high, strict=True))) for n in pair]
    real = F.pad(torch.ones_like(x, dtype=torch.float64), flat)
    inside = [(a, b) for a, b in op.padding]
    counted = F.pad(torch.ones_like(x, dtype=torch.float64), [n for pair in reversed(inside) for n in pair], value=1.0)
    counted = F.pad(counted, [m for i in reversed(range(rank)) for m in (0, high[i] - inside[i][1])])
    values = F.pad(x.double(), flat, value=fill)
    for i, (k, s, d) in enumerate(zip(op.kernel, op.stride, op.dilation, strict=True), start=2):
        values, real, counted = (t.unfold(i, (k - 1) * d + 1, s)[..., ::d] for t in (values, real, counted))
    dims = list(range(-rank, 0))
    if op.mode == "max":
        return values.amax(dims).to(x.dtype)
    if op.mode == "lp":
        return (values.abs() ** op.power).sum(dims).pow(1 / op.power).to(x.dtype)
    return (values.sum(dims) / (counted if op.count_include_pad else real).sum(dims)).to(x.dtype)


def _sizes(op: Pool, x: Tensor) -> tuple[int, ...]:
    labels = ("n", "c", *(None,) * len(op.kernel))
    return op.output(TensorSpec(tuple(x.shape), labels)).shape[2:]


# ---- small models


def tensor(name: str, array: Array | Sequence[float] | Sequence[int] | float) -> onnx.TensorProto:
    """An initializer; Python integers are int64, other numbers float32."""
    values = np.asarray(array)
    if not isinstance(array, (np.ndarray, np.generic)):
        values = values.astype(np.int64 if values.dtype.kind == "i" else np.float32)
    return numpy_helper.from_array(values, name)


def random(name: str, *shape: int, seed: int = 0) -> onnx.TensorProto:
    """An initializer that looks learned."""
    generator = np.random.default_rng([seed, *name.encode()])
    return tensor(name, generator.standard_normal(shape).astype(np.float32))


def info(
    name: str, shape: Sequence[int | str | None] | None, dtype: int = onnx.TensorProto.FLOAT
) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def write(
    path: Path,
    nodes: Sequence[onnx.NodeProto],
    inputs: Sequence[onnx.ValueInfoProto] | Sequence[int | str | None],
    initializers: Sequence[onnx.TensorProto] = (),
    *,
    opset: int = 17,
    outputs: Sequence[str] = (),
    domains: Sequence[str] = (),
    value_info: Sequence[onnx.ValueInfoProto] = (),
    ir: int = 8,
    dtype: int = onnx.TensorProto.FLOAT,
) -> Path:
    """Writes a model. `inputs`: the shape of the only one, x. `outputs`: the last node's, by default, of `dtype`."""
    given = [i for i in inputs if isinstance(i, onnx.ValueInfoProto)] or [info("x", inputs)]  # type: ignore[arg-type]
    names = outputs or [o for o in nodes[-1].output if o]
    undecided = [info(name, ["?"], dtype) for name in names]
    for out in undecided:
        out.type.tensor_type.shape.Clear()  # a scalar, to the checker; inference of ours ignores it
    graph = helper.make_graph(list(nodes), "g", given, undecided, list(initializers), value_info=list(value_info))
    opsets = [helper.make_opsetid("", opset), *(helper.make_opsetid(d, 1) for d in domains)]
    onnx.save(helper.make_model(graph, opset_imports=opsets, ir_version=ir), path)
    return path


def node(op: str, *inputs: str, out: str | Sequence[str] = "y", **attributes: object) -> onnx.NodeProto:
    return helper.make_node(op, list(inputs), [out] if isinstance(out, str) else list(out), **attributes)
