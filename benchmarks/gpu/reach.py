"""Reach: what users call beside a training step, on one rank and on two that share the GPU, beside one device."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

import layerwise
from benchmarks.gpu.rows import Found, Row, Setting
from layerwise import checkpoint
from layerwise.comm.base import Comm
from tests.comm.pool import run_ranks

STEPS = 3
SPLIT = {"0": {"h": 2}, "3": {"k": 2}}
Apart = float  # the largest difference from one device, as a share of its largest number


def rows(setting: Setting) -> list[Row]:
    """A row a call and a number of ranks."""
    return [
        Row(f"{what.__name__}, {ranks} ranks", partial(taken, setting, what.__name__, ranks))
        for what in (inference, scaled, resumed)
        for ranks in (1, 2)
    ]


def taken(setting: Setting, what: str, ranks: int) -> Found:
    """On ranks of a pool."""
    with TemporaryDirectory() as folder:
        apart = run_ranks(ranks, "benchmarks.gpu.reach:on_rank", what, folder, device=setting.device)
    worst = max(float(one) for one in apart if isinstance(one, float))
    assert worst <= (5e-2 if what == "scaled" else 1e-9), f"{worst:.1e} apart"
    return {"apart": apart, "told": f"{worst:.1e} apart"}


def on_rank(comm: Comm, what: str, folder: str) -> Apart:
    """By name, as pools pickle their calls."""
    calls: dict[str, Callable[[Comm, str], Apart]] = {"inference": inference, "scaled": scaled, "resumed": resumed}
    return calls[what](comm, folder)


def network(device: torch.device, kind: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    """A small network with batch norms, samples and classes."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3, padding=1))
    return body.to(device, kind), torch.randn(4, 3, 16, 16).to(device, kind), torch.randint(4, (4, 16, 16)).to(device)


def made(comm: Comm, model: nn.Module, x: Tensor, **how: object) -> nn.Module:
    """Parallel, along height and output channels where there are two."""
    strategy = SPLIT if comm.size > 1 else None
    options = layerwise.ParallelOptions(measure_s=0, verbose=False)
    parallel: nn.Module = layerwise.parallelize(
        copy.deepcopy(model), x, batch=len(x), strategy=strategy, options=options, **how
    )
    return parallel


def apart(mine: Tensor, theirs: Tensor) -> Apart:
    """How far."""
    return float((mine - theirs).abs().max() / theirs.abs().max())


def inference(comm: Comm, folder: str) -> Apart:
    """An answer."""
    model, x, _ = network(comm.device)
    model.eval()
    parallel = made(comm, model, x, inference=True)
    with torch.inference_mode():
        return apart(parallel(x), model(x))


def trained(model: nn.Module, x: Tensor, y: Tensor, half: bool, optimizer: torch.optim.Optimizer) -> None:
    """Some steps; in 16 bits with a scaler."""
    scaler = torch.amp.GradScaler(x.device.type, enabled=half)
    for _ in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast(x.device.type, torch.float16, enabled=half):
            loss = nn.functional.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()


def weights(model: nn.Module) -> Tensor:
    """All of them, whole, but for counters."""
    state = model.full_state_dict() if hasattr(model, "full_state_dict") else model.state_dict()
    return torch.cat([value.double().flatten().cpu() for name, value in state.items() if "tracked" not in name])


def scaled(comm: Comm, folder: str) -> Apart:
    """What some steps in 16 bits with a scaler change otherwise, as a share of what they change."""
    model, x, y = network(comm.device, torch.float32)
    parallel, before = made(comm, model, x, autocast=torch.float16), weights(model)
    share = parallel.share()
    trained(parallel, x[share], y[share], True, torch.optim.SGD(parallel.parameters(), 0.1))
    trained(model, x, y, True, torch.optim.SGD(model.parameters(), 0.1))
    found, theirs = weights(parallel), weights(model)
    return float((found - theirs).norm() / (theirs - before).norm()) if comm.rank == 0 else 0.0


def resumed(comm: Comm, folder: str) -> Apart:
    """Weights after some steps, a checkpoint that another model goes on from, and some more."""
    model, x, y = network(comm.device)
    parallel, again = made(comm, model, x), made(comm, model, x)
    share = parallel.share()
    first, second = (torch.optim.Adam(one.parameters(), 0.01) for one in (parallel, again))
    trained(parallel, x[share], y[share], False, first)
    checkpoint.save(folder, parallel, first, {})
    assert checkpoint.resume(folder, again, second, {})
    trained(again, x[share], y[share], False, second)
    optimizer = torch.optim.Adam(model.parameters(), 0.01)
    for _ in range(2):
        trained(model, x, y, False, optimizer)
    found = weights(again)
    return apart(found, weights(model)) if comm.rank == 0 else 0.0
