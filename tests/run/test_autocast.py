"""torch.autocast around the call gives what it gives one device: values, gradients, and the types of all tensors."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import layerwise
from tests.run.autocasting import BF16, F16, F32, Made, Model, both, check


def attention(m: Model, y: Tensor, x: Tensor) -> Tensor:
    q = y.flatten(2)
    return F.scaled_dot_product_attention(q, q * 2, q)


CASES: dict[str, Made] = {
    "convolution": lambda m, y, x: m.second(y),
    "convolution transposed": lambda m, y, x: m.up(y),
    "linear": lambda m, y, x: m.fc(y),
    "product of matrices": lambda m, y, x: y @ y.transpose(2, 3),
    "product of two types": lambda m, y, x: m.beside(y) @ x.transpose(2, 3),
    "attention": attention,
    "sum of two of 16 bits": lambda m, y, x: y + y.relu() * 2,
    "sum of two types": lambda m, y, x: m.beside(y) + x,
    "product with a parameter": lambda m, y, x: (y * m.table).sin(),
    "batch norm": lambda m, y, x: m.batch_norm(y).relu(),
    "group norm": lambda m, y, x: m.group_norm(y),
    "layer norm": lambda m, y, x: m.layer_norm(y),
    "of the input": lambda m, y, x: m.layer_norm(x).exp(),
    "softmax": lambda m, y, x: y.softmax(1),
    "log softmax": lambda m, y, x: y.log_softmax(-1),
    "max pool": lambda m, y, x: F.max_pool2d(y.detach(), 2) * m.table,
    "average pool": lambda m, y, x: F.avg_pool2d(y, 3, 1, 1),
    "adaptive pool": lambda m, y, x: F.adaptive_avg_pool2d(y, 1).flatten(1),
    "average pool of volumes": lambda m, y, x: F.avg_pool3d(y[:, :, None], (1, 2, 2)),
    "concatenation": lambda m, y, x: torch.cat([y, y.tanh()], 1),
    "concatenation of two types": lambda m, y, x: torch.cat([y, x], 1),
    "sum": lambda m, y, x: y.sum((2, 3)),
    "mean": lambda m, y, x: y.mean(1),
    "product": lambda m, y, x: y.prod(3),
    "running sum": lambda m, y, x: y.cumsum(2),
    "norm": lambda m, y, x: y.norm(dim=1),
    "exponentials": lambda m, y, x: (y.exp() + 1).log() + (y.abs() + 1).sqrt(),
    "powers": lambda m, y, x: y.pow(2) + (y.sigmoid() + 1).rsqrt(),
    "gelu": lambda m, y, x: F.gelu(y) + F.softplus(y),
    "interpolation": lambda m, y, x: F.interpolate(y, scale_factor=2, mode="bilinear"),
    "where": lambda m, y, x: torch.where(y > 0, y, y * 2),
    "padding": lambda m, y, x: F.pad(y, (1, 1, 0, 2)),
    "float() of what is float32 already": lambda m, y, x: y.float().exp() * 2 + x.float().sum(1, keepdim=True),
    "float() used twice": lambda m, y, x: (lambda z: z.pow(2).mean(1, keepdim=True) * z)(y.float()),
    "softmax in float32": lambda m, y, x: y.softmax(1, dtype=F32) + y.sum(1, keepdim=True, dtype=F32),
    "two layers": lambda m, y, x: m.fc(m.batch_norm(m.second(y) + y).relu()),
    "squared error": lambda m, y, x: F.mse_loss(y, y.sin().detach(), reduction="none").mean((1, 2, 3)),
}  # fmt: skip


@pytest.mark.parametrize(("case", "dtype"), [*((case, BF16) for case in CASES), ("two layers", F16)])
def test_autocast_around_the_call(case: str, dtype: torch.dtype) -> None:
    """On one device bit by bit; on two, with layers cut anyhow, to what roundings to this type make."""
    models = both(CASES[case])
    check(models, models[0](models[2]), dtype, around=dtype, rounds=case != "of the input", seed=len(case) % 2)


def test_each_call_as_it_is_called() -> None:
    """With autocast and without, to one type and to another, in training and in evaluation."""
    model, plain, x = both(CASES["two layers"])
    made = layerwise.parallelize(model, x, options=layerwise.ParallelOptions(measure_s=0, verbose=False))
    for training in (True, False):
        for module in (made, plain):
            module.train(training)
        for dtype in (None, BF16, F16, None):
            with torch.autocast("cpu", dtype, enabled=dtype is not None), torch.no_grad():
                found, wanted = made(x), plain(x)
            assert found.dtype == wanted.dtype == (dtype or F32)
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
