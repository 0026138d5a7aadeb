"""Exact pruning: configurations that no strategy at least as good as a known one can contain.

A strategy costs at least the sum of every layer's cheapest configuration; one that contains configuration c of layer l
costs at least that, with c's own cost in place of l's cheapest. Where this exceeds the cost of a strategy in hand, c
can go, and with it every table entry that it would have had: tables cost more than the search.
"""

from __future__ import annotations

import numpy as np

from layerwise.cost.model import CostTables
from layerwise.geometry.arrays import Mask

Keep = dict[str, Mask]
SLACK = 1 + 1e-9  # rounding: never drop an optimum that ties with the bound
PAYS = 0.9  # another pass over the tables, if the last one left at most this share of the configurations


def by_edge_cost(tables: CostTables, upper_s: float) -> Keep:
    """Which configurations (C_l,) may be part of a strategy of at most `upper_s`.

    A layer's transfers are those to the cheapest partner on its own edges, and elsewhere those of the cheapest pair.
    Repeated over what is left while it pays, as each configuration that goes may raise the others' bounds.
    """
    keep: Keep = {name: np.ones(len(cost), bool) for name, cost in tables.node.items()}
    own, pairs = dict(tables.node), dict(tables.transfer)  # of the configurations that are left
    count = sum(map(len, own.values()))
    while True:
        extra = {name: cost - cost.min() for name, cost in own.items()}  # beyond the cheapest, transfers included
        floor = sum(float(cost.min()) for cost in own.values())
        for (u, v, _), cost in pairs.items():
            to, back = cost.min(1), cost.min(0)
            least = to.min()
            floor += float(least)
            extra[u] += to - least
            extra[v] += back - least
        left = {name: floor + cost <= upper_s * SLACK for name, cost in extra.items()}
        for name, these in left.items():
            keep[name][keep[name]] = these
        before, count = count, sum(int(these.sum()) for these in left.values())
        if count > before * PAYS:
            return keep
        own = {name: cost[left[name]] for name, cost in own.items()}
        pairs = {e: cost[left[e[0]]][:, left[e[1]]] for e, cost in pairs.items()}


def restrict(tables: CostTables, keep: Keep) -> CostTables:
    """The tables over the configurations that are kept."""
    return CostTables(
        {name: tuple(c for c, k in zip(cs, keep[name], strict=True) if k) for name, cs in tables.configs.items()},
        {name: cost[keep[name]] for name, cost in tables.node.items()},
        {e: cost[keep[e[0]]][:, keep[e[1]]] for e, cost in tables.transfer.items()},
    )
