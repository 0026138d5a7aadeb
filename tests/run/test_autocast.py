"""torch.autocast around the call gives what it gives one device: values, gradients, and the types of all tensors."""

import copy
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import layerwise
from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.autocasting import BF16, F16, F32, Made, Model, apart, both, check
from tests.run.plans import random_plan


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
    check(models, models[0](models[2]), dtype, around=dtype, rounds=case != "of the input")


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


def test_grad_scaler() -> None:
    """float16 with GradScaler on a data plan: steps that overflow are left out on all ranks alike."""
    model, plain, x = both(CASES["two layers"])

    def trained(module: nn.Module, x: Tensor) -> tuple[float, dict[str, Tensor]]:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**30)
        optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
        for _ in range(20):
            with torch.autocast("cpu", F16):
                loss = module(x).float().square().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        return scaler.get_scale(), {name: p.detach().clone() for name, p in module.named_parameters()}

    def run(comm: Comm) -> tuple[float, dict[str, Tensor]]:
        made = layerwise.parallelize(
            copy.deepcopy(model),
            x[:2],
            strategy="data",
            options=layerwise.ParallelOptions(measure_s=0, comm=comm, verbose=False),
        )
        return trained(made, x[made.share()])

    scale, wanted = trained(plain, x)
    assert scale < 2.0**30
    for found_scale, found in run_threads(2, run):
        assert found_scale == scale
        assert all(apart(found[name], wanted[name]) < 0.01 for name in found)


def test_autocast_that_a_model_turns_off_for_a_part() -> None:
    """Values and the types of gradients are PyTorch's, with autocast around and without."""

    def last(m: Model, y: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            y = torch.relu(m.second(y.float()))
        return y @ y.transpose(-1, -2)  # in 16 bits again

    model, plain, x = both(last)
    network = replace(network_of(model, (x,), 4, "test", trusted=True), module=None)
    layers = fuse(network.graph)
    made = load(random_plan(layers, 1, 0, "sample"), network)
    for dtype in (None, BF16, None):
        with torch.autocast("cpu", dtype or BF16, enabled=dtype is not None):
            wanted, found = plain(x), made(x)
        assert found.dtype == wanted.dtype == (torch.float32 if dtype is None else BF16)
        torch.testing.assert_close(found, wanted, rtol=0, atol=0)

    def run(comm: Comm) -> Tensor:
        split = load(random_plan(layers, 2, 3, "sample"), network, comm=comm)
        with torch.autocast("cpu", BF16):
            out: Tensor = split(x[split.share()])
        return out.detach()

    with torch.autocast("cpu", BF16):
        wanted = plain(x).detach()
    together = torch.cat(run_threads(2, run))
    assert together.dtype == BF16
    assert apart(together.float(), wanted.float()) < 0.02
