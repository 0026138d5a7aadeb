"""The fastest choice whose memory fits, with a proof or a gap; and the least memory of all.

1. The best multipliers bound the least time from below, and meet choices that fit.
2. Variants that the bound excludes go.
3. What is left is enumerated with exact costs to go, layer by layer. First only what no other partial choice dominates
   in time and in what its bytes cost in all priced rows together: that bounds the least time better, as the multipliers
   leave what a mixture of choices gains, and finds choices whose true peaks fit. Where there is room for it, then all
   that is within the bounds: the fastest whose true peak fits is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from layerwise.geometry.arrays import Mask
from layerwise.search.additive import (
    Choice,
    Costs,
    Minimise,
    Problem,
    by_elimination,
    lower_bounds,
    outside,
)
from layerwise.search.completion import Completion, Order
from layerwise.search.enumerate import Criterion, Enumerated, within
from layerwise.search.multipliers import Multipliers, best_multipliers, least_rows
from layerwise.search.prune import SLACK, Keep

GAP = 0.005  # nearer to its bound, no more is looked for
NUMBERS = 1e8  # that an enumeration may form: one or two seconds
WINDOWS = 4  # enumerations of what is within GAP of the bound: each raises it, or finds what fits
CHECKS = 2000  # layers times true peaks that an enumeration may ask for: about a second
LOOKS = 4  # of what the multipliers have met, those whose true peaks are asked for
TIGHTER = 6  # rounds with a limit that is lower by what rows are below true peaks


@dataclass(frozen=True, slots=True)
class Limited:
    """The answer under a limit."""

    limit_bytes: float
    choice: Choice | None  # the fastest that was found to fit
    cost_s: float  # its cost; inf without
    lower_bound_s: float  # of all choices that fit; inf where it is proven that none does
    price: dict[int, float]  # by row, the seconds that a byte less costs

    @property
    def proven(self) -> bool:
        """Whether nothing that fits is faster, or nothing fits."""
        return self.cost_s <= self.lower_bound_s * SLACK

    @property
    def gap(self) -> float:
        """How much faster, at most, something that fits can be."""
        return 0.0 if self.proven else self.cost_s / self.lower_bound_s - 1


@dataclass(frozen=True, slots=True)
class Least:
    """The least memory of all choices."""

    choice: Choice
    bytes: float  # its true peak
    lower_bound_bytes: float

    @property
    def proven(self) -> bool:
        """Whether nothing needs less."""
        return self.bytes <= self.lower_bound_bytes * SLACK


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

    def see(self, choice: Choice) -> float:
        """Its true peak in bytes."""
        key = tuple(choice[name] for name in self.problem.base)
        if key not in self.peaks:
            self.peaks[key] = peak = self.problem.peak(choice)
            if peak < self.least_bytes:
                self.least, self.least_bytes = choice, peak
            if peak <= self.limit and (cost := self.problem.cost(choice)) < self.cost:
                self.best, self.cost = choice, cost
        return self.peaks[key]


@dataclass(frozen=True, slots=True)
class Bounded:
    """What an enumeration says."""

    lower_s: float  # nothing within the limit takes less
    missed: float  # bytes by which rows are below true peaks
    complete: bool  # whether there was room for everything


@dataclass(frozen=True, slots=True)
class _Rest:
    """The variants that bounds leave, to be enumerated. The first cost decides what goes where there is no room."""

    problem: Problem  # over what is left
    keep: Mapping[str, Mask]
    order: Order
    completions: list[Completion]  # of the costs

    @staticmethod
    def of(problem: Problem, costs: Sequence[Costs], most: Sequence[float], memory_bytes: float) -> _Rest | None:
        """Without the variants of which no choice has every cost at most `most`. None where tables are too large."""
        keep = possible(problem, costs, most)
        if not all(mask.any() for mask in keep.values()):  # nothing is left: nor is it of any one layer
            keep = {name: np.arange(len(mask)) == 0 for name, mask in keep.items()}
        small = problem.restrict(keep)
        sizes = {name: int(base.max()) + 1 for name, base in small.base.items()}
        order = Order.of(sizes, list(small.time.edge))
        if 16.0 * order.entries(sizes) > memory_bytes:
            return None
        left = [cost.restrict(keep, problem.base) for cost in costs]
        return _Rest(small, keep, order, [Completion.of(cost, small.base, order) for cost in left])

    @property
    def checks(self) -> int:
        """How many true peaks an enumeration may ask for."""
        return max(8, CHECKS // len(self.keep))

    def enumerate(self, most: Sequence[float], dominance: Sequence[int] = ()) -> Enumerated:
        """All choices with every cost at most `most`, as far as NUMBERS allow."""
        criteria = [Criterion(c, bound * SLACK) for c, bound in zip(self.completions, most, strict=True)]
        variants = sum(map(len, self.problem.base.values()))
        width = max(1, int(NUMBERS / (variants * len(criteria))))
        return within(criteria, self.order, self.problem.base, width, dominance)

    def undominated(self, seen: Known, charged: float, cost: float) -> Bounded:
        """Looks for choices of at most `cost` that no others beat in time and in what their bytes cost together.

        The costs are those of `Multipliers.surrogate`. True peaks are asked for where rows are so far within the limit
        as they were seen to be below peaks.
        """
        found = self.enumerate([cost + charged, cost, charged], (1, 2))
        lower, checks, missed = min(found.dropped - charged, cost), self.checks, 0.0
        for i in np.argsort(found.costs[:, 1], kind="stable"):
            time = float(found.costs[i, 1])
            lower = min(lower, time)  # what it beats may fit, even if it does not
            if time >= seen.cost or checks == 0:
                break
            choice = found.choice(int(i))
            taken = float(self.problem.rows(choice).max())
            if taken + missed <= seen.limit * SLACK:
                checks -= 1
                below = seen.see(outside(choice, self.keep)) - taken
                missed = below if missed == 0.0 else min(missed, below)

        return Bounded(lower, missed, bool(np.isinf(found.dropped)))

    def fastest(self, seen: Known, charged: float) -> float:
        """Looks for the fastest choice that fits: a lower bound of all that do.

        The costs are the Lagrangian, of which the limit's share is `charged`, the time, and the priced rows.
        """
        rows = len(self.completions) - 2
        found = self.enumerate([seen.cost + charged, seen.cost / SLACK, *(seen.limit for _ in range(rows))])
        lower, checks = found.dropped - charged, self.checks
        for i in np.argsort(found.costs[:, 1], kind="stable"):
            cost = float(found.costs[i, 1])
            if cost >= seen.cost:
                break
            if checks == 0:
                return min(lower, cost)
            checks -= 1
            choice = found.choice(int(i))
            if self.problem.rows(choice).max() <= seen.limit * SLACK:
                seen.see(outside(choice, self.keep))
        return min(lower, seen.cost)

    def smallest(self, seen: Known) -> float:
        """Looks for the choice of the least peak: a lower bound of all. The costs are a mean of rows, and rows."""
        found = self.enumerate([seen.least_bytes / SLACK] * len(self.completions))
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


def fastest_within(
    problem: Problem,
    limit: float,
    *,
    memory_bytes: float = 2.0**31,
    known: Iterable[Choice] = (),
    prove: bool = True,
) -> Limited:
    """The choice that takes the least time of those whose peak is at most `limit` bytes.

    memory_bytes: bounds each table. known: choices that may fit. prove: enumerate all that a proof takes.
    """
    seen, minimise = Known(problem, limit), by_elimination(memory_bytes)
    for choice in known:
        seen.see(choice)
    prices = best_multipliers(problem, limit, minimise)
    if not any(met.rows.max() <= limit for met in prices.met):
        least = least_rows(problem, minimise, prices, enough=limit)
        if least.bound > limit * SLACK:
            return Limited(limit, None, np.inf, np.inf, prices.price)
        prices = replace(prices, met=least.met, solved=least.solved)
    tighten(seen, prices, minimise)
    lower = prices.bound
    if prove and seen.cost > lower * SLACK:
        lower = max(lower, _enumerated(seen, prices, minimise, memory_bytes))
    return Limited(limit, seen.best, seen.cost, min(lower, seen.cost), prices.price)


def _enumerated(seen: Known, prices: Multipliers, minimise: Minimise, memory_bytes: float) -> float:
    """Looks for the fastest choice among all that bounds leave: a lower bound of all that fit."""
    found = _by_windows(seen, prices, seen.limit, memory_bytes)
    if seen.cost > found.lower_s * (1 + GAP) and found.missed > 0:
        target = seen.limit - found.missed
        _by_windows(seen, best_multipliers(seen.problem, target, minimise, prices), target, memory_bytes)
    lower = found.lower_s
    if found.complete and seen.cost > lower * SLACK:
        rest = _Rest.of(seen.problem, *prices.criteria(seen.problem, seen.limit, seen.cost), memory_bytes)
        lower = lower if rest is None else max(lower, rest.fastest(seen, sum(prices.price.values()) * seen.limit))
    return lower


def _by_windows(seen: Known, prices: Multipliers, limit: float, memory_bytes: float) -> Bounded:
    """Enumerates what is little above the bound, then what is above that: little enough for there to be room."""
    lower, missed, charged = prices.bound, 0.0, sum(prices.price.values()) * limit
    complete, cost = True, lower
    for _ in range(WINDOWS if prices.price else 0):
        if seen.cost <= lower * SLACK:
            break
        cost = min(seen.cost, cost * (1 + GAP))
        rest = _Rest.of(seen.problem, *prices.surrogate(seen.problem, limit, cost), memory_bytes)
        if rest is None:
            return Bounded(lower, missed, False)
        found = rest.undominated(seen, charged, cost)
        lower, missed = max(lower, found.lower_s), found.missed or missed
        complete = found.complete
        if not complete or seen.cost <= cost:
            break
    if seen.best is None and (
        rest := _Rest.of(seen.problem, *prices.surrogate(seen.problem, limit, np.inf), memory_bytes)
    ):
        found = rest.undominated(seen, charged, np.inf)
        lower, missed = max(lower, found.lower_s), found.missed or missed
    return Bounded(lower, missed, complete)


def possible(problem: Problem, costs: Sequence[Costs], most: Sequence[float]) -> Keep:
    """The variants (V_l,) that may be part of a choice of which every cost is at most `most`."""
    keep = {name: np.ones(len(own), bool) for name, own in problem.time.node.items()}
    for cost, bound in zip(costs, most, strict=True):
        if np.isfinite(bound):
            for name, lower in lower_bounds(cost, problem.base).items():
                keep[name] &= lower <= bound * SLACK
    return keep


def tighten(seen: Known, prices: Multipliers, minimise: Minimise) -> None:
    """Looks for what truly fits, with limits that are lower by what rows miss."""
    target = seen.limit
    for _ in range(TIGHTER):
        missed = _look(seen, prices, target)
        if missed <= 0 or missed >= target:
            break
        target -= missed
        prices = best_multipliers(seen.problem, target, minimise, prices)


def _look(seen: Known, prices: Multipliers, target: float) -> float:
    """Asks for true peaks of the fastest choices whose rows are within `target`, until one fits.

    How many bytes the first is beyond the limit.
    """
    fitting = sorted((met for met in prices.met if met.rows.max() <= target), key=lambda met: met.cost)
    missed = 0.0
    for met in fitting[:LOOKS]:
        if met.cost >= seen.cost:
            break
        over = seen.see(met.choice) - seen.limit
        if over <= 0:
            break
        missed = missed or over
    return missed


def least_memory(problem: Problem, *, memory_bytes: float = 2.0**31, known: Iterable[Choice] = ()) -> Least:
    """The choice of which the peak is the least. known: choices that may be it."""
    minimise = by_elimination(memory_bytes)
    game = least_rows(problem, minimise)
    seen = Known(problem, np.inf)
    for choice in [*known, *(m.choice for m in sorted(game.met, key=lambda met: float(met.rows.max()))[:LOOKS])]:
        seen.see(choice)
    costs = game.mixed()
    rest = _Rest.of(problem, costs, [seen.least_bytes] * len(costs), memory_bytes)
    lower = game.bound if rest is None else max(game.bound, rest.smallest(seen))
    assert seen.least is not None
    return Least(seen.least, seen.least_bytes, min(lower, seen.least_bytes))
