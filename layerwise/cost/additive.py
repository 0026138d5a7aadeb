"""Additive costs: a choice of one variant for each layer costs a sum over layers and edges.

A layer has V variants. Some differ only in what the layer itself costs (such as the states of its parameters); so
tables of edges are over its B *bases*, the part of a variant that its neighbours can see.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.cost.model import EdgeName
from layerwise.geometry.arrays import Floats, Ints, Mask

Choice = dict[str, int]  # layer -> index of its variant
Moved = Mapping[str, Ints]  # n moves of the same layers: n new variants for each of them


@dataclass(frozen=True, slots=True)
class Costs:
    """An additive cost of choices: the sum of its entries. Seconds, or bytes at one instant."""

    node: Mapping[str, Floats]  # (V_l,)
    edge: Mapping[EdgeName, Floats]  # (B_u, B_v); 0 for missing edges

    def of(self, choice: Mapping[str, int], base: Mapping[str, Ints]) -> float:
        """The cost of one choice."""
        own = sum(float(cost[choice[name]]) for name, cost in self.node.items())
        return own + sum(float(cost[base[u][choice[u]], base[v][choice[v]]]) for (u, v, _), cost in self.edge.items())

    def restrict(self, keep: Mapping[str, Mask], bases: Mapping[str, Ints]) -> Costs:
        """The costs of the variants that are kept. bases: those that are left of each layer."""
        return Costs(
            {name: restricted(name, cost, keep, bases) for name, cost in self.node.items()},
            {edge: restricted(edge, cost, keep, bases) for edge, cost in self.edge.items()},
        )

    def beside(self, choice: Mapping[str, int], base: Mapping[str, Ints]) -> dict[str, Floats]:
        """(V_l,) for every layer, the cost of each of its variants with its edges, if all other
        layers stay as chosen.
        """
        own = {name: cost.copy() for name, cost in self.node.items()}
        for (u, v, _), cost in self.edge.items():
            own[u] += cost[base[u], base[v][choice[v]]]
            own[v] += cost[base[u][choice[u]], base[v]]
        return own

    def change(
        self,
        choice: Mapping[str, int],
        move: Choice | Moved,
        base: Mapping[str, Ints],
        edges: Mapping[str, Sequence[EdgeName]],
    ) -> Floats:
        """(n,) what each of n moves adds to the cost of a choice.

        move: for each layer that is moved, its n variants. edges: of every layer.
        """
        total: Floats = np.zeros(())
        for name, variants in move.items():
            total = total + (self.node[name][variants] - self.node[name][choice[name]])
        for u, v, slot in dict.fromkeys(edge for name in move for edge in edges[name]):
            if (cost := self.edge.get((u, v, slot))) is not None:
                after = cost[base[u][move.get(u, choice[u])], base[v][move.get(v, choice[v])]]
                total = total + (after - cost[base[u][choice[u]], base[v][choice[v]]])
        return total


def restricted(of: str | EdgeName, table: Floats, keep: Mapping[str, Mask], bases: Mapping[str, Ints]) -> Floats:
    """A table of a layer, or of an edge, over the variants that are kept, or the bases that are left."""
    found: Floats = table[keep[of]] if isinstance(of, str) else table[np.ix_(bases[of[0]], bases[of[1]])]
    return found


def edges_of(names: Iterable[str], edges: Iterable[EdgeName]) -> dict[str, list[EdgeName]]:
    """The edges of every layer."""
    found: dict[str, list[EdgeName]] = {name: [] for name in names}
    for edge in edges:
        for end in dict.fromkeys(edge[:2]):
            found[end].append(edge)
    return found


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
