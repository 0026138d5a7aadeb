"""The strategies that everybody uses, and the paper's depth-first search, under the same cost model."""

from __future__ import annotations

import time
from dataclasses import dataclass

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostTables
from layerwise.graph.layer import Layer
from layerwise.ops.nn.linear import Linear
from layerwise.ops.tensor.along import Softmax
from layerwise.partition.place import data_parallel
from layerwise.partition.sharding import why_not_held
from layerwise.search.classes import of_all_classes
from layerwise.search.grids import grid_strategy, parse_grid

NAMES = ("data", "model", "owt")


def baseline(model: CostModel, name: str) -> dict[str, Config]:
    """`data`: samples over all devices. `model`: channels of every layer over the largest divisor of N that fits, as
    Krizhevsky (2014). `owt`: his one weird trick, model parallelism for fully-connected layers only.
    """
    assert name in NAMES
    strategy, whole = {}, of_all_classes(model)
    for layer in model.graph.inner:
        by_channel = name == "model" or (name == "owt" and isinstance(layer.main, Linear))
        by_channel = by_channel and layer.name not in whole
        strategy[layer.name] = (_channels if by_channel else data_parallel)(layer, model.devices.count)
    return strategy


def named_strategy(model: CostModel, name: str) -> dict[str, Config] | None:
    """The strategy of a name: a baseline's, or `grid:RxC` of an MLP. None where the name is none of these."""
    if name.startswith("grid:"):
        return grid_strategy(model, parse_grid(name.removeprefix("grid:")))
    return baseline(model, name) if name in NAMES else None


def _channels(layer: Layer, devices: int) -> Config:
    if isinstance(layer.main, Softmax):  # has no channels to split: where its input is, serial
        return Config()
    degrees = [d for d in range(1, devices + 1) if devices % d == 0 and d <= layer.space.max_degree("c")]
    configs = (Config.of({"c": degree}) for degree in reversed(degrees))
    return next(config for config in configs if why_not_held(layer, config) is None)


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """What a depth-first search came to in its time."""

    cost_s: float  # of the best strategy
    strategies: int
    seconds: float
    finished: bool  # no strategy is left, so `cost_s` is the optimum's


def depth_first(tables: CostTables, limit_s: float) -> DepthFirst:
    """The paper's baseline (table 3): enumerates strategies layer by layer, giving up a branch that costs more than the
    best strategy so far.
    """
    names = list(tables.node)
    place = {name: i for i, name in enumerate(names)}
    inward: list[list[tuple[int, list[list[float]]]]] = [[] for _ in names]
    for (u, v, _), cost in tables.transfer.items():
        inward[place[v]].append((place[u], cost.tolist()))
    node = [tables.node[name].tolist() for name in names]
    choice, partial = [-1] * len(names), [0.0] * (len(names) + 1)
    best, seen, depth, started = float("inf"), 0, 0, time.perf_counter()
    steps = 0
    while depth >= 0:
        steps += 1
        if steps % 4096 == 0 and time.perf_counter() - started > limit_s:
            return DepthFirst(best, seen, time.perf_counter() - started, False)
        choice[depth] += 1
        c = choice[depth]
        if c == len(node[depth]):
            choice[depth] = -1
            depth -= 1
            continue
        cost = partial[depth] + node[depth][c] + sum(table[choice[u]][c] for u, table in inward[depth])
        if cost >= best:
            continue
        if depth == len(names) - 1:
            best, seen = cost, seen + 1
        else:
            partial[depth + 1] = cost
            depth += 1
    return DepthFirst(best, seen, time.perf_counter() - started, True)
