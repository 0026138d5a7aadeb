"""All choices whose bounds stay within given limits, found together: layer by layer, with exact costs to go.

What the best completion of a partial choice costs follows exactly from the tables of an elimination. Variables are
chosen in an order in which each comes after all that its table is over. Then the least that any completion costs is
the least of all choices and, for every variable chosen so far, its *regret*: what its value costs beyond the best
value, given the variables before.

A *criterion* is an additive cost and what it may be at most. A partial choice whose best completion is beyond any
criterion goes. What is left after all layers are all choices within all criteria, unless more than `width` partial
choices had to be followed at once: then those of the worst bounds go, and the least of theirs is told. So little width
is a beam search, with a proof of how good it is.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from layerwise.cost.model import EdgeName
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.search.limit.additive import Choice, Costs, least_by_base
from layerwise.search.solve.eliminate import Factor, min_fill_order


@dataclass(frozen=True, slots=True)
class Order:
    """The order in which variables are chosen, and what the table of each is over."""

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
        """Entries of the largest table."""
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
    """The bounds of one additive cost for what is still to be chosen."""

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


CHUNK = 1 << 20  # numbers that are formed at once
AHEAD = 4  # times the width, before what is dominated goes


@dataclass(frozen=True, slots=True)
class Criterion:
    """An additive cost, and what it may be at most. Where all fits, it is a bound of the time, with `paid` beside."""

    completion: Completion
    most: float
    paid: float = 0.0  # inf: it is no bound of the time


@dataclass(frozen=True, slots=True)
class Enumerated:
    """The result of an enumeration: what is left."""

    variants: Mapping[str, Ints]  # (choices,) of each layer
    costs: Floats  # (choices, criteria)
    dropped: float  # the least bound of what did not find room: inf where all did

    def choice(self, number: int) -> Choice:
        """One of what is left."""
        return {name: int(of[number]) for name, of in self.variants.items()}


def within(
    criteria: Sequence[Criterion],
    order: Order,
    base: Mapping[str, Ints],
    width: int,
    dominance: tuple[int, int] | None = None,
    step: float = 0.0,
) -> Enumerated:
    """Choices within all criteria; the largest of their bounds decides who goes where there is no room.

    dominance: two criteria by which, of partial choices that end alike, what is no better in either may be left out.
    step: also one that is better in the first by less than that. So of every choice there is one left that is no worse
    in the second criterion, and in the first by less than a step for each variable.
    """
    bounds = np.array([[c.completion.least for c in criteria]])
    paid = np.array([c.paid for c in criteria])
    chosen: dict[str, Ints] = {}  # base of the variables that are still needed
    steps: list[tuple[Ints, Ints]] = []  # for each variable: from which partial choice, and which variant
    dropped = np.inf
    for i, name in enumerate(order.names):
        where = tuple(chosen[n] for n in order.scopes[name])
        parent, variant, bounds = _extend(criteria, name, where, base[name], bounds)
        frontier = {n: of[parent] for n, of in chosen.items()} | {name: base[name][variant]}
        chosen = {n: frontier[n] for n in order.needed[i]}
        left = np.arange(len(parent))
        for room in (width,) if dominance is None else (AHEAD * width, width):
            if len(left) > room:
                bound = (bounds[left] - paid).max(1)
                sooner = np.argpartition(bound, room)
                dropped = min(dropped, float(bound[sooner[room:]].min()))
                left = left[sooner[:room]]
            if dominance is not None and room > width:
                alike = _numbers([of[left] for of in chosen.values()], [len(base[n]) for n in chosen])
                first, second = (bounds[left, criterion] for criterion in dominance)
                left = left[~_dominated(alike, np.floor(first / step) if step else first, second)]
        parent, variant, bounds = parent[left], variant[left], bounds[left]
        chosen = {n: of[left] for n, of in chosen.items()}
        steps.append((parent, variant))
    at = np.arange(len(bounds))
    picked: dict[str, Ints] = {}
    for name, (parent, variant) in zip(reversed(order.names), reversed(steps), strict=True):
        picked[name], at = variant[at], parent[at]
    return Enumerated(picked, bounds, dropped)


def _extend(
    criteria: Sequence[Criterion], name: str, where: tuple[Ints, ...], base: Ints, bounds: Floats
) -> tuple[Ints, Ints, Floats]:
    """Every partial choice with every variant of one more variable: from which, which, and their bounds.

    By one criterion after the other, each of what is left.
    """
    parents, variants, kept = [], [], []
    tables = [(c.completion.regret[name], c.completion.beyond[name]) for c in criteria]
    step = max(1, CHUNK // len(base))
    for start in range(0, max(len(bounds), 1), step):
        rows = slice(start, start + step)
        regret, beyond = tables[0]
        first = bounds[rows, :1] + (regret[tuple(of[rows] for of in where)][..., base] + beyond)
        parent, variant = np.nonzero(first <= criteria[0].most)
        new = [first[parent, variant]]
        parent += start
        for i, (regret, beyond) in enumerate(tables[1:], start=1):
            more = bounds[parent, i] + regret[(*(of[parent] for of in where), base[variant])] + beyond[variant]
            left = more <= criteria[i].most
            parent, variant, new = parent[left], variant[left], [*(cost[left] for cost in new), more[left]]
        parents.append(parent)
        variants.append(variant)
        kept.append(np.stack(new, 1))
    return np.concatenate(parents), np.concatenate(variants), np.concatenate(kept)


def _numbers(columns: list[Ints], sizes: list[int]) -> Ints:
    """(P,) a number for each row of columns (P,) of indices below `sizes`: equal ones for equal rows alone."""
    numbers, count = np.zeros(len(columns[0]) if columns else 1, np.int64), 1
    for column, size in zip(columns, sizes, strict=True):
        if count * size > 2**62:
            numbers, count = np.unique(numbers, return_inverse=True)[1], len(numbers)
        numbers, count = numbers * size + column, count * size
    return numbers


def _dominated(alike: Ints, first: Floats, second: Floats) -> Mask:
    """(P,) which of P partial choices is no better in two costs than another one that ends alike, as numbers say."""
    count = len(first)
    if count < 2:
        return np.zeros(count, bool)
    order = np.lexsort((second, first, np.broadcast_to(alike, count)))
    group = np.cumsum(np.diff(np.broadcast_to(alike, count)[order], prepend=-1) != 0)
    # The least of the second cost so far, in its group: ranks, which groups move apart, each below the one before.
    rank = np.unique(second, return_inverse=True)[1].reshape(-1)[order] - group * count
    beaten = np.zeros(count, bool)
    beaten[order[1:]] = rank[1:] >= np.minimum.accumulate(rank)[:-1]
    return beaten
