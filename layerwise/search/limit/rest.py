"""Closes the gap that multipliers leave under a limit: enumeration, then branch and bound.

Where a few layers decide by much, what multipliers leave is closed by deciding for these layers. The multipliers' bound
is the time of a mixture of choices that fits on average. Where its choices differ most in what their bytes cost, that
layer's variants are split into the lighter and the heavier ones; either half has multipliers of its own, and its bound
is as high or higher. What cannot beat the best in hand goes. The bound of a half of which no choice fits is infinite.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import count

import numpy as np

from layerwise.geometry.arrays import Floats, Mask
from layerwise.search.limit.additive import Capped, Choice, Costs, Problem, inside, lower_bounds, outside
from layerwise.search.limit.enumerate import Completion, Criterion, Enumerated, Order, within
from layerwise.search.limit.multipliers import Met, Multipliers
from layerwise.search.solve.narrow import SLACK, Keep

NUMBERS = 1e7  # that an enumeration may form: about a second
ENTRIES = 1e6  # of its largest table
CHECKS = 600  # layers times true peaks that an enumeration may ask for: some tenths of a second


@dataclass
class Known:
    """Choices whose true peaks were looked at."""

    problem: Problem
    limit: float
    peaks: dict[tuple[int, ...], float] = field(default_factory=dict)
    best: Choice | None = None  # the fastest that fits
    cost: float = np.inf
    least: Choice | None = None
    least_bytes: float = np.inf
    misfit: Choice | None = None  # the last one that does not fit

    def see(self, choice: Choice) -> float:
        """Its true peak in bytes."""
        key = tuple(choice[name] for name in self.problem.base)
        if key not in self.peaks:
            self.peaks[key] = peak = self.problem.peak(choice)
            if peak < self.least_bytes:
                self.least, self.least_bytes = choice, peak
            if peak <= self.limit and (cost := self.problem.cost(choice)) < self.cost:
                self.best, self.cost = choice, cost
        if self.peaks[key] > self.limit:
            self.misfit = choice
        return self.peaks[key]


def nearer(problem: Problem, misfit: Choice, limit: float) -> Problem | None:
    """The problem with rows near the peak of a choice that does not fit; None where they do not tell so."""
    more = None if problem.nearer is None else problem.nearer(misfit)
    return more if more is not None and more.rows(misfit).max() > limit else None


@dataclass(frozen=True, slots=True)
class Bounded:
    """The result of an enumeration."""

    lower_s: float  # nothing within the limit takes less
    complete: bool  # whether there was room for everything


@dataclass(frozen=True, slots=True)
class Rest:
    """The variants that bounds leave, to be enumerated."""

    problem: Problem  # over what is left
    keep: Mapping[str, Mask]
    order: Order
    criteria: list[Criterion]

    @staticmethod
    def of(problem: Problem, capped: Sequence[Capped], memory_bytes: float) -> Rest | None:
        """The rest without variants of which no choice is within all caps. None where tables are too large."""
        keep = possible(problem, capped)
        if not all(mask.any() for mask in keep.values()):  # nothing is left: nor is it of any one layer
            keep = {name: np.arange(len(mask)) == 0 for name, mask in keep.items()}
        small = problem.restrict(keep)
        sizes = {name: int(base.max()) + 1 for name, base in small.base.items()}
        left = [one.restrict(keep, problem.base) for one in capped]
        order = Order.of(sizes, list(small.time.edge), left[min(2, len(left) - 1)].costs.spread())
        if 16.0 * order.entries(sizes) > min(memory_bytes, 16.0 * ENTRIES):
            return None
        criteria = [Criterion(Completion.of(c.costs, small.base, order), c.most * SLACK, c.paid) for c in left]
        return Rest(small, keep, order, criteria)

    @property
    def checks(self) -> int:
        """The number of true peaks that an enumeration may ask for."""
        return max(8, CHECKS // len(self.keep))

    def enumerate(self, numbers: float, dominance: tuple[int, int] | None = None, step: float = 0.0) -> Enumerated:
        """All choices within all that is capped, as far as so many `numbers` that are formed allow."""
        variants = sum(map(len, self.problem.base.values()))
        return within(self.criteria, self.order, self.problem.base, max(1, int(numbers / variants)), dominance, step)

    def undominated(self, seen: Known, cost: float, spare: float, room: float) -> Bounded:
        """Looks for choices of at most `cost` that no others beat in time and in what their bytes cost together.

        What is capped is that of `Multipliers.surrogate`, at `spare` more: seconds by which what beats others may take
        longer. room: of NUMBERS. True peaks are asked for where rows are so far within the limit as they were seen to
        be below peaks.
        """
        found = self.enumerate(room * NUMBERS, (1, 2), spare / len(self.order.names))
        lower, checks, missed = min(found.dropped - spare, cost), self.checks, 0.0
        for i in np.argsort(found.costs[:, 1], kind="stable"):
            time = float(found.costs[i, 1])
            lower = min(lower, time - spare)  # what it beats may fit, even if it does not
            if time >= seen.cost or checks == 0:
                break
            choice = found.choice(int(i))
            taken = float(self.problem.rows(choice).max())
            if taken + missed <= seen.limit * SLACK:
                checks -= 1
                below = seen.see(outside(choice, self.keep)) - taken
                missed = below if missed == 0.0 else min(missed, below)
        return Bounded(lower, bool(np.isinf(found.dropped)))

    def fastest(self, seen: Known) -> float:
        """Looks for the fastest choice that fits: a lower bound of all that do.

        What is capped is that of `Multipliers.criteria`.
        """
        found = self.enumerate(NUMBERS / 10)  # what all have is seldom little enough
        lower, checks = found.dropped, self.checks
        for i in np.argsort(found.costs[:, 1], kind="stable"):
            cost = float(found.costs[i, 1])
            if cost >= seen.cost:
                break
            choice = found.choice(int(i))
            if self.problem.rows(choice).max() <= seen.limit * SLACK:
                if checks == 0:
                    return min(lower, cost)
                checks -= 1
                seen.see(outside(choice, self.keep))
        return min(lower, seen.cost)

    def smallest(self, seen: Known) -> float:
        """Looks for the choice of the least peak: a lower bound of all. What is capped is that of `mixed`."""
        found = self.enumerate(NUMBERS)
        fullest = found.costs.max(1, initial=0.0)
        for checks, i in enumerate(np.argsort(fullest, kind="stable")):
            if fullest[i] >= seen.least_bytes:
                break
            if checks == self.checks:
                return min(found.dropped, float(fullest[i]), seen.least_bytes)
            choice = found.choice(int(i))
            if self.problem.rows(choice).max() < seen.least_bytes:
                seen.see(outside(choice, self.keep))
        return min(found.dropped, seen.least_bytes)


def possible(problem: Problem, capped: Sequence[Capped]) -> Keep:
    """The variants (V_l,) that may be part of a choice that is within all that is capped."""
    keep = {name: np.ones(len(own), bool) for name, own in problem.time.node.items()}
    for one in capped:
        if np.isfinite(one.most):
            for name, lower in lower_bounds(one.costs, problem.base).items():
                keep[name] &= lower <= one.most * SLACK
    return keep


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
    """The part of a half that is kept. grown: whether the problem has more rows than the half had."""
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
