"""Layers on fewer ranks than there are: the others have nothing of their parameters, gradients and statistics."""

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from functools import cache

import pytest
import torch
from torch import nn

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.plan import Plan, parse_strategy
from layerwise.run.load import load
from layerwise.run.local_tensor import local_tensor
from layerwise.run.parallel import ParallelModule
from layerwise.run.state.state import Shard
from tests.comm.thread import run_threads
from tests.run.plans import Case, case, difference

RANKS = 4
Cuts = list[Mapping[str, object]]  # of two convolutions with batch norm, and of the head


@cache
def given() -> Case:
    torch.manual_seed(0)
    conv = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    more = [
        nn.Conv2d(4, 8, 3, padding=1, bias=False),
        nn.BatchNorm2d(8, momentum=0.3),
        nn.ReLU(),
        nn.AvgPool2d(8),
        nn.Flatten(),
    ]
    return case(nn.Sequential(*conv, *more, nn.Linear(8, 4)), (3, 8, 8), 4, steps=3)


def planned(made: Case, cuts: Cuts) -> Plan:
    graph = fuse(made.graph)
    inner = [layer for layer in graph.inner if layer.own_parameters()]
    strategy: dict[str, object] = {layer.name: {} for layer in graph.inner}
    strategy |= {layer.name: cut for layer, cut in zip(inner, cuts, strict=True)}
    return Plan("test", graph.digest, graph.batch, RANKS, RANKS, "sample", True, parse_strategy(strategy, graph, RANKS))


@pytest.mark.parametrize(
    ("cuts", "unsummed"),
    [
        ([{}, {"n": 2}, {"k": 2}], True),
        ([{"c": 2, "placement": "strided"}, {}, {"n": 2, "placement": "strided"}], False),
        ([{"h": 2}, {"n": 2, "c": 2}, {}], True),
    ],
)
def test_a_rank_without_a_part_of_a_layer_has_nothing_of_it(cuts: Cuts, unsummed: bool) -> None:
    """After three steps the others' are one device's; also where the first two leave gradients unsummed (no_sync)."""
    made = given()
    plan = planned(made, cuts)

    def train(comm: Comm, plan: Plan) -> ParallelModule:
        module = load(plan, made.network, comm=comm, dtype=torch.float64)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1)
        for step, (x, y) in enumerate(zip(made.inputs, made.targets, strict=True)):
            share, summed = module.share(), not unsummed or step == 2
            with nullcontext() if summed else module.no_sync():
                nn.functional.cross_entropy(module(x[share]), y[share]).backward()
            if summed:
                optimizer.step()
                optimizer.zero_grad()
        return module

    alone = replace(plan, gpus=1, gpus_per_node=1, device_order=(0,), strategy=dict.fromkeys(plan.strategy, Config()))
    wanted = train(SoloComm(torch.device("cpu")), alone).full_state_dict()

    def held(comm: Comm) -> tuple[list[Shard], dict[str, int]]:
        module = train(comm, plan)
        return module.shards(), {name: local_tensor(p).numel() for name, p in module.named_parameters()}

    found = run_threads(RANKS, held)
    assert {shard.name for shards, _ in found for shard in shards} == set(wanted)
    for shards, sizes in found:
        own = {shard.name: shard for shard in shards}
        assert all(size == (own[name].box.volume if name in own else 0) for name, size in sizes.items())
        for shard in shards:
            assert difference(local_tensor(shard.tensor), wanted[shard.name][shard.box.slices()]) < 1e-9, shard.name
    parts = [sum(shard.box.volume for shard in shards if shard.trainable) for shards, _ in found]
    assert min(parts) < max(parts)


class Picked(nn.Module):
    """Elements of a parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.arange(24.0).view(2, 3, 4))

    def forward(self, index: torch.Tensor) -> torch.Tensor:
        return self.table.gather(1, index)


def test_a_parameter_of_its_own_that_only_one_rank_reads() -> None:
    """It depends on no input, so the others have it, too, and take their part in the sum of its gradients."""
    index = torch.tensor([[[0, 1, 1, 0]], [[1, 1, 2, 0]]])
    network = network_of(Picked(), (index,), 2, "test", trusted=True)  # of two samples alone
    graph = fuse(network.graph)
    plan = Plan("test", graph.digest, 2, 2, 2, "free", True, dict.fromkeys((x.name for x in graph.inner), Config()))

    def gradient(comm: Comm) -> torch.Tensor:
        module = load(plan, network, comm=comm)
        module(index).sum().backward()
        grad = dict(module.named_parameters())["table"].grad
        assert grad is not None
        return local_tensor(grad)

    wanted = torch.zeros(2, 3, 4).scatter_(1, index, 1.0)
    for got in run_threads(2, gradient, timeout_s=10.0):
        assert torch.equal(got, wanted)


def test_cuts_that_dtensors_cannot_have_are_refused() -> None:
    graph = fuse(given().graph)
    head = [layer for layer in graph.inner if layer.own_parameters()][-1]
    with pytest.raises(LayerwiseError, match="differently from torch\\.chunk, which DTensors need"):
        parse_strategy({one.name: {"c": 3} if one is head else {} for one in graph.inner}, graph, 3)
