"""Problems, which ask for the fastest choice that fits into memory, and two ways to minimise additive costs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np

from layerwise.cost.additive import Choice, Costs, Moved
from layerwise.cost.model import CostTables
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.search.solve.eliminate import eliminate
from layerwise.search.solve.narrow import SLACK, SWEEPS, Messages

Minimise = Callable[[Costs, Mapping[str, Ints]], tuple[Choice, float]]  # finds a good choice, and a lower bound of all


@dataclass(frozen=True, slots=True)
class Problem:
    """The tables of a problem.

    A *row* is an additive lower bound of the bytes that are alive at one instant, so no choice's peak is below it.
    """

    time: Costs  # seconds
    base: Mapping[str, Ints]  # (V_l,) the index of each variant's base
    row: Callable[[int], Costs]  # the table of a row, in bytes
    rows: Callable[[Choice], Floats]  # (R,) the bytes of a choice in every row
    changes: Callable[[Choice, Moved], Floats]  # (n, R) the bytes that each of n moves adds to every row
    simulate: Callable[[Choice], float]  # the peak of a choice, in bytes, which must fit
    _peaks: dict[tuple[int, ...], float] = field(default_factory=dict)  # a cache

    def cost(self, choice: Choice) -> float:
        """Seconds of one choice."""
        return self.time.of(choice, self.base)

    def peak(self, choice: Choice) -> float:
        """The simulated peak of one choice."""
        key = tuple(choice[name] for name in self.base)
        if key not in self._peaks:
            self._peaks[key] = self.simulate(choice)
        return self._peaks[key]


def least_by_base(node: Floats, base: Ints) -> tuple[Floats, Ints]:
    """(B,) the cost and the index of the cheapest variant of every base."""
    order = np.lexsort((node, base))
    first = order[np.r_[True, np.diff(base[order]) > 0]]
    return node[first], first


def by_elimination(memory_bytes: float) -> Minimise:
    """Elimination: it finds the cheapest choice, with its cost as the bound, if tables of `memory_bytes` suffice."""

    def minimise(costs: Costs, base: Mapping[str, Ints]) -> tuple[Choice, float]:
        least = {name: least_by_base(node, base[name]) for name, node in costs.node.items()}
        found = eliminate(
            CostTables({}, {name: cost for name, (cost, _) in least.items()}, dict(costs.edge)), memory_bytes
        )
        return {name: int(least[name][1][i]) for name, i in found.choice.items()}, found.lower_bound_s

    return minimise


def by_messages(costs: Costs, base: Mapping[str, Ints]) -> tuple[Choice, float]:
    """A good choice and a bound from one sweep of message passing: on large tables far quicker than elimination."""
    least = {name: least_by_base(node, base[name]) for name, node in costs.node.items()}
    bounds = Messages(costs.edge, list(least)).bounds({name: cost for name, (cost, _) in least.items()}, SWEEPS)
    choice = {name: int(least[name][1][i]) for name, i in bounds.choice.items()}
    return choice, max(float(lower.min()) for lower in bounds.lower_s.values())


def lower_bounds(costs: Costs, base: Mapping[str, Ints]) -> dict[str, Floats]:
    """(V_l,) for each variant, a lower bound of the cost of all choices that have it, by message passing."""
    own = {name: least_by_base(node, base[name])[0] for name, node in costs.node.items()}
    lower = Messages(costs.edge, list(own)).bounds(own, SWEEPS).lower_s
    return {name: (lower[name] - own[name])[base[name]] + node for name, node in costs.node.items()}


def possible(base: Mapping[str, Ints], rows: Iterable[Costs], most: float) -> dict[str, Mask]:
    """(V_l,) True for variants that may be part of a choice of which no row is more than `most`."""
    keep = {name: np.ones(len(these), bool) for name, these in base.items()}
    for row in rows:
        for name, lower in lower_bounds(row, base).items():
            keep[name] &= lower <= most * SLACK
    return keep
