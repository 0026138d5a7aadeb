"""Rows of the PyTorch importer's table: convolutions, pools, norms, attention, losses, resampling."""

from __future__ import annotations

from math import prod
from typing import Literal

import numpy as np

from layerwise.errors import LayerwiseError
from layerwise.importers import functions
from layerwise.importers.functions import attends_along_samples, scaled
from layerwise.importers.registry import Build, Built, Call, Operand, Result, Table, Tensor
from layerwise.importers.tensors import reshaped
from layerwise.importers.torch.ops.matrix import standardised
from layerwise.importers.torch.ops.pointwise import binary
from layerwise.importers.torch.patterns import BATCH_MEAN
from layerwise.ops.nn.attention import Attention
from layerwise.ops.nn.conv import Conv, ConvTranspose
from layerwise.ops.nn.linear import Embedding, MatMul
from layerwise.ops.nn.loss import Loss
from layerwise.ops.nn.norm import BatchNorm, GroupNorm, InstanceNorm, LayerNorm, LocalResponseNorm, RMSNorm
from layerwise.ops.nn.pool import AdaptivePool, Pool
from layerwise.ops.nn.resample import Interpolate, Pad
from layerwise.ops.opaque import Slot, TorchOp
from layerwise.ops.tensor.reduce import Reduce

Pads = tuple[tuple[int, int], ...]


def stored(call: Call, *names: str) -> tuple[Operand, ...]:
    """The call's parameters and buffers of these names, including those computed from others."""
    operands = {name: call.operand(name) for name in names if call.get(name) is not None}
    for name, p in operands.items():
        if p.transposed or "n" in p.spec.dims:
            how = "transposed" if p.transposed else "computed from the samples"
            raise LayerwiseError(f"{call.target}: its {name} is {how}, which is not supported")
    return tuple(operands.values())


def convolution(call: Call) -> Result:
    """conv1d, conv2d, conv3d, with numbers, "same" or "valid" as padding."""
    if call.operand("weight").spec.index("n") == 0:
        return _convolution_of_samples(call)
    parameters = stored(call, "weight", "bias")
    out, _, *kernel = parameters[0].shape
    rank = len(kernel)
    dilation = call.integers("dilation", rank)
    op = Conv(
        out,
        tuple(kernel),
        call.integers("stride", rank),
        _padding(call, tuple(kernel), dilation),
        dilation,
        call.integer("groups"),
        len(parameters) > 1,
    )
    return Built(op, (call.operand("input"),), parameters)


