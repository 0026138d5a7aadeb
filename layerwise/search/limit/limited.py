"""The fastest choice whose memory fits, with a proof or a gap; and the least memory of all.

1. The best multipliers bound the least time from below, and meet choices that fit.
2. Variants that the bound excludes go.
3. What is left is enumerated with exact costs to go, layer by layer. First only what no other partial choice dominates
   in time and in what its bytes cost in all priced rows together: that bounds the least time better, as the multipliers
   leave what a mixture of choices gains, and finds choices whose true peaks fit. Where there is room for it, then all
   that is within the bounds: the fastest whose true peak fits is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

import numpy as np

from layerwise.search.limit.additive import (
    Choice,
    Minimise,
    Problem,
    by_elimination,
    inside,
    outside,
)
from layerwise.search.limit.multipliers import Multipliers, best_multipliers, least_rows
from layerwise.search.limit.rest import Bounded, Known, Rest, possible
from layerwise.search.solve.prune import SLACK

T = TypeVar("T")  # what has a peak
NEAR = 0.02  # above the bound, what is looked at first
GAP = 0.005  # nearer to its bound, no more is looked for
SPARE = 0.001  # of the time: what is that near to another choice, and needs no less, may be left out
FAVOURED = 3  # times that rows are counted anew, near the peak of a choice that did not fit
WINDOWS = 4  # enumerations of what is within GAP of the bound: each raises it, or finds what fits
LOOKS = 4  # of what the multipliers have met, those whose true peaks are asked for
TIGHTER = 6  # rounds with a limit that is lower by what rows are below true peaks


@dataclass(frozen=True, slots=True)
class Limited:
    """The answer under a limit."""

    choice: Choice | None  # the fastest that was found to fit
    cost_s: float  # its cost; inf without
    lower_bound_s: float  # of all choices that fit; inf where it is proven that none does
    price: dict[int, float]  # by row, the seconds that a byte less costs

    @property
    def proven(self) -> bool:
        """Whether nothing that fits is faster, or nothing fits."""
        return self.cost_s <= self.lower_bound_s * SLACK


@dataclass(frozen=True, slots=True)
class Least(Generic[T]):
    """The least memory of all choices, or strategies."""

    best: T
    bytes: float  # its true peak
    lower_bound_bytes: float

    @property
    def proven(self) -> bool:
        """Whether nothing needs less."""
        return self.bytes <= self.lower_bound_bytes * SLACK


def fastest_within(
    problem: Problem,
    limit: float,
    *,
    memory_bytes: float = 2.0**31,
    known: Iterable[Choice] = (),
    met: Iterable[Choice] = (),
    prove: bool = True,
) -> Limited:
    """The choice that takes the least time of those whose peak is at most `limit` bytes.

    memory_bytes: bounds each table. known: choices that may fit. met: choices that multipliers start with. prove:
    enumerate all that a proof takes.
    """
    seen, minimise = Known(problem, limit), by_elimination(memory_bytes)
    for choice in known:
        seen.see(choice)
    prices = _priced(seen, minimise, met)
    if prices.bound == np.inf or not prove:
        return Limited(seen.best, seen.cost, min(prices.bound, seen.cost), prices.price)
    lower = prices.bound
    if seen.cost > lower * SLACK:
        lower = max(lower, _enumerated(seen, prices, minimise, memory_bytes))
    if seen.cost > lower * (1 + GAP) and problem.anew is not None:
        lower = max(lower, _near(seen, prices, minimise, min(seen.cost, lower * (1 + NEAR)), memory_bytes))
    return Limited(seen.best, seen.cost, min(lower, seen.cost), prices.price)


def _priced(seen: Known, minimise: Minimise, met: Iterable[Choice]) -> Multipliers:
    """The best multipliers, of which the bound is inf where nothing fits; looks for what truly fits near them."""
    prices = best_multipliers(seen.problem, seen.limit, minimise, met=met)
    if not any(met.rows.max() <= seen.limit for met in prices.met):
        least = least_rows(seen.problem, minimise, prices, enough=seen.limit)
        if least.bound > seen.limit * SLACK:
            return replace(prices, bound=np.inf)
        prices = replace(prices, met=least.met, solved=least.solved)
    tighten(seen, prices, minimise)
    return prices


def _near(seen: Known, prices: Multipliers, minimise: Minimise, cost: float, memory_bytes: float) -> float:
    """Looks for the fastest choice of at most `cost`, with rows counted anew: a lower bound of all that fit."""
    problem = seen.problem
    keep = possible(problem, *prices.criteria(problem, seen.limit, cost))
    if not all(mask.any() for mask in keep.values()):
        return cost
    lower, favour = prices.bound, next(iter(inside([] if seen.misfit is None else [seen.misfit], keep)), None)
    assert problem.anew is not None
    for _ in range(FAVOURED):
        small = Known(problem.anew(keep, favour), seen.limit)
        if favour is not None and small.problem.rows(favour).max() <= seen.limit * SLACK:
            break  # there is nothing more to it
        for choice in inside([] if seen.best is None else [seen.best], keep):
            small.see(choice)
        closer = _priced(small, minimise, inside(prices.nearest(), keep))
        lower = max(lower, closer.bound)
        if min(small.cost, cost) > lower * SLACK:
            lower = max(lower, _enumerated(small, closer, minimise, memory_bytes))
        if small.best is not None:
            seen.see(outside(small.best, keep))
        favour = small.misfit
        if favour is None or min(seen.cost, cost) <= lower * (1 + GAP):
            break
    return min(lower, cost)


def _enumerated(seen: Known, prices: Multipliers, minimise: Minimise, memory_bytes: float) -> float:
    """Looks for the fastest choice among all that bounds leave: a lower bound of all that fit."""
    found = _by_windows(seen, prices, seen.limit, memory_bytes)
    if seen.cost > found.lower_s * (1 + GAP) and found.missed > 0:
        target = seen.limit - found.missed
        _by_windows(seen, best_multipliers(seen.problem, target, minimise, prices), target, memory_bytes)
    lower = found.lower_s
    if found.complete and seen.cost > lower * SLACK:
        rest = Rest.of(seen.problem, *prices.criteria(seen.problem, seen.limit, seen.cost), memory_bytes)
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
        rest = Rest.of(seen.problem, *prices.surrogate(seen.problem, limit, cost), memory_bytes)
        if rest is None:
            return Bounded(lower, missed, False)
        found = rest.undominated(seen, charged, cost, SPARE * lower)
        lower, missed = max(lower, found.lower_s), found.missed or missed
        complete = found.complete
        if not complete or seen.cost <= cost:
            break
    if seen.best is None and (
        rest := Rest.of(seen.problem, *prices.surrogate(seen.problem, limit, np.inf), memory_bytes)
    ):
        found = rest.undominated(seen, charged, np.inf, SPARE * lower)
        lower, missed = max(lower, found.lower_s), found.missed or missed
    return Bounded(lower, missed, complete)


def tighten(seen: Known, prices: Multipliers, minimise: Minimise) -> None:
    """Looks for what truly fits, with limits that are lower by what rows miss."""
    target = seen.limit
    for _ in range(TIGHTER):
        lower = _look(seen, prices, target)
        if not 0 < lower < target:
            break
        target = lower
        prices = best_multipliers(seen.problem, target, minimise, prices)


def _look(seen: Known, prices: Multipliers, target: float) -> float:
    """Asks for true peaks of the fastest choices whose rows are within `target`, until one fits.

    A lower target: the limit less what the rows of the first are below its peak. Infinite where that fits.
    """
    fitting = sorted((met for met in prices.met if met.rows.max() <= target), key=lambda met: met.cost)
    lower = np.inf
    for met in fitting[:LOOKS]:
        if met.cost >= seen.cost:
            break
        peak = seen.see(met.choice)
        if peak <= seen.limit:
            break
        if lower == np.inf:
            lower = seen.limit - (peak - float(met.rows.max()))
    return lower


def least_memory(problem: Problem, *, memory_bytes: float = 2.0**31, known: Iterable[Choice] = ()) -> Least[Choice]:
    """The choice of which the peak is the least. known: choices that may be it."""
    minimise = by_elimination(memory_bytes)
    game = least_rows(problem, minimise)
    seen = Known(problem, np.inf)
    for choice in [*known, *(m.choice for m in sorted(game.met, key=lambda met: float(met.rows.max()))[:LOOKS])]:
        seen.see(choice)
    costs = game.mixed()
    rest = Rest.of(problem, costs, [seen.least_bytes] * len(costs), memory_bytes)
    lower = game.bound if rest is None else max(game.bound, rest.smallest(seen))
    assert seen.least is not None
    return Least(seen.least, seen.least_bytes, min(lower, seen.least_bytes))
