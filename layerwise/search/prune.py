"""Exact pruning: configurations that no strategy at least as good as a known one can contain.

A strategy costs at least the sum of every layer's cheapest configuration; one that contains configuration c of layer l
costs at least that, with c's own cost in place of l's cheapest. Where this exceeds the cost of a strategy in hand, c
can go, and with it every table entry that it would have had: tables cost more than the search.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from layerwise.cost.tables import CostTables, Edge

Floats = NDArray[np.float64]
Keep = dict[str, NDArray[np.bool_]]
SLACK = 1 + 1e-9  # rounding: never drop an optimum that ties with the bound


def by_node_cost(node: Mapping[str, Floats], upper_s: float) -> Keep:
    """Which configurations (C_l,) may be part of a strategy of at most `upper_s`, transfers counted as nothing."""
    floor = sum(float(cost.min()) for cost in node.values())
    return {name: floor - cost.min() + cost <= upper_s * SLACK for name, cost in node.items()}


def by_edge_cost(tables: CostTables, node: Mapping[str, Floats], upper_s: float) -> Keep:
    """The same with each layer's transfers: to the cheapest partner on its own edges, the cheapest pair elsewhere."""
    keep: Keep = {name: np.ones(len(cost), bool) for name, cost in node.items()}
    around: dict[str, list[tuple[Edge, int]]] = {name: [] for name in node}
    for edge in tables.transfer:
        around[edge[0]].append((edge, 0))
        around[edge[1]].append((edge, 1))
    changed = True
    while changed:
        changed = False
        cheapest = {name: float(cost[keep[name]].min()) for name, cost in node.items()}
        pair = {e: float(t[np.ix_(keep[e[0]], keep[e[1]])].min()) for e, t in tables.transfer.items()}
        floor = sum(cheapest.values()) + sum(pair.values())
        for name, cost in node.items():
            bound = floor - cheapest[name] + cost
            for edge, end in around[name]:
                table = tables.transfer[edge]
                partner = table[:, keep[edge[1]]].min(1) if end == 0 else table[keep[edge[0]]].min(0)
                bound = bound - pair[edge] + partner
            now = keep[name] & (bound <= upper_s * SLACK)
            if now.sum() < keep[name].sum():
                keep[name], changed = now, True
    return keep


def restrict(tables: CostTables, keep: Keep) -> CostTables:
    """The tables over the configurations that are kept."""
    return CostTables(
        {name: tuple(c for c, k in zip(cs, keep[name], strict=True) if k) for name, cs in tables.configs.items()},
        {name: cost[keep[name]] for name, cost in tables.node.items()},
        {e: cost[np.ix_(keep[e[0]], keep[e[1]])] for e, cost in tables.transfer.items()},
    )
