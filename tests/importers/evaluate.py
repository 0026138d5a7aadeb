"""Runs a LayerGraph with PyTorch, layer by layer: what the importers say a model computes must be what it computes.

The operators' own kernels come with the runtime; these here are plain torch, written from the operators' docstrings.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.registry import Operand
from layerwise.importers.torch.build import _Importer
from layerwise.importers.torch.patterns import rewrite
from layerwise.importers.torch.program import read_program
from layerwise.ops.base import Op, Role
from layerwise.ops.fused import Fused
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Embedding, Learned, Linear, MatMul
from layerwise.ops.nn.loss import Loss
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RMSNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.opaque import TorchOp
from layerwise.ops.tensor.along import Concat, Cumsum, Gather, OneHot, Positions, Scatter, Softmax, Take
from layerwise.ops.tensor.pointwise import Binary, Cast, Dropout, Prelu, Unary, Where
from layerwise.ops.tensor.reduce import Reduce
from layerwise.ops.tensor.view import Expand, Permute, Reshape, Select, Slice


def evaluate(graph: LayerGraph, inputs: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> list[Tensor]:
    """The tensors that go into the sink. `stored`: parameters, buffers and constants by name."""
    values: dict[str, Tensor] = {}
    for layer in graph.layers:
        if layer.role is Role.SINK:
            return [values[name] for name in layer.inputs]
        if layer.role is Role.INPUT:
            out = inputs[layer.name]
        elif layer.role in (Role.TIED, Role.CONSTANT):
            out = stored[layer.name.partition(":")[0]]
        else:
            given = [values[name] for name in layer.inputs[: len(layer.specs)]]
            out = run(layer.op, given, _parameters(layer, values, stored))
        assert tuple(out.shape) == layer.out.shape, f"{layer.name}: {tuple(out.shape)} for {layer.out.shape}"
        values[layer.name] = out
    raise AssertionError("a graph ends with its sink")


def _parameters(layer: Layer, values: Mapping[str, Tensor], stored: Mapping[str, Tensor]) -> dict[str, Tensor]:
    edges = dict(zip(layer.tied, layer.inputs[len(layer.specs) :], strict=True))
    return {
        p.name: (values[edges[i]] if i in edges else stored[name]).reshape(p.shape)
        for i, (p, name) in enumerate(zip(layer.space.parameters, layer.parameters, strict=True))
    }


def run(op: Op, inputs: list[Tensor], p: dict[str, Tensor]) -> Tensor:
    """One operator."""
    if isinstance(op, Learned):
        return p["value"].expand(op.shape)
    x = inputs[0]
    match op:
        case Fused():
            return _fused(op, inputs, p)
        case Conv():
            pads = [q for pair in reversed(op.padding) for q in pair]
            f = (F.conv1d, F.conv2d, F.conv3d)[len(op.kernel) - 1]
            return f(F.pad(x, pads), p["weight"], p.get("bias"), op.stride, 0, op.dilation, op.groups)
        case ConvTranspose():
            f = (F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)[len(op.kernel) - 1]
            low = [a for a, _ in op.padding]
            return f(x, p["weight"], p.get("bias"), op.stride, low, op.output_padding, op.groups, op.dilation)
        case Pool(mode="max"):
            f = (F.max_pool1d, F.max_pool2d, F.max_pool3d)[len(op.kernel) - 1]
            return f(x, op.kernel, op.stride, [a for a, _ in op.padding], op.dilation, op.ceil_mode)
        case Pool():
            f = (F.avg_pool1d, F.avg_pool2d, F.avg_pool3d)[len(op.kernel) - 1]
            more = {"divisor_override": op.divisor} if len(op.kernel) > 1 else {}
            low = [a for a, _ in op.padding]
            return f(x, op.kernel, op.stride, low, op.ceil_mode, op.count_include_pad, **more)
        case AdaptivePool():
            kinds = {"max": "adaptive_max_pool", "average": "adaptive_avg_pool"}
            return getattr(F, f"{kinds[op.mode]}{len(op.size)}d")(x, op.size)
        case Linear():
            return F.linear(x, p["weight"].T if op.transposed else p["weight"], p.get("bias"))
        case MatMul():
            return x @ inputs[1]
        case Attention():
            mask = inputs[3] if op.mask else None
            q, k, v = inputs[:3]
            groups = q.dim() > 3 and k.shape[-3] != q.shape[-3]
            if op.causal and mask is not None:  # PyTorch takes one of them
                later = torch.ones(q.shape[-2], k.shape[-2], dtype=torch.bool).triu(1)
                mask = mask.masked_fill(later, False if mask.dtype == torch.bool else float("-inf"))
            causal = op.causal and mask is None
            return F.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=op.scale, enable_gqa=groups)
        case BatchNorm():
            return F.batch_norm(x, None, None, p.get("weight"), p.get("bias"), True, 0.0, op.eps)
        case InstanceNorm():
            return F.instance_norm(x, None, None, p.get("weight"), p.get("bias"), eps=op.eps)
        case GroupNorm():
            return F.group_norm(x, op.groups, p.get("weight"), p.get("bias"), op.eps)
        case LayerNorm():
            return F.layer_norm(x, x.shape[-op.rank :], p.get("weight"), p.get("bias"), op.eps)
        case RMSNorm():
            return F.rms_norm(x, x.shape[-op.rank :], p.get("weight"), op.eps)
        case LocalResponseNorm():
            return F.local_response_norm(x, op.size, op.alpha, op.beta, op.k)
        case Softmax():
            return (F.log_softmax if op.log else F.softmax)(x, op.dim)
        case Reduce(mode="norm2"):
            return torch.linalg.vector_norm(x, 2, op.dims, op.keepdim)
        case Reduce(mode="argmax"):
            return x.argmax(op.dims[0], op.keepdim)
        case Reduce(mode="prod"):
            return x.prod(op.dims[0], op.keepdim)
        case Reduce():
            f = {"mean": torch.mean, "sum": torch.sum, "max": torch.amax, "min": torch.amin}[op.mode]
            return f(x, op.dims, op.keepdim)
        case Unary():
            return _unary(op, x)
        case Prelu():
            return F.prelu(x, p["weight"])
        case Binary():
            pair = inputs if op.parameter is None else [x, p["operand"].reshape(op.parameter)]
            return _binary(op, *(reversed(pair) if op.swapped else pair))
        case Where():
            return torch.where(*inputs)
        case Dropout():
            return x  # models are tested with a probability that drops nothing
        case Cast():
            return x.to(getattr(torch, op.dtype))
        case Reshape():
            return x.reshape(op.shape)
        case Permute():
            return x.permute(op.order)
        case Slice():
            dim = op.dim % x.dim()
            return x[(slice(None),) * dim + (slice(op.start, op.stop, op.step),)]
        case Select():
            return x.select(op.dim, op.index)
        case Expand():
            return x.expand(op.shape)
        case Concat():
            return torch.cat(inputs, op.dim)
        case Pad():
            pads = [q for pair in reversed(op.pads) for q in pair]
            if op.mode == "constant":
                return F.pad(x, pads, value=op.value)
            return F.pad(x, pads[: 2 * (x.dim() - 2)], op.mode)
        case Interpolate():
            modes = {"nearest": "nearest", "nearest_exact": "nearest-exact", "cubic": "bicubic"}
            mode = modes.get(op.mode) or ("linear", "bilinear", "trilinear")[len(op.size) - 1]
            aligned = None if "nearest" in mode else op.align_corners
            if op.scales:
                return F.interpolate(x, scale_factor=op.scales, mode=mode, align_corners=aligned)
            return F.interpolate(x, op.size, mode=mode, align_corners=aligned)
        case Embedding():
            return F.embedding(x, p["weight"], op.padding)
        case Cumsum():
            return x.cumsum(op.dim)
        case Gather():
            return x.gather(op.dim, inputs[1].long() % x.shape[op.dim] if op.wraps else inputs[1])
        case OneHot():
            made = F.one_hot(x.squeeze(op.dim).long(), op.count).movedim(-1, op.dim)
            return made.to(getattr(torch, op.dtype)) * int(op.on)
        case Scatter(mode="add"):
            return x.scatter_add(op.dim, *inputs[1:])
        case Scatter(mode="mul" | "max" | "min"):
            return x.scatter_reduce(op.dim, *inputs[1:], {"mul": "prod", "max": "amax", "min": "amin"}[op.mode])
        case Scatter():
            return x.scatter(op.dim, *inputs[1:], *([] if op.value is None else [op.value]))
        case Take():
            return x[(slice(None),) * op.dim + (inputs[1],)]
        case Positions():
            places = (x % torch.tensor(op.extents)).movedim(-1, 0).numpy()
            return torch.tensor(np.ravel_multi_index(tuple(places), op.extents))
        case Loss():
            return _loss(op, *inputs)
        case TorchOp():
            return op.called(inputs, [p[str(i)] for i in range(len(op.held))])
    raise AssertionError(f"no way to run {op}")


def _fused(op: Fused, inputs: list[Tensor], p: dict[str, Tensor]) -> Tensor:
    """The views of every input, the main operator, then the epilogue, whose parameters are numbered."""
    viewed = []
    for x, chain in zip(inputs, op.views, strict=True):
        for view in chain:
            x = run(view, [x], {})
        viewed.append(x)
    count = len(viewed) - sum(f.extras for f in op.epilogue)
    out, extras = run(op.main, viewed[:count], p), viewed[count:]
    for i, f in enumerate(op.epilogue):
        given, extras = extras[: f.extras], extras[f.extras :]
        own = {name.removeprefix(f"{i}."): value for name, value in p.items() if name.startswith(f"{i}.")}
        out = run(f.op, [*given[: f.slot], out, *given[f.slot :]], own)
    return out


def _unary(op: Unary, x: Tensor) -> Tensor:
    fn, a = op.fn, op.arguments
    if fn.endswith("_scalar"):
        name = fn.removesuffix("_scalar")
        number = torch.tensor(a[0], dtype=x.dtype if x.is_floating_point() or a[0] % 1 == 0 else torch.float32)
        if name.startswith("r") and name != "remainder":
            return _named(name[1:])(number, x)
        return _named(name)(x, number)
    if fn == "gelu_tanh":
        return F.gelu(x, approximate="tanh")
    if fn == "clamp":
        return x.clamp(*a)
    f = getattr(torch, fn, None) or getattr(F, fn)
    result: Tensor = f(x, *a)
    return result


def _binary(op: Binary, x: Tensor, y: Tensor) -> Tensor:
    if op.fn == "masked_fill":
        return x.masked_fill(y, op.arguments[0])
    if op.fn in ("add", "sub") and op.arguments:
        y = y * op.arguments[0]
    return _named(op.fn)(x, y)


def _named(fn: str):  # type: ignore[no-untyped-def]
    return getattr(torch, fn)


def _loss(op: Loss, x: Tensor, target: Tensor, *weights: Tensor) -> Tensor:
    names = {
        "cross_entropy": "cross_entropy", "nll": "nll_loss", "mse": "mse_loss", "l1": "l1_loss", "kl": "kl_div",
        "smooth_l1": "smooth_l1_loss", "bce": "binary_cross_entropy", "bce_logits": "binary_cross_entropy_with_logits",
    }  # fmt: skip
    each = getattr(F, names[op.fn])(
        x, target, reduction="none", **dict(op.arguments), **dict(zip(op.weighted, weights, strict=True))
    )
    if op.reduction == "none":
        return each
    rest = each.flatten(1) if each.dim() > 1 else each[:, None]
    if op.reduction == "mean" and op.classes and weights:
        counted = target != int(dict(op.arguments).get("ignore_index", -100))
        total = (weights[0][target.where(counted, 0)] * counted).sum()
        return rest.sum(1) * len(rest) / total
    return rest.mean(1) if op.reduction == "mean" else rest.sum(1)


def imported(
    model: torch.nn.Module, inputs: tuple[Tensor, ...], kwargs: Mapping[str, Tensor] | None = None, times: int = 2
) -> LayerGraph:
    """The model's graph, after checking that it computes what the model does, also with `times` as many samples."""
    program = rewrite(read_program(torch.export.export(model, inputs, dict(kwargs or {})), "model"))
    importer = _Importer(program, "model", None)
    graph = importer.graph()
    stored: dict[str, Tensor] = {s.target: t for s in program.sources if (t := s.read()) is not None}
    for value in (*importer.values.values(), *importer.placer.standing.values()):
        if isinstance(value, Operand) and value.role == "constant" and value.value is not None:
            stored[value.name] = torch.tensor(value.value)
            stored[f"{value.name}.not"] = torch.tensor(np.logical_not(value.value))
    names = [s.target for s in program.sources if s.kind == "input"]
    given = [*inputs, *(kwargs or {}).values()]
    for count, samples in ((1, graph), (times, graph.rebatch(times * graph.batch))):
        fed = [torch.cat([t] * count) for t in given]  # every input has samples, in these tests
        repeated = {
            layer.name: torch.cat([stored[layer.name]] * count)
            for layer in samples.layers
            if layer.role is Role.CONSTANT and layer.out.index("n") == 0
        }
        got = evaluate(samples, dict(zip(names, fed, strict=True)), stored | repeated)
        torch.manual_seed(0)
        wanted = tree_leaves(model(*fed[: len(inputs)], **dict(zip(kwargs or {}, fed[len(inputs) :], strict=True))))
        assert len(got) == len(wanted)
        for ours, theirs in zip(got, wanted, strict=True):
            ours = ours.mean() if theirs.dim() == 0 and ours.dim() == 1 else ours  # a loss: one number a sample
            torch.testing.assert_close(ours, theirs, check_dtype=False)
    return graph
