"""Every strategy, one after the other: what the other searches are checked against."""

from __future__ import annotations

from math import prod

import numpy as np

from layerwise.cost.model import CostTables
from layerwise.search.solve.eliminate import Optimum

CHUNK = 1 << 14  # strategies that are priced together


def exhaustive(tables: CostTables) -> Optimum:
    """The cheapest of all strategies by equation 1."""
    sizes = tuple(len(cost) for cost in tables.node.values())
    count = prod(sizes)
    best, best_s = 0, float("inf")
    for start in range(0, count, CHUNK):
        digits = np.unravel_index(np.arange(start, min(start + CHUNK, count)), sizes)
        choices = dict(zip(tables.node, digits, strict=True))
        cost = np.zeros(len(digits[0]))
        for name, own in tables.node.items():
            cost += own[choices[name]]
        for (u, v, _), transfer in tables.transfer.items():
            cost += transfer[choices[u], choices[v]]
        if cost.min() < best_s:
            best, best_s = start + int(cost.argmin()), float(cost.min())
    choice = dict(zip(tables.node, map(int, np.unravel_index(best, sizes)), strict=True))
    return Optimum(choice, best_s, best_s, len(sizes), ())
