"""Branch and bound: where a few layers decide by much, what multipliers leave is closed by deciding for these layers.

The multipliers' bound is the time of a mixture of choices that fits on average. Where its choices differ most in what
their bytes cost, that layer's variants are split into the lighter and the heavier ones; either half has multipliers of
its own, and its bound is as high or higher. What cannot beat the best in hand goes. A half of which no choice fits has
no end of a bound.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import count

import numpy as np

from layerwise.geometry.arrays import Floats, Mask
from layerwise.search.limit.additive import Choice, Costs, Problem, inside, outside
from layerwise.search.limit.multipliers import Met, Multipliers
from layerwise.search.limit.rest import Known, nearer, possible
from layerwise.search.solve.narrow import SLACK, Keep

EFFORT = 250_000  # variants of all halves together that are looked at: about a second
PATIENCE = 16  # halves in which the gap must shrink by a tenth
ADDED = 6  # times that rows are added near a peak above the limit, of a choice of which all rows are within it
SHARE = 1e-6  # less of a mixture is rounding
Solve = Callable[[Problem, float, Multipliers | None], Multipliers]  # the best multipliers under a limit
Look = Callable[[Known, Multipliers], object]  # asks for the true peaks of what multipliers have met


@dataclass(frozen=True, slots=True)
class _Half:
    """A part of all choices."""

    keep: Keep  # of the variants of the whole problem
    problem: Problem
    prices: Multipliers
    added: int = 0  # how often rows had been added


def branch(seen: Known, prices: Multipliers, solve: Solve, look: Look, gap: float) -> float:
    """Looks for the fastest choice until it is within `gap` of the bound: a lower bound of all that fit."""
    problem, number, effort = seen.problem, count(), 0
    whole = _Half({name: np.ones(len(base), bool) for name, base in problem.base.items()}, problem, prices)
    open_, closed = [(prices.bound, next(number), whole)], np.inf
    expected, halves, added = np.inf, 0, 0
    while open_ and min(open_[0][0], closed) * (1 + gap) < seen.cost and effort < EFFORT:
        if halves % PATIENCE == 0:
            missing = seen.cost - open_[0][0]
            if missing > expected:
                break
            expected = 0.9 * missing
        halves += 2
        bound, _, half = heapq.heappop(open_)
        lighter = _lighter(half, seen.limit)
        if lighter is None:
            closed = min(closed, bound)
            continue
        name, light = lighter
        keep = possible(half.problem, half.prices.criteria(half.problem, seen.limit, seen.cost))
        for side in (light, ~light):
            part = keep | {name: keep[name] & side}
            if not all(mask.any() for mask in part.values()):
                continue
            smaller = _part(seen.problem, half, part, solve, seen.limit, added > half.added)
            while smaller.prices.bound < seen.cost * SLACK:
                own = Known(smaller.problem, seen.limit, cost=seen.cost)
                look(own, smaller.prices)
                if own.best is not None:
                    seen.see(outside(own.best, smaller.keep))
                if own.misfit is None or own.best is not None or added == ADDED:
                    break
                more = nearer(seen.problem, outside(own.misfit, smaller.keep), seen.limit)
                if more is None:
                    break
                added += 1
                seen.problem = more
                small = seen.problem.restrict(smaller.keep)
                smaller = _Half(smaller.keep, small, solve(small, seen.limit, smaller.prices.over(small)))
            effort += sum(int(mask.sum()) for mask in part.values())
            if smaller.prices.bound < seen.cost * SLACK:
                heapq.heappush(open_, (smaller.prices.bound, next(number), replace(smaller, added=added)))
    return min(open_[0][0] if open_ else np.inf, closed, seen.cost)


def _part(problem: Problem, half: _Half, part: Keep, solve: Solve, limit: float, grown: bool) -> _Half:
    """What is kept of a half. grown: whether the problem has more rows than the half had."""
    keep: dict[str, Mask] = {}
    for name, mask in half.keep.items():
        keep[name] = mask.copy()
        keep[name][mask] = part[name]
    small = problem.restrict(keep)
    start = Multipliers(solved={row: small.row(row) for row in half.prices.price})
    for met in half.prices.met:
        for choice in inside([met.choice], part):
            start.met.append(Met(choice, met.cost, met.rows, small.base, met.known))
    if not grown:
        return _Half(keep, small, solve(small, limit, start))
    return _Half(keep, small, solve(small, limit, start.over(small)))


def _lighter(half: _Half, limit: float) -> tuple[str, Mask] | None:
    """The layer in which the choices of the mixture differ most in what their bytes cost, and its lighter variants."""
    prices = half.prices
    shares = prices.mixture(limit)
    mixed = [prices.met[i].choice for i in np.flatnonzero(shares > SHARE)]
    if len(mixed) < 2:
        return None
    share, charge = shares[shares > SHARE], prices.charge(half.problem)
    heaviest = max(mixed, key=lambda choice: charge.of(choice, half.problem.base))
    most, found = 0.0, None
    for name, bytes_s in _beside(charge, half.problem, heaviest).items():
        taken = np.array([bytes_s[choice[name]] for choice in mixed])
        apart = float(share @ (taken - share @ taken / share.sum()) ** 2)
        if apart > most and np.ptp(taken) > 1e-9 * abs(taken).max():
            most, found = apart, (name, bytes_s <= (taken.min() + taken.max()) / 2)
    return found


def _beside(costs: Costs, problem: Problem, choice: Choice) -> dict[str, Floats]:
    """(V_l,) what each variant costs where all other layers are as in a choice."""
    own, base = {name: cost.copy() for name, cost in costs.node.items()}, problem.base
    for (u, v, _), cost in costs.edge.items():
        own[u] += cost[base[u], base[v][choice[v]]]
        own[v] += cost[base[u][choice[u]], base[v]]
    return own
