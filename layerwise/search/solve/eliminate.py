"""The optimal strategy by node and edge elimination (Jia et al., algorithms 1 and 2), then variable elimination in
min-fill order. Both are exact: the result's cost is its own proof.

Variable elimination works on tables of any arity (Dechter's bucket elimination), for graphs of which K > 2 nodes
remain. It is exact if the tables fit into memory. Otherwise buckets are split (mini-buckets): the sum of their minima
is a proven lower bound, and the decoded strategy is improved one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np

from layerwise.cost.model import CostTables
from layerwise.geometry.arrays import Floats, Ints

CACHED = 1 << 16  # sums of a min-plus product computed at once


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best strategy, a lower bound of all, and how the graph was reduced."""

    choice: dict[str, int]  # layer -> index of its configuration
    cost_s: float
    lower_bound_s: float
    final_nodes: int  # K: nodes left when neither node nor edge elimination applies
    order: tuple[str, ...]  # eliminated layers, first to last

    @property
    def proven(self) -> bool:
        """True if the cost equals the lower bound."""
        return self.cost_s <= self.lower_bound_s * (1 + 1e-9)


def eliminate(tables: CostTables, memory_bytes: float = 2**31) -> Optimum:
    """The cheapest strategy. `memory_bytes` bounds each table of variable elimination; beyond it nothing is proven."""
    costs = {name: c.astype(np.float64) for name, c in tables.node.items()}
    graph = _Reduction(costs, tables.transfer)
    order = graph.reduce()
    rest = tuple(graph.node)
    # The remaining K nodes are also eliminated as variables, cheapest first.
    factors = [Factor((name,), cost) for name, cost in graph.node.items()]
    factors += [Factor(edge, cost) for edge, cost in graph.edges.items()]
    sizes = {name: len(cost) for name, cost in graph.node.items()}
    finish = min_fill_order(sizes, [f.scope for f in factors])
    choice, bound = eliminate_variables(factors, sizes, finish, memory_bytes)
    graph.undo(choice)
    cost = total(costs, tables.transfer, choice)
    return Optimum(choice, cost, min(bound, cost), len(rest), (*order, *finish))


def reduction_order(names: Sequence[str], edges: Sequence[tuple[str, str]]) -> list[str]:
    """The layers that node eliminations remove from a graph, in order, which does not depend on costs."""
    tables = {(u, v, slot): np.zeros((1, 1)) for slot, (u, v) in enumerate(edges)}
    return _Reduction({name: np.zeros(1) for name in names}, tables).reduce()


def total(
    node: Mapping[str, Floats], transfer: Mapping[tuple[str, str, int], Floats], choice: Mapping[str, int]
) -> float:
    """Equation 1 for a choice of configurations."""
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
        """Inserts an edge, or adds it to a parallel one (edge elimination, equation 3)."""
        self.edges[u, v] = self.edges[u, v] + cost if (u, v) in self.edges else cost
        self.outs[u].add(v)
        self.ins[v].add(u)

    def reduce(self) -> list[str]:
        """Eliminates nodes to a fixed point; returns the layers in order."""
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
            waiting += [i, k]  # a merged edge may allow eliminating its ends
        return order

    def undo(self, choice: dict[str, int]) -> None:
        """Completes a choice for the reduced graph (equation 4's argmin)."""
        for j, i, k, best in reversed(self._undo):
            choice[j] = int(best[choice[i], choice[k]])


