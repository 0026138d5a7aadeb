"""Rows of the ONNX importer's table: layers with weights, pooling, reductions, losses. https://onnx.ai/onnx/operators/"""

from __future__ import annotations

from dataclasses import replace
from math import prod

from layerwise.errors import LayerwiseError
from layerwise.importers import reductions
from layerwise.importers.functions import scaled
from layerwise.importers.onnx.call import axes, axis, integers, optional, recast, text, weights
from layerwise.importers.onnx.ops.pointwise import both
from layerwise.importers.products import einsum, linear_layer
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


def _window(call: Call, x: Operand, kernel: Ints) -> tuple[Ints, Ints, Pads]:
    """Stride, dilation and padding of a window that slides over the last dimensions."""
    ones = (1,) * len(kernel)
    stride, dilation = integers(call, "strides") or ones, integers(call, "dilations") or ones
    flat = integers(call, "pads") or (0,) * (2 * len(kernel))
    if (named := integers(call, "kernel_shape")) and named != kernel:
        raise LayerwiseError(f"a kernel of {named} is not that of the weight, {kernel}")
    if not len(kernel) == len(stride) == len(dilation) == len(flat) // 2 == len(x.shape) - 2:
        raise LayerwiseError(f"kernel {kernel}, strides {stride}, dilations {dilation} and pads {flat} of {x.shape}")
    if min((*kernel, *stride, *dilation)) < 1 or min(flat) < 0:
        raise LayerwiseError(f"kernel {kernel}, strides {stride}, dilations {dilation} or pads {flat} out of range")
    pads = tuple(zip(flat[: len(kernel)], flat[len(kernel) :], strict=True))
    mode = text(call, "auto_pad", "NOTSET")
    if mode == "VALID":
        pads = ((0, 0),) * len(kernel)
    elif mode in ("SAME_UPPER", "SAME_LOWER"):
        reach = zip(x.shape[2:], kernel, stride, dilation, strict=True)
        pads = tuple(_same(extent, (k - 1) * d + 1, s, mode) for extent, k, s, d in reach)
    return stride, dilation, pads


