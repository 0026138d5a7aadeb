"""What the best completion of a partial choice costs, exactly: from the tables of an elimination.

Variables are eliminated one after the other, and chosen in an order in which each comes after all that its table is
over. Then the least that any completion costs is the least of all choices and, for every variable chosen so far, its
*regret*: what its value costs beyond the best value, given the variables before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from layerwise.cost.model import EdgeName
from layerwise.geometry.arrays import Floats, Ints
from layerwise.search.limit.additive import Costs, least_by_base
from layerwise.search.solve.variables import Factor, min_fill_order


@dataclass(frozen=True, slots=True)
class Order:
    """In which order variables are chosen, and what the table of each is over."""

    names: tuple[str, ...]
    scopes: Mapping[str, tuple[str, ...]]  # of each, variables chosen before it
    needed: tuple[tuple[str, ...], ...]  # of each, when it has been chosen: those that later tables are over

    @staticmethod
    def of(sizes: Mapping[str, int], edges: Sequence[EdgeName], weight: Mapping[str, float]) -> Order:
        """Elimination of a triangulation, backwards; what depends on one variable comes right after it.

        The triangulation is that of min-fill order. Of the orders that add nothing to it, one in which the variable of
        the largest `weight` is the first that is chosen (maximum cardinality search: Tarjan and Yannakakis, SIAM J.
        Comput. 13(3), 1984): what decides most is known while there is little to follow.
        """
        around: dict[str, set[str]] = {name: set() for name in sizes}
        for u, v, _ in edges:
            around[u].add(v)
            around[v].add(u)
        _fill(around, min_fill_order(sizes, [edge[:2] for edge in edges]))
        names, near = list[str](), dict.fromkeys(sizes, 0)
        while near:
            names.append(name := max(near, key=lambda other: (near[other], weight[other])))
            del near[name]
            for other in around[name] & near.keys():
                near[other] += 1
        place = {name: i for i, name in enumerate(names)}
        scopes, children = dict[str, tuple[str, ...]](), dict[str, list[str]]({name: [] for name in sizes})
        roots = list[str]()
        for name in reversed(names):
            before = sorted((n for n in around[name] if place[n] < place[name]), key=place.__getitem__, reverse=True)
            scopes[name] = tuple(before)
            (children[before[0]] if before else roots).append(name)
        beneath = dict(weight)
        for name in reversed(names):
            for child in children[name]:
                beneath[name] += beneath[child]
        names, waiting = [], roots
        while waiting:
            names.append(name := waiting.pop())
            waiting += sorted(children[name], key=beneath.__getitem__)
        needed: list[tuple[str, ...]] = [()]
        for name in reversed(names[1:]):
            both = dict.fromkeys((*needed[-1], *scopes[name]))
            needed.append(tuple(other for other in both if other != name))
        return Order(tuple(names), scopes, tuple(reversed(needed)))

    def entries(self, sizes: Mapping[str, int]) -> int:
        """Of the largest table."""
        return max((sizes[name] * prod(sizes[n] for n in scope) for name, scope in self.scopes.items()), default=0)


def _fill(around: dict[str, set[str]], order: Sequence[str]) -> None:
    """Joins what the elimination of variables in this order joins."""
    place = {name: i for i, name in enumerate(order)}
    for name in order:
        later = {other for other in around[name] if place[other] > place[name]}
        for other in later:
            around[other] |= later - {other}


@dataclass(frozen=True, slots=True)
class Completion:
    """Of one additive cost."""

    least: float  # of all choices
    regret: Mapping[str, Floats]  # (*scope, B) of each variable's base
    beyond: Mapping[str, Floats]  # (V,) what a variant costs beyond the cheapest of its base

    @staticmethod
    def of(costs: Costs, base: Mapping[str, Ints], order: Order) -> Completion:
        """Eliminates all variables, the last chosen first."""
        own = {name: least_by_base(node, base[name])[0] for name, node in costs.node.items()}
        beyond = {name: node - own[name][base[name]] for name, node in costs.node.items()}
        tables = {name: [Factor((name,), cost)] for name, cost in own.items()}
        rank = {name: i for i, name in enumerate(order.names)}
        for (u, v, _), cost in costs.edge.items():
            tables[max(u, v, key=rank.__getitem__)].append(Factor((u, v), cost))
        least, regret = 0.0, {}
        for name in reversed(order.names):
            scope = (*order.scopes[name], name)
            joined = np.zeros([len(own[n]) for n in scope])
            for factor in tables.pop(name):
                joined += factor.over(scope)
            best = joined.min(-1)
            regret[name] = joined - best[..., None]
            if len(scope) == 1:
                least += float(best)
            else:
                last = max(scope[:-1], key=rank.__getitem__)
                tables[last].append(Factor(scope[:-1], best))
        return Completion(least, regret, beyond)
