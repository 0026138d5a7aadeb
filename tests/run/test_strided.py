"""Strides that skip positions: shortcuts of ResNets, pooling with windows of one, slices with a step."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.plan import Plan
from tests.comm.thread import run_threads
from tests.run.plans import Case, Trained, case, check_equal, priced, random_plan, recomputed, train


class Block(nn.Module):
    """ResNet's, whose input two convolutions of stride 2 read. bottleneck: of ResNet-50, else of ResNet-18."""

    def __init__(self, channels: int, out: int, *, bottleneck: bool) -> None:
        super().__init__()
        if bottleneck:
            self.way = nn.Sequential(
                nn.Conv2d(channels, 4, 1, bias=False),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Conv2d(4, 4, 3, 2, 1, bias=False),
                nn.BatchNorm2d(4),
                nn.ReLU(),
                nn.Conv2d(4, out, 1, bias=False),
                nn.BatchNorm2d(out),
            )
        else:
            self.way = nn.Sequential(nn.Conv2d(channels, out, 3, 2, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, 2, bias=False), nn.BatchNorm2d(out))

    def forward(self, x: Tensor) -> Tensor:
        return functional.relu(self.way(x) + self.shortcut(x))


class Strided(nn.Module):
    """Everything that skips positions, of sizes that no stride divides."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.first, self.second = Block(8, 6, bottleneck=False), Block(6, 8, bottleneck=True)
        self.thirds = nn.Conv2d(4, 4, (1, 3), (3, 2), groups=2)
        self.last = nn.Linear(8 * 3 * 3 + 4 * 5 * 6 + 4 * 5 * 5, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.relu(self.stem(x))
        every = torch.cat([x[:, :, 1::2, ::2], functional.max_pool2d(x, 1, 2)[:, :, :6]], 1)
        y = self.second(self.first(functional.pad(every, (2, 1, 3, 2))))
        pooled = functional.avg_pool2d(x, 1, (3, 2))
        wide = self.thirds(x)
        return self.last(torch.cat([y.flatten(1), pooled.flatten(1), wide.flatten(1)], 1))


@cache
def strided() -> tuple[Case, Trained]:
    torch.manual_seed(0)
    given = case(Strided(), (3, 13, 11), 4)
    return given, train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())


@pytest.mark.parametrize("seed", range(6))
def test_random_plans_equal_one_device(seed: int) -> None:
    given, single = strided()
    ranks, free = 2 + seed % 3, seed % 2 == 0
    plan = random_plan(given.graph, ranks, seed, "free" if free else "sample")
    assert seed % 2 == 0 or any(config.uneven for config in plan.strategy.values()), "boxes in proportion to weights"
    if seed % 4 == 3:
        plan = recomputed(plan, given.graph, seed)
    check_equal(run_threads(ranks, lambda comm: train(given, plan, comm), collectives=seed % 4 > 1), single, plan)


SPATIAL = ({"h": 4}, {"w": 4}, {"h": 2, "w": 2}, {"h": 3}, {"c": 2, "h": 2}, {"n": 2, "w": 2}, {"n": 4}, {"c": 4})


@pytest.mark.parametrize("seed", range(4))
def test_space_is_split_anew_before_every_layer(seed: int) -> None:
    """Nearly everything travels."""
    given, single = strided()
    turn = iter(range(seed, 1000))

    def choose(configs: list[Config]) -> Config:
        wanted = [Config.of(degrees) for degrees in SPATIAL]
        legal = [config for config in wanted if config in configs]
        return legal[next(turn) * 3 % len(legal)] if legal else configs[0]

    plan = random_plan(given.graph, 4, seed, "free", choose)
    check_equal(run_threads(4, lambda comm: train(given, plan, comm), collectives=seed % 2 == 1), single, plan)


def test_every_second_of_a_line_is_gathered() -> None:
    """Of an even extent: then all that is picked out lies equally far apart in memory."""
    torch.manual_seed(0)
    body = nn.Sequential(nn.Conv1d(3, 4, 3, padding=1), nn.Conv1d(4, 4, 1, 2), nn.Flatten(), nn.Linear(28, 5))
    given = case(body, (3, 14), 4)
    single = train(given, random_plan(given.graph, 1, 0, "sample"), SoloComm())
    strategy = {layer.name: Config() for layer in given.graph.inner} | {i: Config.of({"c": 2}) for i in "01"}
    plan = priced(Plan("test", given.graph.digest, 4, 2, 2, "free", True, strategy), given.graph)
    check_equal(run_threads(2, lambda comm: train(given, plan, comm), collectives=True), single, plan)
