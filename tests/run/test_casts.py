"""Casts inside a model are what they are in PyTorch: values, types, gradients, of one device and of two."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import layerwise
from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.run.base import PREDICTED
from layerwise.run.load import load
from tests.comm.thread import run_threads
from tests.run.plans import random_plan

Last = Callable[["Model", Tensor], Tensor]


class Model(nn.Module):
    """Two linear layers, and what `last` makes of their result."""

    table: Tensor

    def __init__(self, dtype: torch.dtype, last: Last, table: torch.dtype) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 8, dtype=dtype), nn.Linear(8, 8, dtype=dtype), last
        self.register_buffer("table", torch.linspace(0.1, 0.9, 8, dtype=table))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self, self.second(self.first(x).relu()))


BF16, F32, F64 = torch.bfloat16, torch.float32, torch.float64
CASES: dict[str, tuple[torch.dtype, torch.dtype, Last]] = {
    "float() of bfloat16": (BF16, BF16, lambda m, y: y.float().sum(-1)),
    "back to bfloat16": (BF16, BF16, lambda m, y: m.second((y.float() * 1.001).sin().to(y.dtype))),
    "half and back": (F32, F32, lambda m, y: y.half().float() * 3),
    "to bfloat16 and back": (F64, F64, lambda m, y: m.second(y.to(BF16).double())),
    "double() inside": (F32, F32, lambda m, y: (y.double() * 1e-9 + 1).log().sum(-1)),
    "double() twice used": (F32, F32, lambda m, y: (lambda z: z.exp() + z.sin())(y.double())),
    "softmax in float32": (BF16, BF16, lambda m, y: y.softmax(-1, dtype=F32)),
    "softmax in float32 of float64": (F64, F64, lambda m, y: y.softmax(-1, dtype=F32).double()),
    "sum in float64": (F32, F32, lambda m, y: y.sum(-1, dtype=F64)),
    "mean in float32": (BF16, BF16, lambda m, y: y.mean(-1, dtype=F32)),
    "running sum in float32": (BF16, BF16, lambda m, y: y.cumsum(-1, dtype=F32)),
    "a float32 table": (F64, F32, lambda m, y: y * m.table.sin().double() + m.table),
    "a table that is computed with in float32": (F64, F32, lambda m, y: y * (m.table * 3).sin()),
    "a float64 table": (F32, F64, lambda m, y: y + m.table),
    "a float64 table, cast": (F32, F64, lambda m, y: y * (m.table / 3).float()),
    "a bfloat16 table": (F32, BF16, lambda m, y: torch.where(y > m.table, y, m.table)),
    "whole numbers": (F64, F64, lambda m, y: (y * 7).long() * y + (y * 7).int().abs().float().sqrt()),
    "whole numbers by a fraction": (F64, F64, lambda m, y: (y * 7).long() * 0.3),
    "a sum of 32 bits": (F32, F32, lambda m, y: (y * 0 + 2**30).int().sum(-1)),
    "a mask": (F64, F64, lambda m, y: y * (y > 0).to(y.dtype) + y.bool().float()),
    "a mask of 16 bits": (BF16, BF16, lambda m, y: ((y > 0).to(y.dtype) * 0.3).float() + y),
    "joined": (F32, F32, lambda m, y: torch.cat([y, y.double() / 3], -1)),
    "in place": (F32, F64, lambda m, y: y.mul_(m.table)),
    "a loss": (BF16, BF16, lambda m, y: nn.functional.mse_loss(y.float(), y.float().sin(), reduction="none").mean(-1)),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_casts_are_kept(case: str) -> None:
    """Bit by bit on one device; on two, with layers cut anyhow, to what another order of sums allows."""
    dtype, table, last = CASES[case]
    torch.manual_seed(0)
    model, x = Model(dtype, last, table), torch.randn(4, 6).to(dtype)
    plain = copy.deepcopy(model)
    wanted = plain(x)
    made = layerwise.parallelize(model, x, options=layerwise.ParallelOptions(measure_s=0, verbose=False))
    found = made(x)
    assert found.dtype == wanted.dtype
    torch.testing.assert_close(found, wanted, rtol=0, atol=0)
    if wanted.is_floating_point() and wanted.requires_grad:
        wanted.square().sum().backward()
        found.square().sum().backward()
        mine = dict(made.named_parameters())
        for name, there in plain.named_parameters():
            here = mine[name]
            assert (here.grad is None) == (there.grad is None), name
            if here.grad is not None and there.grad is not None:
                assert here.grad.dtype == there.grad.dtype
                torch.testing.assert_close(here.grad, there.grad, rtol=1e-6 if dtype != BF16 else 0.02, atol=1e-6)
    network = network_of(plain, (x,), 4, "test")
    plan = random_plan(fuse(network.graph), 2, len(case) % 2, "sample")

    def run(comm: Comm) -> tuple[Tensor, dict[str, int]]:
        made = load(plan, network, comm=comm, dtype=dtype)
        share, before = made.share(), dict(comm.sent)
        found = made(x[share])
        assert found.dtype == wanted.dtype
        near = 0.05 if dtype == BF16 else 1e-6
        torch.testing.assert_close(found, wanted[share], rtol=near, atol=near)
        if found.is_floating_point() and found.requires_grad:
            found.square().mean().backward()
        return found, {kind: comm.sent[kind] - before.get(kind, 0) for kind in PREDICTED}

    ranks = run_threads(2, run)
    if wanted.requires_grad:
        for kind, name in PREDICTED.items():
            assert sum(sent[kind] for _, sent in ranks) == round(plan.predicted[name]), kind


def test_a_model_of_two_types_is_not_run_in_a_third() -> None:
    model, x = Model(F64, CASES["to bfloat16 and back"][2], F64), torch.randn(4, 6).double()
    network = network_of(model, (x,), 4, "test")
    with pytest.raises(LayerwiseError, match=r"computes in bfloat16 but the model in float64.*dtype=torch.float64"):
        load(random_plan(fuse(network.graph), 1, 0, "sample"), network, dtype=F32)
