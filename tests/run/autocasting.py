"""A model whose last part is a case, and the law of its element types: on one device, and on two."""

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.base import PREDICTED
from layerwise.run.load import load
from layerwise.tensorfile import dtype_name
from tests.comm.thread import run_threads
from tests.run.plans import priced_mixed, random_plan

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
Made = Callable[["Model", Tensor, Tensor], Tensor]


class Model(nn.Module):
    """A convolution, whose result is of 16 bits, beside the input, which is of 32, and what `last` makes of the two."""

    def __init__(self, last: Made) -> None:
        super().__init__()
        self.last, self.first, self.second = last, nn.Conv2d(4, 8, 3, padding=1), nn.Conv2d(8, 8, 3, padding=1)
        self.beside, self.fc = nn.Conv2d(8, 4, 1), nn.Linear(6, 6)
        self.batch_norm, self.group_norm, self.layer_norm = nn.BatchNorm2d(8), nn.GroupNorm(2, 8), nn.LayerNorm(6)
        self.up = nn.ConvTranspose2d(8, 4, 2, 2)
        self.table = nn.Parameter(torch.randn(8, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self, self.first(x), x)


def both(last: Made) -> tuple[Model, Model, Tensor]:
    torch.manual_seed(0)
    model = Model(last)
    return model, copy.deepcopy(model), torch.randn(4, 4, 6, 6)


def apart(a: Tensor, b: Tensor) -> float:
    """The largest difference, of the largest element."""
    return float((a - b).abs().max() / b.abs().max().clamp(min=1e-9)) if b.numel() else 0.0


def autocast(dtype: torch.dtype | None) -> AbstractContextManager[object]:
    """Around a call; None: nothing."""
    return nullcontext() if dtype is None else torch.autocast("cpu", dtype)


def check(
    models: tuple[Model, Model, Tensor],
    exact: Tensor,
    dtype: torch.dtype,
    *,
    around: torch.dtype | None = None,
    rounds: bool = True,
    seed: int = 0,
) -> None:
    """Under autocast: on one device bit by bit; on two, with layers cut anyhow, to what roundings to `dtype` make.

    exact: what float32 gives, from which `rounds` says that the result differs by such roundings. around: the type of
    the autocast around the calls.
    """
    model, plain, x = models
    with autocast(around):
        wanted = plain(x)
    weights = torch.rand(wanted.shape)
    (wanted.float() * weights).mean().backward()
    network = replace(network_of(model, (x,), 4, "test", trusted=True), module=None)  # layer by layer on one rank, too
    made = load(random_plan(fuse(network.graph), 1, 0, "sample"), network)
    with autocast(around):
        found = made(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    (found.float() * weights).mean().backward()
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    for name, p in made.named_parameters():
        if p.grad is not None or name in gradients:
            assert p.grad is not None
            torch.testing.assert_close(p.grad, gradients[name], rtol=2e-2, atol=1e-5)
    eps, largest = torch.finfo(dtype).eps, max(float(g.abs().max()) for g in gradients.values())
    rounded = eps / 64 if rounds else 0.0
    assert rounded <= apart(wanted.float(), exact) < 8 * eps
    graph = fuse(network.graph)
    plan = priced_mixed(random_plan(graph, 2, seed, "sample"), graph, None if around is None else dtype_name(around))

    def run(comm: Comm) -> None:
        made = load(plan, network, comm=comm)
        share, before = made.share(), dict(comm.sent)
        with autocast(around):
            found = made(x[share])
            predicted = made.predicted_bytes()
        assert found.dtype == wanted.dtype
        assert apart(found.float(), wanted[share].float()) < 8 * eps
        assert rounded <= apart(found.float(), exact[share])
        (found.float() * weights[share]).mean().backward()
        held = {name: p.grad.clone() for name, p in made.named_parameters() if p.grad is not None}
        assert all(gradient.dtype == F32 for gradient in held.values())
        sent = {kind: comm.sent[kind] - before.get(kind, 0) for kind in PREDICTED}
        total = comm.all_gather_object(sent)
        assert {kind: sum(one[kind] for one in total) for kind in PREDICTED} == predicted
        boxes = {shard.name: shard.box for shard in made.shards()}
        for name, gradient in held.items():
            if name not in boxes:  # this rank has no part of it
                continue
            there = gradients[name][boxes[name].slices()]
            assert float((gradient - there).abs().max()) < 8 * eps * largest, name

    run_threads(2, run)
