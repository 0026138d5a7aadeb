"""Checkpoints of real plans: any other plan goes on as one device would, and the original module takes the export."""

from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from layerwise import checkpoint
from layerwise.comm.base import Comm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from tests.comm.thread import run_threads
from tests.run.plans import Case, case, difference, random_plan, small

State = dict[str, Tensor]
STEPS = 4


class Odd(nn.Module):
    """Tied weights, dropout, batch norm; buffers that are kept, that are not, and that nothing uses."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Conv2d(3, 6, 3, padding=1)
        self.norm = nn.BatchNorm2d(6)
        self.drop = nn.Dropout(0.25)
        self.up = nn.Linear(8, 8, bias=False)
        self.down = nn.Linear(8, 8, bias=False)
        self.down.weight = self.up.weight
        self.register_buffer("kept", torch.rand(8))
        self.register_buffer("lost", torch.rand(8, 8), persistent=False)
        self.register_buffer("unused", torch.arange(5))

    def forward(self, x: Tensor) -> Tensor:
        x = self.drop(self.norm(self.head(x)))
        x = torch.relu(self.down(torch.relu(self.up(x)))) * self.kept
        return F.linear(x, self.lost)


@cache
def odd() -> tuple[Case, Odd]:
    torch.manual_seed(0)
    module = Odd()
    return case(module, (3, 8, 8), 4, STEPS), module


@cache
def given(name: str) -> Case:
    return odd()[0] if name == "odd" else small(name, STEPS)


def part(given: Case, plan: Plan, numbers: range, before: Callable[..., None], after: Callable[..., None]) -> State:
    """Takes these steps on all ranks of a plan; `before` and `after` are given the module and its optimizer."""

    def run(comm: Comm) -> State:
        module = load(plan, given.network, comm=comm, dtype=torch.float64)
        optimizer = torch.optim.Adam(module.parameters(), lr=1e-3)
        before(module, optimizer)
        for i in numbers:
            optimizer.zero_grad()
            share, x, y = module.share(), given.inputs[i], given.targets[i]
            F.cross_entropy(module(x[share]), y[share]).backward()
            optimizer.step()
        after(module, optimizer)
        return module.full_state_dict()

    return run_threads(plan.gpus, run)[0]


def nothing(module: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
    pass


def saved(given: Case, plan: Plan, numbers: range, folder: Path) -> State:
    """Takes these steps and saves."""
    last = {"done": numbers.stop}
    return part(given, plan, numbers, nothing, lambda *made: checkpoint.save(folder, *made, last))


def resumed(given: Case, plan: Plan, numbers: range, folder: Path) -> State:
    """Loads, and takes these steps."""

    def before(module: ParallelModule, optimizer: torch.optim.Optimizer) -> None:
        assert checkpoint.load(folder, module, optimizer) == {"done": numbers.start}
        assert module.steps_done == numbers.start

    return part(given, plan, numbers, before, nothing)


LARGER = [pytest.param(name, seed, marks=pytest.mark.slow) for name, seed in (("resnet18", 0), ("unet3d", 2))]


@pytest.mark.parametrize(("name", "seed"), [("odd", 0), ("odd", 1), ("lenet5", 1), *LARGER])
def test_goes_on_under_any_plan(tmp_path: Path, name: str, seed: int) -> None:
    """With the same plan bit for bit; with another one, on fewer or more ranks, as one device does."""
    found = given(name)
    io = "sample" if seed == 0 else "free"
    first, second = random_plan(found.graph, 3, seed, io), random_plan(found.graph, (2, 4)[seed % 2], seed + 50, io)
    straight = part(found, first, range(STEPS), nothing, nothing)
    single = part(found, random_plan(found.graph, 1, 0, "sample"), range(STEPS), nothing, nothing)
    half = saved(found, first, range(2), tmp_path)

    same = resumed(found, first, range(2, STEPS), tmp_path)
    assert all(torch.equal(same[key], value) for key, value in straight.items())
    other = resumed(found, second, range(2, STEPS), tmp_path)
    assert other.keys() == single.keys()
    for key, value in single.items():
        assert difference(other[key], value) <= 1e-9, key
    assert any(not torch.equal(half[key], value) for key, value in single.items())


def test_another_batch_takes_the_checkpoint(tmp_path: Path) -> None:
    found, module = odd()
    state = saved(found, random_plan(found.graph, 3, 1, "free"), range(2), tmp_path)
    network = network_of(module, (torch.randn(2, 3, 8, 8).double(),), 6, "test")
    larger = Case(network, fuse(network.graph), [], [])
    loaded = resumed(larger, random_plan(larger.graph, 2, 5, "sample"), range(2, 2), tmp_path)
    assert all(torch.equal(loaded[key], value) for key, value in state.items())
