"""Depth-first searches, which elimination is measured against as the paper's table 3 does: exhaustive, or bounded."""

from __future__ import annotations

import time
from dataclasses import dataclass

from layerwise.cost.model import CostTables


@dataclass(frozen=True, slots=True)
class DepthFirst:
    """What a depth-first search came to in its time."""

    cost_s: float  # of the best strategy
    strategies: int
    seconds: float
    finished: bool  # no strategy is left, so `cost_s` is the optimum's


def depth_first(tables: CostTables, limit_s: float, *, bounded: bool) -> DepthFirst:
    """Enumerates strategies layer by layer.

    bounded: a branch and bound, which gives up a branch that costs more than the best strategy so far; else exhaustive.
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
        if bounded and cost >= best:
            continue
        if depth == len(names) - 1:
            best, seen = min(best, cost), seen + 1
        else:
            partial[depth + 1] = cost
            depth += 1
    return DepthFirst(best, seen, time.perf_counter() - started, True)
