"""oneDNN for a small 3-D convolution of one sample on a CPU, which PyTorch computes by im2col.

PyTorch leaves such a convolution to im2col where channels x depth x height are at most 20,480
(`ConvParams::use_mkldnn` in ATen/native/Convolution.cpp): what is a rank's part of a volume mostly is, also of one that
one device has oneDNN compute. From 8 channels on, and where there is something to compute, oneDNN takes 20 to 90 % of
that time (`python -m benchmarks.im2col`). Layers that are whole, or split by samples only, are left to PyTorch: one
rank has its numbers bit for bit, and where all layers are split by samples the user's own module runs. So are
transposed convolutions: with kernels as large as the stride, as in U-Nets, oneDNN is hardly quicker
(`python -m benchmarks.im2col --transposed`).
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from math import prod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor

# Below these, im2col is as fast: PyTorch 2.13, one thread, forward and backward (`python -m benchmarks.im2col`).
LEAST_CHANNELS = 8  # of the input
LEAST_PRODUCTS = 3e6  # multiplications of a forward pass


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Computes torch.nn.functional.conv3d, by oneDNN where that is quicker than what PyTorch would take.

    The result is rounded otherwise: for parts of samples only (`Local.whole_samples`).
    """
    from torch.nn import functional

    if _ours(x, weight) and _quicker(x.shape, weight.shape, *map(tuple, (stride, padding, dilation)), groups):
        result: Tensor = _function().apply(x, weight, bias, stride, padding, dilation, groups)
        return result
    return functional.conv3d(x, weight, bias, stride, padding, dilation, groups)


def _ours(x: Tensor, weight: Tensor) -> bool:
    """True if these are ordinary tensors of float32 on a CPU, with oneDNN, outside of torch.compile and autocast."""
    import torch

    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and type(x) is torch.Tensor
        and x.layout == torch.strided
        and not torch.compiler.is_compiling()
        and not torch.is_autocast_enabled("cpu")
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and torch._C._get_mkldnn_enabled()
    )


@lru_cache(maxsize=4096)
def _quicker(
    x: torch.Size,
    weight: torch.Size,
    stride: tuple[int, ...],
    padding: tuple[int, ...],
    dilation: tuple[int, ...],
    groups: int,
) -> bool:
    """True if PyTorch takes im2col for these shapes, and there is enough to compute."""
    import torch

    spatial = (
        (extent + 2 * pad - d * (k - 1) - 1) // s + 1
        for extent, pad, k, s, d in zip(x[2:], padding, weight[2:], stride, dilation, strict=True)
    )
    if prod(weight[2:]) == 1 or x[1] < LEAST_CHANNELS or x[0] * prod(spatial) * prod(weight) < LEAST_PRODUCTS:
        return False
    given = torch.empty(x), torch.empty(weight), None
    backend = torch._C._select_conv_backend(*given, stride, padding, dilation, False, (0,) * len(stride), groups)
    return bool(backend.name == "Slow3d")


@cache
def _function() -> Any:
    import torch

    class Convolution(torch.autograd.Function):
        """PyTorch's derivative of oneDNN's convolution asks again which library takes these shapes: im2col."""

        @staticmethod
        def forward(
            ctx: Any,
            x: Tensor,
            weight: Tensor,
            bias: Tensor | None,
            stride: Any,
            padding: Any,
            dilation: Any,
            groups: int,
        ) -> Tensor:
            ctx.bias = None if bias is None else list(bias.shape)
            ctx.how = stride, padding, dilation, False, [0] * len(stride), groups
            ctx.set_materialize_grads(False)
            ctx.save_for_backward(x, weight)
            out: Tensor = torch.ops.aten.mkldnn_convolution(x, weight, bias, padding, stride, dilation, groups)
            return out

        @staticmethod
        def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
            if gradient is None:
                return (None,) * 7
            x, weight = ctx.saved_tensors
            # An input in oneDNN's layout is always left to it. Nothing of that layout can be differentiated once more.
            given = x if torch.is_grad_enabled() else x.to_mkldnn()
            mask = ctx.needs_input_grad[:3]
            made = torch.ops.aten.convolution_backward(gradient, given, weight, ctx.bias, *ctx.how, mask)
            return *made, None, None, None, None

    return Convolution
