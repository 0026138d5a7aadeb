"""Every row of the importer's table: the imported layers compute what the operator does."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.from_torch import from_torch
from tests.importers.evaluate import imported
from tests.importers.zoo import Function


def image(*shape: int) -> Tensor:
    torch.manual_seed(len(shape))
    return torch.rand(*shape, dtype=torch.float64) * 1.6 + 0.2  # positive: logarithms and roots are defined


X = (3, 4, 6, 5)
# fmt: off
ONE: dict[str, Callable[[Tensor], object]] = {
    **{fn: getattr(torch, fn) for fn in (
        "abs", "neg", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt", "square", "reciprocal",
        "sin", "cos", "tan", "atan", "sinh", "cosh", "tanh", "asinh", "erf", "erfc", "sigmoid", "sign", "floor",
        "ceil", "round", "trunc", "frac", "relu", "isnan", "lgamma", "digamma",
    )},
    **{fn: getattr(F, fn) for fn in (
        "relu6", "hardtanh", "hardswish", "hardsigmoid", "selu", "celu", "elu", "silu", "mish", "gelu", "softplus",
        "softsign", "tanhshrink", "hardshrink", "softshrink", "logsigmoid", "leaky_relu",
    )},
    "gelu tanh": lambda x: F.gelu(x, approximate="tanh"),
    "elu 2": lambda x: F.elu(x - 1, 2.0),
    "threshold": lambda x: F.threshold(x, 0.5, 20.0),
    "clamp": lambda x: (x.clamp(0.3, 0.9), x.clamp(max=1), x.clamp_min(0.5), torch.clamp(x, x * 0.5, x + 1)),
    "glu": lambda x: F.glu(x, 1),
    "scalars": lambda x: (x + 2, 2 - x, x - 2, x * 3, x / 4, 3 / x, x**3, 2**x, x // 0.3, x % 0.3, torch.fmod(x, 0.3)),
    "comparisons": lambda x: (x > 1, x >= 1, x < 1, x <= 1, x == 1, x != 1, x < 1),
    "both": lambda x: (
        x + x.sin(), x - x.sin(), x * x.sin(), x / x.exp(), x**x, torch.maximum(x, 2 - x), torch.min(x, 2 - x),
    ),
    "both more": lambda x: (torch.atan2(x, x * x), torch.fmod(x, x * x), x // (x * x), x % (x * x), (x > 1) & (x < 2)),
    "alpha": lambda x: (torch.add(x, x * x, alpha=3), torch.sub(x, x * x, alpha=2), torch.rsub(x, x * x, alpha=2)),
    "rounded division": lambda x: (torch.div(x, 0.3, rounding_mode="floor"), torch.div(x, 0.3, rounding_mode="trunc")),
    "lerp": lambda x: (torch.lerp(x, x * x, 0.3), torch.lerp(x, x * x, x)),
    "addcmul": lambda x: (torch.addcmul(x, x, x, value=2), torch.addcdiv(x, x, x + 1)),
    "where": lambda x: (torch.where(x > 1, x, 0.0), torch.where(x > 1, 0.5, x), torch.where(x > 1, x, x * x)),
    "where of numbers": lambda x: torch.where(x > 1, 2.0, 3.0),
    "masked_fill": lambda x: (x.masked_fill(x > 1, 2.0), x.masked_fill(x[:, :1] > 1, 2.0)),
    "cast": lambda x: (x.float() * 2, x.to(torch.int64) + 1, (x > 1).type_as(x), x.half().float()),
    "max_pool2d": lambda x: (
        F.max_pool2d(x, 3, 2, 1), F.max_pool2d(x, 2, ceil_mode=True), F.max_pool2d(x, 2, 1, dilation=2),
    ),
    "avg_pool2d": lambda x: (
        F.avg_pool2d(x, 3, 2, 1), F.avg_pool2d(x, (2, 3), ceil_mode=True), F.avg_pool2d(x, 3, 2, 1, False, False),
        F.avg_pool2d(x, 2, divisor_override=3),
    ),
    "pools 1-D": lambda x: (F.max_pool1d(x[:, 0], 2), F.avg_pool1d(x[:, 0], 2), F.adaptive_avg_pool1d(x[:, 0], 2)),
    "pools 3-D": lambda x: (
        F.max_pool3d(x[:, None], 2), F.avg_pool3d(x[:, None], 2), F.adaptive_avg_pool3d(x[:, None], 2),
    ),
    "max pool with places": lambda x: F.max_pool2d(x, 2, return_indices=True)[0],
    "adaptive": lambda x: (
        F.adaptive_avg_pool2d(x, (3, None)), F.adaptive_max_pool2d(x, 2), F.adaptive_avg_pool2d(x, 1),
    ),
    "lp_pool": lambda x: F.lp_pool2d(x, 2, 2),
    "softmax": lambda x: (x.softmax(1), x.log_softmax(-1), F.softmin(x, 2)),
    "reductions": lambda x: (
        x.mean(1), x.sum((2, 3), keepdim=True), x.amax(3), x.amin((1, 2)), x.prod(2), x.norm(dim=1),
    ),
    "max": lambda x: (x.max(1)[0], x.min(2, keepdim=True).values),
    "spread": lambda x: (x.std((2, 3)), x.var(1, unbiased=False), torch.logsumexp(x, (1, 2)), F.normalize(x)),
    "cat with nothing": lambda x: torch.cat([torch.empty(0, dtype=x.dtype), x, x * 2], 1),
    "cat": lambda x: (torch.cat([x, x * x], 1), torch.cat([x], 1), torch.stack([x, x * x], -1)),
    "split": lambda x: (
        *x.split(2, 1), *x.split([1, 4], 3), *x.chunk(3, 2), *x.tensor_split((2, 3), 2), *x[:, 0].unbind(1),
    ),
    "slices": lambda x: (x[:, 1:3], x[..., ::2], x[:, -1], x[:, None, 0, 1:], x.narrow(2, 1, 2), x[:, :, 4:100], x[:]),
    "index": lambda x: (x[:, [0, 2, 3]], x[:, :, torch.tensor([1, 3, 5])], x.index_select(3, torch.tensor([4, 0, 1]))),
    "scatters": lambda x: (
        torch.zeros(len(x), 5, *x.shape[2:], dtype=x.dtype).scatter_(1, x[:, :1].long(), 1),
        torch.zeros(len(x), 4, *x.shape[2:], dtype=torch.bool).scatter_(1, x[:, 1:2].long(), 1) * 1.0,
        x.scatter(1, x[:, :2].round().long(), 2.5), x.scatter_add(2, x.long(), x * 2),
        F.one_hot(x[:, 0].long(), 4) * 1.5,
    ),
    "numbers beside": lambda x: (torch.round(x, decimals=1), torch.logit(x / 2, eps=0.2), torch.fmax(x, (x - 1).log())),
    "flips": lambda x: (x.roll(2, 1), x.roll((1, -2), (2, 3)), x.roll(4, 1)),
    "views": lambda x: (
        x.flatten(1), x.flatten(2), x.view(len(x), -1), x.reshape(len(x), 2, 2, -1), x.unflatten(1, (2, 2)),
        x.view(-1, 5),
    ),
    "squeezes": lambda x: (x[:, :1].squeeze(1), x.unsqueeze(2), x[:, :1, :1].squeeze(), x.unsqueeze(-1).squeeze(-1)),
    "permutes": lambda x: (
        x.permute(0, 2, 3, 1), x.transpose(1, -1), x.movedim(1, 3), x.mT, x.swapaxes(1, 2), x[:, 0, 0].t(),
    ),
    "expands": lambda x: (
        x[:, :1].expand(-1, 4, -1, -1), x[:, :1].expand_as(x), x.repeat(1, 2, 1, 1), x[:, :1].tile(1, 3, 1, 1),
    ),
    "copies": lambda x: (x.contiguous().clone() * 2, x.detach() + 1, torch.zeros_like(x).copy_(x) * 2),
    "pads": lambda x: (
        F.pad(x, (1, 2)), F.pad(x, (1, 0, 2, 1), value=3.0), F.pad(x, (-1, 0)), F.pad(x, (0, 0, 0, 0, 1, 1)),
    ),
    "pad modes": lambda x: (
        F.pad(x, (1, 2, 0, 1), "reflect"), F.pad(x, (1, 2, 3, 0), "replicate"), F.pad(x, (1, 2, 0, 1), "circular"),
        F.pad(x[:, 0], (1, 2), "reflect"), F.pad(x[:, None], (1, 2, 0, 1, 1, 1), "replicate"),
    ),
    "nearest": lambda x: (
        F.interpolate(x, scale_factor=2), F.interpolate(x, (7, 9)), F.interpolate(x, 9, mode="nearest-exact"),
    ),
    "bilinear": lambda x: (
        F.interpolate(x, scale_factor=2, mode="bilinear"),
        F.interpolate(x, (7, 9), mode="bilinear", align_corners=True),
        F.interpolate(x, scale_factor=1.7, mode="bilinear"), F.interpolate(x, 8, mode="bicubic"),
    ),
    "interpolate others": lambda x: (
        F.interpolate(x[:, 0], 9, mode="linear"), F.interpolate(x[:, None], (5, 7, 9), mode="trilinear"),
        F.interpolate(x[:, 0], 9), F.interpolate(x[:, None], (5, 7, 9)),
    ),
    "shuffles": lambda x: (F.pixel_shuffle(x, 2), F.pixel_unshuffle(x[..., :4], 2), F.channel_shuffle(x, 2)),
    "local_response_norm": lambda x: (
        F.local_response_norm(x, 3, 0.1, 0.5, 2.0), F.local_response_norm(x[:, 0], 2, 0.1),
    ),
    "matmul": lambda x: (
        x @ x.mT, x.matmul(x[0, 0].T), torch.bmm(x[:, 0], x[:, 1].mT), torch.mm(x[:, 0, 0], x[0, 0, 0:1].T),
    ),
    "baddbmm": lambda x: torch.baddbmm(x[:, 2, :, :1], x[:, 0], x[:, 1].mT, beta=0.5, alpha=2),
    "einsum": lambda x: (
        torch.einsum("nchw,ndhw->ncd", x, x), torch.einsum("nchw,nkhw->nhck", x, x), torch.einsum("nchw->nwc", x),
        torch.einsum("...hw,...kw->...hk", x, x), torch.einsum("nchw,nchw->nc", x, x),
        torch.einsum("nchw,nkl", x, x[:, 0]),
    ),
    "attention": lambda x: (
        F.scaled_dot_product_attention(x, x, x), F.scaled_dot_product_attention(x, x, x, is_causal=True, scale=0.3),
        F.scaled_dot_product_attention(x, x[:, :2], x[:, :2], enable_gqa=True),
        F.scaled_dot_product_attention(x, x, x, torch.ones(6, 6, dtype=torch.bool).tril()),
        F.scaled_dot_product_attention(x[:, 0], x[:, 1], x[:, 2]),
    ),
    "positions": lambda x: (
        x[:, x.mean((0, 2, 3)).long() % 2], x[:, torch.tensor([[0, 3], [2, -1]])],
        x.flatten(2)[..., torch.arange(70) * 7 % 13],
        x[:, :, torch.tensor([[0, 1], [2, 3]]), torch.tensor([[1, 1], [4, 0]])],
        x.gather(1, x.argmax(1, keepdim=True)[..., :3]), torch.take_along_dim(x, x[:, :1].argmax(2, keepdim=True), 2),
        x.repeat_interleave(3, 1), x.repeat_interleave(2),
    ),
    "norms without parameters": lambda x: (
        F.layer_norm(x, x.shape[2:]), F.group_norm(x, 2), F.rms_norm(x, x.shape[3:], eps=1e-6), F.instance_norm(x),
    ),
}
# fmt: on


@pytest.mark.parametrize("name", ONE)
def test_function_of_one_image(name: str) -> None:
    imported(Function(ONE[name]), (image(*X),))


UNSUPPORTED: dict[str, tuple[Callable[[Tensor], object], str]] = {
    "positions of a mask": (lambda x: x[:, torch.tensor([True, False, True, True])], "depends on data")
}


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_unsupported_is_one_clear_line(name: str) -> None:
    function, said = UNSUPPORTED[name]
    with pytest.raises(LayerwiseError, match=said) as caught:
        from_torch(Function(function), (image(*X),))
    assert "\n" not in str(caught.value)
    assert "layer '" in str(caught.value)
