"""The optimal strategy by node and edge elimination (Jia et al., algorithms 1 and 2), and what is left by elimination
of whole variables in min-fill order. Both are exact: the result's cost is its own proof.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from layerwise.cost.model import CostTables
from layerwise.geometry.arrays import Floats, Ints
from layerwise.search.solve.variables import Factor, eliminate_variables, min_fill_order

CACHED = 1 << 16  # sums of a min-plus product that are formed at once


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy, a lower bound of all, and how the graph was reduced."""

    choice: dict[str, int]  # of each layer, the index of its configuration
    cost_s: float
    lower_bound_s: float
    final_nodes: int  # K: left when neither node nor edge elimination applies
    order: tuple[str, ...]  # eliminated layers, first to last

    @property
    def proven(self) -> bool:
        """Whether the cost is the lower bound."""
        return self.cost_s <= self.lower_bound_s * (1 + 1e-9)


def eliminate(tables: CostTables, memory_bytes: float = 2**31) -> Optimum:
    """The cheapest strategy. `memory_bytes` bounds each table of variable elimination; beyond it nothing is proven."""
    costs = {name: c.astype(np.float64) for name, c in tables.node.items()}
    graph = _Reduction(costs, tables.transfer)
    order = graph.reduce()
    rest = tuple(graph.node)
    # Exhaustive finish on K nodes: itself an elimination of variables, cheapest first.
    factors = [Factor((name,), cost) for name, cost in graph.node.items()]
    factors += [Factor(edge, cost) for edge, cost in graph.edges.items()]
    sizes = {name: len(cost) for name, cost in graph.node.items()}
    finish = min_fill_order(sizes, [f.scope for f in factors])
    choice, bound = eliminate_variables(factors, sizes, finish, memory_bytes)
    graph.undo(choice)
    cost = total(costs, tables.transfer, choice)
    return Optimum(choice, cost, min(bound, cost), len(rest), (*order, *finish))


def total(
    node: Mapping[str, Floats], transfer: Mapping[tuple[str, str, int], Floats], choice: Mapping[str, int]
) -> float:
    """Equation 1 of a choice of configurations."""
    own = sum(float(cost[choice[name]]) for name, cost in node.items())
    return own + sum(float(cost[choice[u], choice[v]]) for (u, v, _), cost in transfer.items())


class _Reduction:
    """A graph with one cost matrix for each pair of adjacent nodes, reduced step by step."""

    def __init__(self, node: Mapping[str, Floats], transfer: Mapping[tuple[str, str, int], Floats]) -> None:
        self.node = dict(node)
        self.edges: dict[tuple[str, str], Floats] = {}
        self.ins: dict[str, set[str]] = {name: set() for name in node}
        self.outs: dict[str, set[str]] = {name: set() for name in node}
        self._undo: list[tuple[str, str, str, Ints]] = []
        for (u, v, _), cost in transfer.items():
            self._add(u, v, cost)

    def _add(self, u: str, v: str, cost: Floats) -> None:
        """Inserts an edge; a parallel one is added to it (edge elimination, equation 3)."""
        self.edges[u, v] = self.edges[u, v] + cost if (u, v) in self.edges else cost
        self.outs[u].add(v)
        self.ins[v].add(u)

    def reduce(self) -> list[str]:
        """Node eliminations to a fixed point; returns the layers in order."""
        waiting = list(reversed(self.node))
        order = []
        while waiting:
            j = waiting.pop()
            if j not in self.node or len(self.ins[j]) != 1 or len(self.outs[j]) != 1:
                continue
            (i,), (k,) = self.ins[j], self.outs[j]
            through, best = min_plus(self.edges.pop((i, j)), self.edges.pop((j, k)) + self.node[j][:, None])
            self._undo.append((j, i, k, best))
            del self.node[j], self.ins[j], self.outs[j]
            self.outs[i].remove(j)
            self.ins[k].remove(j)
            self._add(i, k, through)
            order.append(j)
            waiting += [i, k]  # a merged edge may have made its ends eliminable
        return order

    def undo(self, choice: dict[str, int]) -> None:
        """Completes a choice for the reduced graph (equation 4's argmin)."""
        for j, i, k, best in reversed(self._undo):
            choice[j] = int(best[choice[i], choice[k]])


def min_plus(a: Floats, b: Floats) -> tuple[Floats, Ints]:
    """min over j of a[i, j] + b[j, k], and where (equation 2). Some rows at a time, so that the sums stay in cache."""
    value = np.empty((a.shape[0], b.shape[1]))
    best = np.empty(value.shape, np.int64)
    columns = np.ascontiguousarray(b.T)
    step = max(1, CACHED // columns.size)
    for i in range(0, len(a), step):
        sums = a[i : i + step, None, :] + columns
        best[i : i + step] = sums.argmin(-1)
        value[i : i + step] = np.take_along_axis(sums, best[i : i + step, :, None], -1)[..., 0]
    return value, best
