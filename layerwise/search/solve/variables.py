"""Variable elimination on tables of any arity (Dechter's bucket elimination), for graphs of which K > 2 nodes remain.

Exact where the tables fit into memory. Where they do not, buckets are split (mini-buckets): the sum of their minima is
a proven lower bound, and the strategy decoded from them is improved one layer at a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from math import prod

import numpy as np

from layerwise.geometry.arrays import Floats


@dataclass(frozen=True, slots=True)
class Factor:
    """A cost table."""

    scope: tuple[str, ...]  # the variable of each of its dimensions
    cost: Floats

    def over(self, scope: Sequence[str]) -> Floats:
        """The table with a dimension for each of `scope`, which has all of its own: 1 long where it has none."""
        axes = sorted(range(len(self.scope)), key=lambda i: scope.index(self.scope[i]))
        return self.cost.transpose(axes)[tuple(slice(None) if name in self.scope else None for name in scope)]


def min_fill_order(sizes: Mapping[str, int], scopes: Iterable[tuple[str, ...]]) -> list[str]:
    """Variables in the order in which eliminating them joins the fewest others; ties by the smaller table."""
    around: dict[str, set[str]] = {name: set() for name in sizes}
    for scope in scopes:
        _connect(around, scope)
    order = []
    while around:

        def effort(name: str) -> tuple[int, int]:
            near = around[name]
            fill = sum(b not in around[a] for a, b in combinations(near, 2))
            return fill, prod(sizes[a] for a in near) * sizes[name]

        best = min(around, key=effort)
        near = around.pop(best)
        _connect(around, near)
        for name in near:
            around[name].remove(best)
        order.append(best)
    return order


def _connect(around: dict[str, set[str]], names: Iterable[str]) -> None:
    """Joins each of these variables to all the others."""
    for a, b in combinations(names, 2):
        around[a].add(b)
        around[b].add(a)


def eliminate_variables(
    factors: Sequence[Factor], sizes: Mapping[str, int], order: Sequence[str], memory_bytes: float
) -> tuple[dict[str, int], float]:
    """The best choice and a lower bound of the least sum of `factors`; equal where no bucket had to be split."""
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
    """The sum of factors over the union of their scopes, `last` as the last dimension."""
    names = sorted({name for f in factors for name in f.scope} - {last})
    scope = (*names, last)
    total = np.zeros(tuple(sizes[name] for name in scope))
    for f in factors:
        total += f.over(scope)
    return Factor(scope, total)


def _mini_buckets(factors: Sequence[Factor], sizes: Mapping[str, int], memory_bytes: float) -> list[list[Factor]]:
    """Factors grouped so that each group's table fits; one group where all of it does."""
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
    """The factor with every variable but `free` chosen: (C_free,). Variables not yet chosen are minimised out."""
    cost: Floats = factor.cost
    for axis in reversed(range(len(factor.scope))):
        name = factor.scope[axis]
        if name != free:
            cost = np.take(cost, choice[name], axis) if name in choice else cost.min(axis)
    return cost


def _improve(factors: Sequence[Factor], sizes: Mapping[str, int], choice: dict[str, int]) -> None:
    """Changes one variable at a time while that lowers the sum."""
    touching: dict[str, list[Factor]] = {name: [f for f in factors if name in f.scope] for name in sizes}
    changed = True
    while changed:
        changed = False
        for name, mine in touching.items():
            cost = sum((_slice(f, choice, name) for f in mine), np.zeros(sizes[name]))
            best = int(np.argmin(cost))
            if cost[best] < cost[choice[name]] * (1 - 1e-12):
                choice[name], changed = best, True
