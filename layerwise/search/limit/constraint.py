"""For other solvers: what a search under a memory limit chose from, and rows of bytes that make its answer the best."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from layerwise.cost.memory.bounds import MemoryBounds, MemoryTables
from layerwise.cost.model import CostTables, Progress
from layerwise.geometry.arrays import Floats, Ints
from layerwise.search.limit.additive import Choice, Costs, Problem
from layerwise.search.limit.limited import fastest_within
from layerwise.search.limit.variants import Variants
from layerwise.search.limit.within import LimitedSearch, Within

CUTS = 20_000  # variants times rows that are exported beside those that have a price


def constrained(
    search: LimitedSearch, within: Within, progress: Progress | None = None
) -> tuple[CostTables, list[Costs]]:
    """All that a search under a limit chose from, and rows of bytes under which its answer is the fastest.

    They are those that have a price, and more as far as CUTS allow, for what is faster by these and does not fit:
    rows near its memory; where these are below it (of buckets of several layers), a row that leaves out it alone.
    Each such row takes a search of its own. progress: of these searches, of which it may take fewer.
    """
    space = Variants.of(search.cells, search.forms)
    bounds, tables = MemoryBounds(search.model, space.configs), search.model.tables(space.configs)
    rows = [_whole(bounds.tables(price.instant, price.device)) for price in within.prices]
    base = {name: np.arange(len(configs)) for name, configs in space.configs.items()}
    answer = [space.choice(strategy) for strategy in within.strategies]

    def taken(choice: Choice) -> Floats:
        return np.array([row.of(choice, base) for row in rows])

    searches = max(8, CUTS // sum(map(len, base.values())))
    for done in range(searches):
        if progress:
            progress(done, searches)
        time = Costs(tables.node, tables.transfer)
        problem = Problem(time, base, rows.__getitem__, taken, lambda choice: float(taken(choice).max()))
        found = fastest_within(problem, within.limit_bytes, memory_bytes=search.memory_bytes, known=answer)
        if found.choice is None or search.peak(space.strategy(found.choice)) <= within.limit_bytes:
            break
        near = bounds.near(found.choice)
        at = near.at(found.choice)
        instant, device = np.unravel_index(at.argmax(), at.shape)
        rows.append(_whole(near.tables(near.instants[int(instant)], int(device))))
        if rows[-1].of(found.choice, base) <= within.limit_bytes:
            rows[-1] = _all_but(found.choice, base, within.limit_bytes)
    return tables, rows


def _whole(tables: MemoryTables) -> Costs:
    """In whole bytes, as they are exported."""
    node = {name: np.floor(sizes) for name, sizes in tables.node.items()}
    return Costs(node, {edge: np.floor(sizes) for edge, sizes in tables.edge.items()})


def _all_but(choice: Choice, base: Mapping[str, Ints], limit: float) -> Costs:
    """What is above the limit for this choice, and at most the limit for all others."""
    chosen = {name: np.arange(len(variants)) == choice[name] for name, variants in base.items()}
    several = sum(len(variants) > 1 for variants in base.values())
    share = float(limit // max(1, several - 1))
    return Costs({name: share * these * (len(these) > 1) for name, these in chosen.items()}, {})
