"""Additive costs over the choices of layers, and problems of them: the fastest choice of which the memory fits.

A layer has V variants. Of these, some differ in what the layer costs by itself alone (as the states of its parameters
do); tables of edges are over its B *bases*, what its neighbours can see of a variant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.cost.model import CostTables, EdgeName
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.search.solve.eliminate import eliminate
from layerwise.search.solve.narrow import Messages

SWEEPS = 1  # of message passing: more tighten the bounds little

Choice = dict[str, int]  # of each layer, the index of its variant
Minimise = Callable[["Costs", Mapping[str, Ints]], tuple[Choice, float]]  # a good choice, and a lower bound of all


@dataclass(frozen=True, slots=True)
class Costs:
    """An additive cost of a choice: the sum of its entries. Seconds, or bytes at one instant on one device."""

    node: Mapping[str, Floats]  # (V_l,)
    edge: Mapping[EdgeName, Floats]  # (B_u, B_v); what is missing is 0

    def of(self, choice: Mapping[str, int], base: Mapping[str, Ints]) -> float:
        """The cost of one choice."""
        own = sum(float(cost[choice[name]]) for name, cost in self.node.items())
        return own + sum(float(cost[base[u][choice[u]], base[v][choice[v]]]) for (u, v, _), cost in self.edge.items())

    def spread(self) -> dict[str, float]:
        """The distance between the variants of each layer."""
        spread = {name: float(np.ptp(cost)) for name, cost in self.node.items()}
        for (u, v, _), cost in self.edge.items():
            spread[u] += float(np.ptp(cost, axis=0).mean())
            spread[v] += float(np.ptp(cost, axis=1).mean())
        return spread

    def restrict(self, keep: Mapping[str, Mask], base: Mapping[str, Ints]) -> Costs:
        """Over the variants that are kept (V_l,), and the bases that they have."""
        bases = {name: np.unique(base[name][mask]) for name, mask in keep.items()}
        node = {name: cost[keep[name]] for name, cost in self.node.items()}
        return Costs(node, {e: cost[np.ix_(bases[e[0]], bases[e[1]])] for e, cost in self.edge.items()})


def weighted_sum(weights: Sequence[float], costs: Sequence[Costs]) -> Costs:
    """The sum of costs over the same layers, each times its weight."""
    node: dict[str, Floats] = {name: np.zeros(len(cost)) for name, cost in costs[0].node.items()}
    edge: dict[EdgeName, Floats] = {}
    for weight, cost in zip(weights, costs, strict=True):
        if weight:
            for name, own in cost.node.items():
                node[name] = node[name] + weight * own
            for pair, table in cost.edge.items():
                edge[pair] = edge[pair] + weight * table if pair in edge else weight * table
    return Costs(node, edge)


@dataclass(frozen=True, slots=True)
class Capped:
    """An additive cost, and what it may be at most. Less `paid` it bounds the time, where it is seconds."""

    costs: Costs
    most: float
    paid: float = np.inf  # what the limit itself costs; inf: it is no bound of the time

    def restrict(self, keep: Mapping[str, Mask], base: Mapping[str, Ints]) -> Capped:
        """Over the variants that are kept (V_l,)."""
        return Capped(self.costs.restrict(keep, base), self.most, self.paid)


@dataclass(frozen=True, slots=True)
class Problem:
    """The problem: which choice takes the least time of those whose memory fits?

    A *row* is what is alive at one instant on one device, as an additive lower bound: no choice's peak is below it.
    """

    time: Costs
    base: Mapping[str, Ints]  # (V_l,) of each variant, the index of its base
    row: Callable[[int], Costs]  # bytes
    rows: Callable[[Choice], Floats]  # (R,) bytes of one choice in every row
    peak: Callable[[Choice], float]  # bytes: what must fit
    exact: Callable[[Choice], float] | None = None  # seconds of one choice, where `time` is a lower bound
    # With more rows, which are near the peak of a choice. What numbers the rows have stays as it is.
    nearer: Callable[[Choice], Problem] | None = None

    def cost(self, choice: Choice) -> float:
        """Seconds of one choice."""
        return self.time.of(choice, self.base) if self.exact is None else self.exact(choice)

    def restrict(self, keep: Mapping[str, Mask]) -> Problem:
        """The problem over the variants that are kept (V_l,), which are numbered anew: see `outside`."""
        exact, nearer = self.exact, self.nearer
        return Problem(
            self.time.restrict(keep, self.base),
            {name: np.unique(self.base[name][mask], return_inverse=True)[1] for name, mask in keep.items()},
            lambda row: self.row(row).restrict(keep, self.base),
            lambda choice: self.rows(outside(choice, keep)),
            lambda choice: self.peak(outside(choice, keep)),
            None if exact is None else lambda choice: exact(outside(choice, keep)),
            None if nearer is None else lambda choice: nearer(outside(choice, keep)).restrict(keep),
        )


def inside(choices: Iterable[Choice], keep: Mapping[str, Mask]) -> list[Choice]:
    """Choices over all variants as ones over those that are kept, without those of which one is not."""
    kept = [choice for choice in choices if all(keep[name][i] for name, i in choice.items())]
    return [{name: int(keep[name][:i].sum()) for name, i in choice.items()} for choice in kept]


def outside(choice: Choice, keep: Mapping[str, Mask]) -> Choice:
    """A choice over the variants that are kept, as one over all of them."""
    return {name: int(np.flatnonzero(keep[name])[i]) for name, i in choice.items()}


def least_by_base(node: Floats, base: Ints) -> tuple[Floats, Ints]:
    """(B,) the cheapest variant of every base: its cost and its index."""
    order = np.lexsort((node, base))
    first = order[np.r_[True, np.diff(base[order]) > 0]]
    return node[first], first


def by_elimination(memory_bytes: float) -> Minimise:
    """The cheapest choice, and its cost as the bound, where tables of `memory_bytes` are enough."""

    def minimise(costs: Costs, base: Mapping[str, Ints]) -> tuple[Choice, float]:
        least = {name: least_by_base(node, base[name]) for name, node in costs.node.items()}
        found = eliminate(
            CostTables({}, {name: cost for name, (cost, _) in least.items()}, dict(costs.edge)), memory_bytes
        )
        return {name: int(least[name][1][i]) for name, i in found.choice.items()}, found.lower_bound_s

    return minimise


def by_messages(costs: Costs, base: Mapping[str, Ints]) -> tuple[Choice, float]:
    """The result of one sweep of message passing: on large tables far sooner than elimination."""
    least = {name: least_by_base(node, base[name]) for name, node in costs.node.items()}
    bounds = Messages(costs.edge, list(least)).bounds({name: cost for name, (cost, _) in least.items()}, SWEEPS)
    choice = {name: int(least[name][1][i]) for name, i in bounds.choice.items()}
    return choice, max(float(lower.min()) for lower in bounds.lower_s.values())


def lower_bounds(costs: Costs, base: Mapping[str, Ints]) -> dict[str, Floats]:
    """(V_l,) what every choice that contains a variant costs at least, by message passing."""
    own = {name: least_by_base(node, base[name])[0] for name, node in costs.node.items()}
    lower = Messages(costs.edge, list(own)).bounds(own, SWEEPS).lower_s
    return {name: (lower[name] - own[name])[base[name]] + node for name, node in costs.node.items()}