def _same(extent: int, reach: int, stride: int, mode: str) -> tuple[int, int]:
    """Padding such that there are ceil(extent / stride) windows."""
    total = max((-(-extent // stride) - 1) * stride + reach - extent, 0)
    return _halves(total, upper=mode == "SAME_UPPER")


def _halves(total: int, *, upper: bool) -> tuple[int, int]:
    """The odd one goes after, or before."""
    return (total // 2, total - total // 2) if upper else (total - total // 2, total // 2)


def conv(call: Call) -> Result:
    x, weight = call.operand("X"), weights(call, "W")
    kernel = weight.shape[2:]
    stride, dilation, pads = _window(call, x, kernel)
    groups = call.integer("group")
    if len(weight.shape) != len(x.shape) or weight.shape[1] * groups != x.shape[1]:
        raise LayerwiseError(f"a weight of {weight.shape} in {groups} groups does not fit an input of {x.shape}")
    bias = optional(call, "B")
    op = Conv(weight.shape[0], kernel, stride, pads, dilation, groups, bool(bias))
    return Built(op, (x,), (weight, *bias))


def conv_transpose(call: Call) -> Result:
    x, weight = call.operand("X"), weights(call, "W")
    kernel, groups = weight.shape[2:], call.integer("group")
    if len(weight.shape) != len(x.shape) or weight.shape[0] != x.shape[1]:
        raise LayerwiseError(f"a weight of {weight.shape} does not fit an input of {x.shape}")
    mode, wanted = text(call, "auto_pad", "NOTSET"), integers(call, "output_shape")
    explicit = replace(call, arguments={**call.arguments, "auto_pad": "VALID" if mode == "VALID" else "NOTSET"})
    stride, dilation, pads = _window(explicit, x, kernel)
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


def max_pool(call: Call) -> Result:
    x, kernel = call.operand("X"), call.integers("kernel_shape")
    stride, dilation, pads = _window(call, x, kernel)
    return (Built(Pool("max", kernel, stride, pads, dilation, call.flag("ceil_mode")), (x,)), None)


def average_pool(call: Call) -> Result:
    x, kernel = call.operand("X"), call.integers("kernel_shape")
    stride, dilation, pads = _window(call, x, kernel)
    op = Pool("average", kernel, stride, pads, dilation, call.flag("ceil_mode"), call.flag("count_include_pad"))
    return Built(op, (x,))


def lp_pool(call: Call) -> Result:
    x, kernel = call.operand("X"), call.integers("kernel_shape")
    stride, dilation, pads = _window(call, x, kernel)
    return Built(Pool("lp", kernel, stride, pads, dilation, call.flag("ceil_mode"), power=call.number("p")), (x,))


def global_average_pool(call: Call) -> Result:
    x = call.operand("X")
    return Built(AdaptivePool("average", (1,) * (len(x.shape) - 2)), (x,))


def global_max_pool(call: Call) -> Result:
    x = call.operand("X")
    return Built(AdaptivePool("max", (1,) * (len(x.shape) - 2)), (x,))


def gemm(call: Call) -> Result:
    """alpha · A' · B' + beta · C."""
    a, b = call.operand("A"), call.operand("B")
    alpha, beta = call.number("alpha"), call.number("beta")
    c = call.operand("C") if call.get("C") is not None and beta else None
    left: Tensor = a
    if call.flag("transA"):
        left = permuted(a, (1, 0)) if a.activation else turned(a)
    if a.activation and not b.activation:
        b = turned(b) if call.flag("transB") else b
        plain = alpha == beta == 1 and c is not None and not c.activation and c.spec.volume == b.shape[1]
        if plain and c is not None and c.shape in ((b.shape[1],), (1, b.shape[1])):
            return linear_layer(left, b, recast(c, (b.shape[1],)))
        product: Tensor = linear_layer(left, b)
    else:
        right: Tensor = b
        if call.flag("transB"):
            right = permuted(b, (1, 0)) if b.activation else turned(b)
        product = Built(MatMul(), (left, right))
    product = scaled(product, alpha)
    return product if c is None else both("add", product, scaled(c, beta))


def matmul(call: Call) -> Result:
    a, b = call.operand("A"), call.operand("B")
    if a.activation and not b.activation and len(b.shape) == 2 and a.shape:
        if a.shape[-1] != b.shape[0]:
            raise LayerwiseError(f"a matrix of {b.shape} does not fit an input of {a.shape}")
        return linear_layer(a, b)
    return Built(MatMul(), (a, b))


def softmax(log: bool) -> Build:
    return lambda call: Built(Softmax(axis(call, len(call.tensors[0].shape)), log), (call.tensors[0],))


def flat_softmax(log: bool) -> Build:
    """Before opset 13: over all dimensions from `axis` on."""

    def build(call: Call) -> Result:
        x = call.tensors[0]
        dim = axis(call, len(x.shape))
        if all(extent == 1 for extent in x.shape[dim + 1 :]):
            return Built(Softmax(dim, log), (x,))
        flat = reshaped(x, (*x.shape[:dim], prod(x.shape[dim:])))
        return reshaped(Built(Softmax(dim, log), (flat,)), x.shape)

    return build


def reduction(mode: Mode, before: tuple[str, ...] = (), after: tuple[str, ...] = ()) -> Build:
    """Over `axes`, an attribute once, an input now; element-wise functions before and after."""

    def build(call: Call) -> Result:
        x = call.operand("data")
        dims = axes(call, len(x.shape))
        if not dims:
            if call.flag("noop_with_empty_axes"):
                dims = ()
            else:
                dims = tuple(range(len(x.shape)))
        result: Tensor = x
        for fn in before:
            result = Built(Unary(fn), (result,))
        if dims:
            result = reductions.reduction(mode, result, x.spec, dims, call.flag("keepdims"))
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
    plain = ignored in (None, -100)  # which is also the default of ours
    arguments = () if plain else (("ignore_index", call.integer("ignore_index")),)
    reduction = text(call, "reduction", "mean")
    op = Loss(fn, reduction, arguments, ("weight",) * len(weights))  # type: ignore[arg-type]
    return reductions.loss(op, prediction, target, *weights)


def attention(call: Call) -> Result:
    """Opset 23. Three-dimensional inputs hold their heads in the last dimension."""
    q, k, v = (call.operand(name) for name in "QKV")
    for name in ("past_key", "past_value", "nonpad_kv_seqlen"):
        if call.get(name) is not None:
            raise LayerwiseError(f"Attention with {name} is inference only; layerwise plans training")
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
    "MaxPool": max_pool,
    "AveragePool": average_pool,
    "LpPool": lp_pool,
    "GlobalAveragePool": global_average_pool,
    "GlobalMaxPool": global_max_pool,
    "Gemm": gemm,
    "MatMul": matmul,
    "Softmax": softmax(log=False),
    "LogSoftmax": softmax(log=True),
    "Softmax-1": flat_softmax(log=False),
    "Softmax-11": flat_softmax(log=False),
    "LogSoftmax-1": flat_softmax(log=True),
    "LogSoftmax-11": flat_softmax(log=True),
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
