"""Every strategy, one after the other: what the other searches are checked against."""

from __future__ import annotations

from math import prod

import numpy as np

from layerwise.cost.tables import CostTables
from layerwise.errors import LayerwiseError
from layerwise.search.eliminate import Optimum

MOST = 10**7  # strategies: a few seconds
CHUNK = 1 << 16  # strategies priced together


def exhaustive(tables: CostTables) -> Optimum:
    """The cheapest of all strategies by equation 1. LayerwiseError where there are more than ten million."""
    sizes = {name: len(cost) for name, cost in tables.node.items()}
    count = prod(sizes.values())
    if count > MOST:
        raise LayerwiseError(f"exhaustive search over {count:.2g} strategies; at most {MOST:.0e}: use `eliminate`")
    best, best_s = 0, float("inf")
    for start in range(0, count, CHUNK):
        at = dict(zip(sizes, np.unravel_index(np.arange(start, min(start + CHUNK, count)), tuple(sizes.values())), strict=True))
        cost = sum((node[at[name]] for name, node in tables.node.items()), np.zeros(1))
        for (u, v, _), transfer in tables.transfer.items():
            cost = cost + transfer[at[u], at[v]]
        if cost.min() < best_s:
            best, best_s = start + int(cost.argmin()), float(cost.min())
    choice = dict(zip(sizes, map(int, np.unravel_index(best, tuple(sizes.values()))), strict=True))
    return Optimum(choice, best_s, best_s, len(sizes), ())
