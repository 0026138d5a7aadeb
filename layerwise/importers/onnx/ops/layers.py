"""Rows of the ONNX importer's table: layers with weights, pooling, reductions, losses. https://onnx.ai/onnx/operators/"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

from layerwise.errors import LayerwiseError
from layerwise.importers import functions
from layerwise.importers.functions import einsum, linear_layer, scaled
from layerwise.importers.onnx.call import axes, integers, optional, recast, text, weights
from layerwise.importers.onnx.ops.index import along
from layerwise.importers.onnx.ops.pointwise import both
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import permuted, reshaped, turned
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.conv import Conv, ConvTranspose, Pads
from layerwise.ops.nn.linear import MatMul
from layerwise.ops.nn.loss import Loss
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.tensor.along import Softmax
from layerwise.ops.tensor.pointwise import Unary
from layerwise.ops.tensor.reduce import Mode

Ints = tuple[int, ...]


def _window(call: Call, x: Operand, kernel: Ints) -> tuple[Ints, Pads, Ints]:
    """Stride, padding and dilation of a sliding window over the last dimensions."""
    ones = (1,) * len(kernel)
    stride, dilation = integers(call, "strides") or ones, integers(call, "dilations") or ones
    flat = integers(call, "pads") or (0,) * (2 * len(kernel))
    if (named := integers(call, "kernel_shape")) and named != kernel:
        raise LayerwiseError(f"kernel_shape {named} differs from the weight's, {kernel}")
    if not len(kernel) == len(stride) == len(dilation) == len(flat) // 2 == len(x.shape) - 2:
        raise LayerwiseError(
            f"kernel {kernel}, strides {stride}, dilations {dilation} and pads {flat} do not fit {x.shape}"
        )
    if min((*kernel, *stride, *dilation)) < 1 or min(flat) < 0:
        raise LayerwiseError(f"kernel {kernel}, strides {stride}, dilations {dilation} or pads {flat} are out of range")
    pads = tuple(zip(flat[: len(kernel)], flat[len(kernel) :], strict=True))
    mode = text(call, "auto_pad", "NOTSET")
    if mode == "VALID":
        pads = ((0, 0),) * len(kernel)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        reach = zip(x.shape[2:], kernel, stride, dilation, strict=True)
        pads = tuple(_same(extent, (k - 1) * d + 1, s, mode) for extent, k, s, d in reach)
    return stride, pads, dilation


def _same(extent: int, reach: int, stride: int, mode: str) -> tuple[int, int]:
    """Padding that gives ceil(extent / stride) windows."""
    total = max((-(-extent // stride) - 1) * stride + reach - extent, 0)
    return _halves(total, upper=mode == "SAME_UPPER")


def _halves(total: int, *, upper: bool) -> tuple[int, int]:
    """The odd one goes after, or before."""
    return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)


def conv(call: Call) -> Result:
    x, weight = call.operand("X"), weights(call, "W")
    kernel = weight.shape[2:]
    window, groups = _window(call, x, kernel), call.integer("group")
    if len(weight.shape) != len(x.shape) or weight.shape[1] * groups != x.shape[1]:
        raise LayerwiseError(f"a weight of {weight.shape} in {groups} groups does not fit an input of {x.shape}")
    bias = optional(call, "B")
    return Built(Conv(weight.shape[0], kernel, *window, groups, bool(bias)), (x,), (weight, *bias))


def conv_transpose(call: Call) -> Result:
    x, weight = call.operand("X"), weights(call, "W")
    kernel, groups = weight.shape[2:], call.integer("group")
    if len(weight.shape) != len(x.shape) or weight.shape[0] != x.shape[1]:
        raise LayerwiseError(f"a weight of {weight.shape} does not fit an input of {x.shape}")
    mode, wanted = text(call, "auto_pad", "NOTSET"), integers(call, "output_shape")
    explicit = replace(call, arguments={**call.arguments, "auto_pad": "VALID" if mode == "VALID" else "NOTSET"})
    stride, pads, dilation = _window(explicit, x, kernel)
    extra = integers(call, "output_padding") or (0,) * len(kernel)
    if wanted is None and mode.startswith("SAME"):
        wanted = tuple(extent * s for extent, s in zip(x.shape[2:], stride, strict=True))
    if wanted is not None:
        full = (
            (extent - 1) * s + e + (k - 1) * d + 1
            for extent, s, e, k, d in zip(x.shape[2:], stride, extra, kernel, dilation, strict=True)
        )
        total = [f - w for f, w in zip(full, wanted[-len(kernel) :], strict=True)]
        extra = tuple(e + max(-t, 0) for e, t in zip(extra, total, strict=True))
        pads = tuple(_halves(max(t, 0), upper=mode == "SAME_UPPER") for t in total)
    bias = optional(call, "B")
    op = ConvTranspose(weight.shape[1] * groups, kernel, stride, pads, extra, dilation, groups, bool(bias))
    return Built(op, (x,), (weight, *bias))


def pool(mode: Literal["max", "average", "lp"]) -> Build:
    def build(call: Call) -> Result:
        x, kernel = call.operand("X"), call.integers("kernel_shape")
        more: dict[str, Any] = {"average": {"count_include_pad": call.flag("count_include_pad")}}.get(mode, {})
        if mode == "lp":
            more = {"power": call.number("p")}
        return (Built(Pool(mode, kernel, *_window(call, x, kernel), call.flag("ceil_mode"), **more), (x,)), None)

    return build


def global_pool(mode: Literal["max", "average"]) -> Build:
    return lambda call: Built(AdaptivePool(mode, (1,) * (len(call.tensors[0].shape) - 2)), (call.tensors[0],))


def gemm(call: Call) -> Result:
    """alpha · A' · B' + beta · C."""
    a, b = call.operand("A"), call.operand("B")
    alpha, beta = call.number("alpha"), call.number("beta")
    c = call.operand("C") if call.get("C") is not None and beta else None
    left = permuted(a, (1, 0)) if call.flag("transA") else a
    if a.activation and not b.activation:
        b = turned(b) if call.flag("transB") else b
        plain = alpha == beta == 1 and c is not None and not c.activation
        if plain and c is not None and c.shape in ((b.shape[1],), (1, b.shape[1])):
            return linear_layer(left, b, recast(c, (b.shape[1],)))
        product: Tensor = linear_layer(left, b)
    else:
        product = Built(MatMul(), (left, permuted(b, (1, 0)) if call.flag("transB") else b))
    product = scaled(product, alpha)
    return product if c is None else both("add", product, scaled(c, beta))


def matmul(call: Call) -> Result:
    a, b = call.operand("A"), call.operand("B")
    if a.activation and not b.activation and len(b.shape) == 2 and a.shape:
        if a.shape[-1] != b.shape[0]:
            raise LayerwiseError(f"a matrix of {b.shape} does not fit an input of {a.shape}")
        return linear_layer(a, b)
    return Built(MatMul(), (a, b))


def softmax(log: bool, *, flat: bool = False) -> Build:
    return along(lambda x, shape, dtype, dim: Built(Softmax(dim, log), (x,)), flat=flat)


def reduction(mode: Mode, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Build:
    """A reduction over `axes` (an attribute in old opsets), with element-wise functions before and after."""

    def build(call: Call) -> Result:
        x = call.operand("data")
        every = () if call.flag("noop_with_empty_axes") else tuple(range(len(x.shape)))
        dims = axes(call, len(x.shape)) or every
        result: Tensor = x
        for fn in before:
            result = Built(Unary(fn), (result,))
        if dims:
            result = functions.reduction(mode, result, x.spec, dims, call.flag("keepdims"))
        for fn in after:
            result = Built(Unary(fn), (result,))
        return result

    return build


def cross_entropy(call: Call) -> Result:
    scores, labels = call.operand("scores"), call.operand("labels")
    log = Built(Softmax(1, log=True), (scores,))
    return (_loss(call, "cross_entropy", scores, labels), log)


def nll_loss(call: Call) -> Result:
    return _loss(call, "nll", call.operand("input"), call.operand("target"))


def _loss(call: Call, fn: str, prediction: Operand, target: Operand) -> Built:
    weights = [w for name in ("weights", "weight") if isinstance(w := call.get(name), Operand)]
    ignored = call.get("ignore_index")
    plain = ignored in (None, -100)  # -100 is also our default
    arguments = () if plain else (("ignore_index", call.integer("ignore_index")),)
    reduction = text(call, "reduction", "mean")
    op = Loss(fn, reduction, arguments, ("weight",) * len(weights))  # type: ignore[arg-type]
    return functions.loss(op, prediction, target, *weights)


def attention(call: Call) -> Result:
    """Attention of opset 23. Three-dimensional inputs hold their heads in the last dimension."""
    q, k, v = (call.operand(name) for name in "QKV")
    for name in ("past_key", "past_value", "nonpad_kv_seqlen"):
        if call.get(name) is not None:
            raise LayerwiseError(f"Attention with {name} is for inference only, but layerwise plans training")
    if call.get("softcap", 0.0) or {call.get("left_window_size", -1), call.get("right_window_size", -1)} != {-1}:
        raise LayerwiseError("Attention with softcap or a window is not supported")
    flat = len(q.shape) == 3
    heads, shared = (call.integer("q_num_heads"), call.integer("kv_num_heads")) if flat else (0, 0)
    parts: tuple[Tensor, ...] = (_heads(q, heads), _heads(k, shared), _heads(v, shared)) if flat else (q, k, v)
    mask = call.get("attn_mask")
    inputs = parts if mask is None else (*parts, call.operand("attn_mask"))
    scale = call.get("scale")
    op = Attention(call.flag("is_causal"), mask is not None, None if scale is None else call.number("scale"))
    result: Tensor = Built(op, inputs)
    if flat:
        result = reshaped(permuted(result, (0, 2, 1, 3)), (*q.shape[:2], v.shape[2] // shared * heads))
    return (result, None, None, None)


def _heads(x: Operand, count: int) -> Tensor:
    n, s, width = x.shape
    return permuted(reshaped(x, (n, s, count, width // count)), (0, 2, 1, 3))


LAYERS: Table = {
    "Conv": conv,
    "ConvTranspose": conv_transpose,
    "MaxPool": pool("max"),
    "AveragePool": pool("average"),
    "LpPool": pool("lp"),
    "GlobalAveragePool": global_pool("average"),
    "GlobalMaxPool": global_pool("max"),
    "Gemm": gemm,
    "MatMul": matmul,
    "Softmax": softmax(log=False),
    "LogSoftmax": softmax(log=True),
    **dict.fromkeys(("Softmax-1", "Softmax-11"), softmax(log=False, flat=True)),
    **dict.fromkeys(("LogSoftmax-1", "LogSoftmax-11"), softmax(log=True, flat=True)),
    "ReduceMean": reduction("mean"),
    "ReduceSum": reduction("sum"),
    "ReduceMax": reduction("max"),
    "ReduceMin": reduction("min"),
    "ReduceProd": reduction("prod"),
    "ReduceL1": reduction("sum", before=("abs",)),
    "ReduceL2": reduction("norm2"),
    "ReduceLogSum": reduction("sum", after=("log",)),
    "ReduceLogSumExp": reduction("sum", before=("exp",), after=("log",)),
    "ReduceSumSquare": reduction("sum", before=("square",)),
    "SoftmaxCrossEntropyLoss": cross_entropy,
    "NegativeLogLikelihoodLoss": nll_loss,
    "Attention": attention,
    "Einsum": einsum,
}