def min_plus(a: Floats, b: Floats) -> tuple[Floats, Ints]:
    """min over j of a[i, j] + b[j, k], and its index (equation 2). Works in blocks of rows, so that
    sums stay in cache.
    """
    value = np.empty((a.shape[0], b.shape[1]))
    best = np.empty(value.shape, np.int64)
    columns = np.ascontiguousarray(b.T)
    step = max(1, CACHED // columns.size)
    for i in range(0, len(a), step):
        sums = a[i : i + step, None, :] + columns
        best[i : i + step] = sums.argmin(-1)
        value[i : i + step] = np.take_along_axis(sums, best[i : i + step, :, None], -1)[..., 0]
    return value, best


@dataclass(frozen=True, slots=True)
class Factor:
    """A cost table."""

    scope: tuple[str, ...]  # the variable of each dimension
    cost: Floats

    def over(self, scope: Sequence[str]) -> Floats:
        """The table with a dimension for each name in `scope`, a superset of its own; new dimensions have length 1."""
        axes = sorted(range(len(self.scope)), key=lambda i: scope.index(self.scope[i]))
        return self.cost.transpose(axes)[tuple(slice(None) if name in self.scope else None for name in scope)]


def min_fill_order(sizes: Mapping[str, int], scopes: Iterable[tuple[str, ...]]) -> list[str]:
    """Variables in the order whose eliminations join the fewest others; ties by the smaller table."""
    around, order = _neighbours(sizes, scopes), list[str]()
    while around:

        def effort(name: str) -> tuple[int, int]:
            near = around[name]
            fill = sum(b not in around[a] for a, b in combinations(near, 2))
            return fill, prod(sizes[a] for a in near) * sizes[name]

        order.append(best := min(around, key=effort))
        _take(around, best)
    return order


def sums_of(sizes: Mapping[str, int], pairs: Iterable[tuple[str, ...]]) -> float:
    """About how many sums an elimination computes, for variables of these sizes, joined in these pairs."""
    around, count = _neighbours(sizes, pairs), 0.0
    waiting = list(around)
    while waiting:  # along chains, like node elimination
        if (name := waiting.pop()) in around and len(around[name]) <= 2:
            near = _take(around, name)
            count += sizes[name] * prod(sizes[other] for other in near)
            waiting.extend(near)
    for name in min_fill_order({n: sizes[n] for n in around}, [(n, m) for n, near in around.items() for m in near]):
        count += sizes[name] * prod(sizes[other] for other in _take(around, name))
    return count


def _neighbours(names: Iterable[str], scopes: Iterable[tuple[str, ...]]) -> dict[str, set[str]]:
    """For each variable, those that share a table with it."""
    around: dict[str, set[str]] = {name: set() for name in names}
    for scope in scopes:
        _connect(around, scope)
    return around


def _take(around: dict[str, set[str]], name: str) -> set[str]:
    """Eliminates a variable, and returns its neighbours, which are joined."""
    near = around.pop(name)
    for other in near:
        around[other].remove(name)
    _connect(around, near)
    return near


def _connect(around: dict[str, set[str]], names: Iterable[str]) -> None:
    """Joins each of these variables to all others."""
    for a, b in combinations(names, 2):
        around[a].add(b)
        around[b].add(a)


def eliminate_variables(
    factors: Sequence[Factor], sizes: Mapping[str, int], order: Sequence[str], memory_bytes: float
) -> tuple[dict[str, int], float]:
    """The best choice and a lower bound of the least sum of `factors`; equal if no bucket had to be split."""
    alive = list(factors)
    buckets: list[tuple[str, list[Factor]]] = []
    bound = 0.0
    split = False
    for name in order:
        mine = [f for f in alive if name in f.scope]
        alive = [f for f in alive if name not in f.scope]
        buckets.append((name, mine))
        groups = _mini_buckets(mine, sizes, memory_bytes)
        split |= len(groups) > 1
        for group in groups:
            joined = join(group, sizes, last=name)
            smaller = joined.cost.min(axis=-1)
            if smaller.ndim:
                alive.append(Factor(joined.scope[:-1], smaller))
            else:
                bound += float(smaller)
    choice: dict[str, int] = {}
    for name, mine in reversed(buckets):
        costs = [_slice(f, choice, name) for f in mine]
        choice[name] = int(np.argmin(sum(costs, np.zeros(sizes[name]))))
    if split:
        _improve(factors, sizes, choice)
    return choice, bound


def join(factors: Sequence[Factor], sizes: Mapping[str, int], last: str) -> Factor:
    """The sum of factors over the union of their scopes, with `last` as the last dimension."""
    names = sorted({name for f in factors for name in f.scope} - {last})
    scope = (*names, last)
    total = np.zeros(tuple(sizes[name] for name in scope))
    for f in factors:
        total += f.over(scope)
    return Factor(scope, total)


def _mini_buckets(factors: Sequence[Factor], sizes: Mapping[str, int], memory_bytes: float) -> list[list[Factor]]:
    """Factors grouped so that each group's table fits; a single group if everything fits."""
    groups: list[list[Factor]] = []
    for f in sorted(factors, key=lambda f: -f.cost.size):
        for group in groups:
            names = {name for g in (*group, f) for name in g.scope}
            if 16.0 * prod(sizes[name] for name in names) <= memory_bytes:  # the sum, and a temporary
                group.append(f)
                break
        else:
            groups.append([f])
    return groups


def _slice(factor: Factor, choice: Mapping[str, int], free: str) -> Floats:
    """The factor with every variable but `free` chosen: (C_free,). Variables not yet chosen are minimized out."""
    cost: Floats = factor.cost
    for axis in reversed(range(len(factor.scope))):
        name = factor.scope[axis]
        if name != free:
            cost = np.take(cost, choice[name], axis) if name in choice else cost.min(axis)
    return cost


def _improve(factors: Sequence[Factor], sizes: Mapping[str, int], choice: dict[str, int]) -> None:
    """Changes one variable at a time as long as that lowers the sum."""
    touching: dict[str, list[Factor]] = {name: [f for f in factors if name in f.scope] for name in sizes}
    changed = True
    while changed:
        changed = False
        for name, mine in touching.items():
            cost = sum((_slice(f, choice, name) for f in mine), np.zeros(sizes[name]))
            best = int(np.argmin(cost))
            if cost[best] < cost[choice[name]] * (1 - 1e-12):
                choice[name], changed = best, True
