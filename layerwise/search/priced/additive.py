"""Problems, which ask for the fastest choice that fits into memory, and two ways to minimise additive costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

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
    peak: Callable[[Choice], float]  # the simulated peak of a choice, in bytes, which must fit

    def cost(self, choice: Choice) -> float:
        """Seconds of one choice."""
        return self.time.of(choice, self.base)


def remembered(base: Mapping[str, Ints], value: Callable[[Choice], float]) -> Callable[[Choice], float]:
    """The function `value` of choices over the layers of `base`, which computes that of each choice once."""
    known: dict[tuple[int, ...], float] = {}

    def looked_up(choice: Choice) -> float:
        key = tuple(choice[name] for name in base)
        if key not in known:
            known[key] = value(choice)
        return known[key]

    return looked_up


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


Cap = tuple[Costs, float]  # an additive cost, and the most that it may be


def possible(base: Mapping[str, Ints], capped: Sequence[Cap]) -> dict[str, Mask]:
    """(V_l,) True for variants that may be part of a choice within all caps."""
    keep = {name: np.ones(len(these), bool) for name, these in base.items()}
    for costs, most in capped:
        for name, lower in lower_bounds(costs, base).items():
            keep[name] &= lower <= most * SLACK
    return keep