def _convolution_of_samples(call: Call) -> Result:
    """A kernel for every sample, as StyleGAN modulates them: groups of one image, here a batched matrix product."""
    x, weight, groups = call.operand("input"), call.operand("weight"), call.integer("groups")
    rows, channels, *kernel = weight.shape
    pads = _padding(call, tuple(kernel), call.integers("dilation", len(kernel)))
    alike = len(kernel) == 2 and x.shape[0] == 1 and groups == call.batch and all(a == b for a, b in pads)
    if not alike or call.get("bias") is not None:
        raise LayerwiseError(
            "its weight is computed from the samples, which is supported in 2-D only, with a group for each sample"
        )
    numbers = {
        "kernel_size": tuple(kernel),
        "dilation": call.integers("dilation", 2),
        "padding": tuple(a for a, _ in pads),
        "stride": call.integers("stride", 2),
    }
    columns = TorchOp("aten::im2col", (("self", Slot(0)), *numbers.items()), free=((0, None, None, None),))
    windows = Built(columns, (reshaped(x, (groups, channels, *x.shape[2:])),))
    matrices = reshaped(weight, (groups, rows // groups, channels * prod(kernel)))
    return reshaped(Built(MatMul(), (matrices, windows)), call.outputs[0].shape)


def _padding(call: Call, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> Pads:
    if call["padding"] == "valid":
        return ((0, 0),) * len(kernel)
    if call["padding"] == "same":  # the odd element at the end, as in torch.nn.modules.conv
        totals = [d * (k - 1) for k, d in zip(kernel, dilation, strict=True)]
        return tuple((t // 2, t - t // 2) for t in totals)
    return tuple((p, p) for p in call.integers("padding", len(kernel)))


def transposed_convolution(call: Call) -> Result:
    parameters = stored(call, "weight", "bias")
    _, per_group, *kernel = parameters[0].shape
    rank, groups = len(kernel), call.integer("groups")
    op = ConvTranspose(
        per_group * groups,
        tuple(kernel),
        call.integers("stride", rank),
        tuple((p, p) for p in call.integers("padding", rank)),
        call.integers("output_padding", rank),
        call.integers("dilation", rank),
        groups,
        len(parameters) > 1,
    )
    return Built(op, (call.operand("input"),), parameters)


def pool(mode: Literal["max", "average"], rank: int) -> Build:
    def build(call: Call) -> Result:
        kernel, average = call.integers("kernel_size", rank), mode == "average"
        divisor = call.get("divisor_override")
        op = Pool(
            mode,
            kernel,
            call.integers("stride", rank) or kernel,
            tuple((p, p) for p in call.integers("padding", rank)),
            (1,) * rank if average else call.integers("dilation", rank),
            call.flag("ceil_mode"),
            call.flag("count_include_pad") if average else True,
            divisor=divisor if isinstance(divisor, int) else None,
        )
        return _first(call, Built(op, (call.operand("self"),)))

    return build


def adaptive_pool(mode: Literal["max", "average"], rank: int) -> Build:
    return lambda call: _first(call, Built(AdaptivePool(mode, call.outputs[0].shape[-rank:]), (call.operand("self"),)))


def _affine(call: Call) -> tuple[Operand, ...]:
    """Weight and bias: both or neither."""
    both = stored(call, "weight", "bias")
    if len(both) == 1:
        raise LayerwiseError(f"{call.target}: a weight without a bias (or a bias without a weight) is not supported")
    return both


def batch_norm(call: Call) -> Result:
    """Batch norm in training mode, also of a model exported for evaluation, as plans are for training."""
    x = call.operand("input")
    if x.role == "parameter":
        return _first(call, standardised(x, call.number("eps"), call.get("weight"), call.get("bias")))
    affine = _affine(call)
    running = stored(call, "running_mean", "running_var") if "running_mean" in call.arguments else ()
    op = BatchNorm(bool(affine), call.number("eps"), call.number("momentum"), bool(running))
    return _first(call, Built(op, (call.operand("input"),), (*affine, *running)))


def instance_norm(call: Call) -> Result:
    affine, running = _affine(call), stored(call, "running_mean", "running_var")
    op = InstanceNorm(bool(affine), call.number("eps"), bool(running), call.number("momentum"))
    return Built(op, (call.operand("input"),), (*affine, *running))


def group_norm(call: Call) -> Result:
    affine = _affine(call)
    groups = call.integer("num_groups" if "num_groups" in call.arguments else "group")
    return _first(call, Built(GroupNorm(groups, bool(affine), call.number("eps")), (call.operand("input"),), affine))


def layer_norm(call: Call) -> Result:
    weight, bias = stored(call, "weight"), stored(call, "bias")
    op = LayerNorm(len(call.integers("normalized_shape")), bool(weight), bool(bias), call.number("eps"))
    return _first(call, Built(op, (call.operand("input"),), (*weight, *bias)))


def rms_norm(call: Call) -> Result:
    weight, eps = stored(call, "weight"), call.get("eps")
    op = RMSNorm(len(call.integers("normalized_shape")), bool(weight), eps if isinstance(eps, float) else None)
    return Built(op, (call.operand("input"),), weight)


def local_response_norm(call: Call) -> Result:
    op = LocalResponseNorm(call.integer("size"), call.number("alpha"), call.number("beta"), call.number("k"))
    return Built(op, (call.operand("input"),))


def _first(call: Call, made: Tensor) -> Result:
    """The row's result and None for statistics, which decomposed programs return too and nobody reads."""
    return (made, *(None,) * (len(call.outputs) - 1)) if len(call.outputs) > 1 else made


def embedding(call: Call) -> Result:
    (weight,) = stored(call, "weight")
    if call.flag("scale_grad_by_freq"):
        raise LayerwiseError("an embedding with scale_grad_by_freq is not supported: build it without that")
    padding = call.get("padding_idx")
    skipped = padding if isinstance(padding, int) and padding >= 0 else None
    op = Embedding(weight.shape[0], weight.shape[1], weight.spec.dtype, skipped)
    return Built(op, (call.operand("indices"),), (weight,))


def embedding_bag(call: Call) -> Result:
    """The rows of every bag, summed or averaged. Bags must have one size: ids (n, s), viewed as one row of numbers."""
    (weight,) = stored(call, "weight")
    ids, offsets = call.operand("indices"), call.operand("offsets")
    bags = offsets.shape[0] - call.flag("include_last_offset")
    size = ids.shape[0] // bags
    alike = offsets.value is not None and np.array_equal(offsets.value[:bags], np.arange(bags) * size)
    if not alike or ids.shape != (bags * size,):
        raise LayerwiseError("an embedding bag with bags of different sizes is not supported: pass ids (n, s)")
    mode, padding = call.integer("mode"), call.get("padding_idx")
    if mode not in BAGS or (isinstance(padding, int) and padding >= 0) or call.flag("scale_grad_by_freq"):
        raise LayerwiseError(
            "an embedding bag with mode='max', padding_idx or scale_grad_by_freq is not supported: use nn.Embedding"
        )
    op = Embedding(weight.shape[0], weight.shape[1], weight.spec.dtype)
    rows: Tensor = Built(op, (reshaped(ids, (bags, size)),), (weight,))
    weights = call.get("per_sample_weights")
    if isinstance(weights, Operand):
        rows = binary("mul", rows, reshaped(weights, (bags, size, 1)))
    return Built(Reduce(BAGS[mode], (1,)), (rows,)), None, None, None


def attention(call: Call) -> Result:
    q, k, v = call.operand("query"), call.operand("key"), call.operand("value")
    if q.spec.dims[-2] == "n" and len(q.shape) > 3 and q.shape[0] > 1:  # in one sequence, samples may attend to samples
        raise attends_along_samples(q.shape[0])
    mask, scale = call.get("attn_mask"), call.get("scale")
    inputs = (q, k, v, mask) if isinstance(mask, Operand) else (q, k, v)
    factor = float(scale) if isinstance(scale, (int, float)) else None
    return Built(Attention(call.flag("is_causal"), len(inputs) > 3, factor, call.number("dropout_p")), inputs)


BAGS: dict[int, Literal["sum", "mean"]] = {0: "sum", 1: "mean"}
REDUCTIONS: dict[int, Literal["none", "mean", "sum", "batchmean"]] = {
    0: "none", 1: "mean", 2: "sum", BATCH_MEAN: "batchmean"
}  # fmt: skip


def loss(
    fn: Literal["cross_entropy", "nll", "mse", "l1", "smooth_l1", "bce", "bce_logits", "kl"], **defaults: float
) -> Build:
    def build(call: Call) -> Result:
        own = tuple((n, call.number(n)) for n, default in defaults.items() if call.number(n) != default)
        weights = tuple(name for name in ("weight", "pos_weight") if call.get(name) is not None)
        op = Loss(fn, REDUCTIONS[call.integer("reduction")], own, weights)
        inputs = (call.operand(name) for name in ("self", "target", *weights))
        return _first(call, functions.loss(op, *inputs))

    return build


def huber_loss(call: Call) -> Result:
    """delta * smooth_l1(beta=delta)."""
    delta = call.number("delta")
    op = Loss("smooth_l1", REDUCTIONS[call.integer("reduction")], (("beta", delta),) if delta != 1 else ())
    return scaled(functions.loss(op, call.operand("self"), call.operand("target")), delta)


MODES: dict[str, Literal["constant", "reflect", "replicate", "circular"]] = {
    "constant": "constant", "reflect": "reflect", "replicate": "replicate", "circular": "circular"
}  # fmt: skip


def pad(mode: str = "") -> Build:
    """Padding; the call names the mode unless `mode` does. torch counts pads from the last dimension."""

    def build(call: Call) -> Result:
        x = call.operand("self")
        numbers = call.integers("pad" if "pad" in call.arguments else "padding")
        pads = [(numbers[i], numbers[i + 1]) for i in range(0, len(numbers), 2)][::-1]
        if not any(map(any, pads)):
            return x
        how, value = MODES[mode or str(call["mode"])], call.get("value", 0.0)
        assert isinstance(value, (int, float))
        return Built(Pad(((0, 0),) * (len(x.shape) - len(pads)) + tuple(pads), how, float(value)), (x,))

    return build


def interpolate(mode: Literal["nearest", "nearest_exact", "linear", "cubic"], rank: int) -> Build:
    def build(call: Call) -> Result:
        x, size = call.tensors[0], call.outputs[0].shape[-rank:]
        named = [call.get(n) for n in ("scales_d", "scales_h", "scales_w", "scales")]
        factors = call.get("scale_factors") or tuple(f for f in named if f is not None)
        assert isinstance(factors, tuple)
        scales = tuple(float(f) for f in factors if isinstance(f, (int, float)))
        ratios = tuple(s / e for s, e in zip(size, x.shape[-rank:], strict=True))
        aligned = bool(call.get("align_corners", False))
        return Built(Interpolate(size, mode, aligned, () if scales == ratios else scales), (x,))

    return build


LAYERS: Table = (
    {f"conv{d}d": convolution for d in (1, 2, 3)}
    | {f"conv_transpose{d}d": transposed_convolution for d in (1, 2, 3)}
    | {f"max_pool{d}d{more}": pool("max", d) for d in (1, 2, 3) for more in ("", "_with_indices")}
    | {f"avg_pool{d}d": pool("average", d) for d in (1, 2, 3)}
    | {f"adaptive_max_pool{d}d": adaptive_pool("max", d) for d in (1, 2, 3)}
    | {f"{own}adaptive_avg_pool{d}d": adaptive_pool("average", d) for own in ("", "_") for d in (1, 2, 3)}
    | dict.fromkeys(("layer_norm", "native_layer_norm"), layer_norm)
    | dict.fromkeys(("group_norm", "native_group_norm"), group_norm)
    | dict.fromkeys(("batch_norm", "_native_batch_norm_legit", "_native_batch_norm_legit_functional"), batch_norm)
    | {f"reflection_pad{d}d": pad("reflect") for d in (1, 2, 3)}
    | {f"replication_pad{d}d": pad("replicate") for d in (1, 2, 3)}
    | {f"upsample_nearest{d}d": interpolate("nearest", d) for d in (1, 2, 3)}
    | {f"_upsample_nearest_exact{d}d": interpolate("nearest_exact", d) for d in (1, 2, 3)}
    | {f"upsample_{n}{d}d": interpolate("linear", d) for d, n in ((1, "linear"), (2, "bilinear"), (3, "trilinear"))}
    | dict.fromkeys(
        ("nll_loss", "nll_loss_nd", "nll_loss2d", "nll_loss_forward", "nll_loss2d_forward"),
        loss("nll", ignore_index=-100),
    )
    | {
        "convolution": lambda call: transposed_convolution(call) if call.flag("transposed") else convolution(call),
        "instance_norm": instance_norm,
        "rms_norm": rms_norm,
        "embedding": embedding,
        "embedding_bag": embedding_bag,
        "scaled_dot_product_attention": attention,
        "pad": pad(),
        "constant_pad_nd": pad("constant"),
        "upsample_bicubic2d": interpolate("cubic", 2),
        "cross_entropy_loss": loss("cross_entropy", ignore_index=-100, label_smoothing=0),
        "mse_loss": loss("mse"),
        "l1_loss": loss("l1"),
        "smooth_l1_loss": loss("smooth_l1", beta=1),
        "huber_loss": huber_loss,
        "binary_cross_entropy": loss("bce"),
        "binary_cross_entropy_with_logits": loss("bce_logits"),
        "kl_div": loss("kl", log_target=0),
    }
)
