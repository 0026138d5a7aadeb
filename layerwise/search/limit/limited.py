"""The fastest choice whose memory fits, with a proof or a gap; and the least memory of all.

1. The best multipliers bound the least time from below, and meet choices that fit. Where rows are within the limit and
   the true peak is not, rows that are near this peak are added.
2. Branch and bound (`branch`) decides for the few layers that matter most.
3. What bounds leave is enumerated with exact costs to go, layer by layer. First only what no other partial choice
   dominates in time and in what its bytes cost in all priced rows together: that bounds the least time better where
   many layers differ by little, and finds choices whose true peaks fit. Where there is room for it, then all that is
   within the bounds: the fastest whose true peak fits is the answer.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial
from typing import Generic, TypeVar

import numpy as np

from layerwise.search.limit.additive import Choice, Minimise, Problem, by_elimination
from layerwise.search.limit.multipliers import Multipliers, best_multipliers, least_rows
from layerwise.search.limit.rest import Bounded, Known, Rest, branch, nearer
from layerwise.search.solve.narrow import SLACK

T = TypeVar("T")  # what has a peak
GAP = 0.005  # nearer to its bound, no more is looked for
SPARE = 0.001  # of the time: what is that near to another choice, and needs no less, may be left out
FAVOURED = 3  # times that rows are added, near the peak of a choice that did not fit
ROOM = (0.1, 1.0)  # of the numbers that an enumeration may form: of one after the other
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
        """True if nothing that fits is faster, or nothing fits."""
        return self.cost_s <= self.lower_bound_s * SLACK


@dataclass(frozen=True, slots=True)
class Least(Generic[T]):
    """The least memory of all choices, or strategies."""

    best: T
    bytes: float  # its true peak
    lower_bound_bytes: float

    @property
    def proven(self) -> bool:
        """True if nothing needs less."""
        return self.bytes <= self.lower_bound_bytes * SLACK


def fastest_within(
    problem: Problem,
    limit: float,
    *,
    memory_bytes: float = 2.0**31,
    known: Iterable[Choice] = (),
    prove: bool = True,
) -> Limited:
    """The choice that takes the least time of those whose peak is at most `limit` bytes.

    memory_bytes: bounds each table. known: choices that may fit. prove: do all that a proof takes, not only look at
    the best of what bounds leave.
    """
    seen, minimise = Known(problem, limit), by_elimination(memory_bytes)
    for choice in known:
        seen.see(choice)
    prices = _priced(problem, limit, None, minimise)
    if prices.bound < np.inf:
        tighten(seen, prices, minimise)
        prices = _nearer(seen, prices, minimise)
    lower = prices.bound
    if lower == np.inf:
        return Limited(seen.best, seen.cost, min(lower, seen.cost), prices.price)
    before = seen.problem
    if prove and seen.cost > lower * (1 + GAP):
        lower = max(lower, branch(seen, prices, partial(_priced, minimise=minimise), _look, GAP))
        if seen.problem is not before:
            prices = _priced(seen.problem, limit, prices.over(seen.problem), minimise)
    if seen.cost > lower * (SLACK if prove else 1 + GAP):
        lower = max(lower, _enumerated(seen, prices, memory_bytes, prove))
    return Limited(seen.best, seen.cost, min(lower, seen.cost), prices.price)


def _priced(problem: Problem, limit: float, begin: Multipliers | None, minimise: Minimise) -> Multipliers:
    """The best multipliers, of which the bound is inf where nothing fits."""
    prices = best_multipliers(problem, limit, minimise, begin)
    if not any(met.rows.max() <= limit for met in prices.met):
        least = least_rows(problem, minimise, prices, enough=limit)
        if least.bound > limit * SLACK:
            return replace(prices, bound=np.inf)
        prices = replace(prices, met=least.met, solved=least.solved)
    return prices


def _nearer(seen: Known, prices: Multipliers, minimise: Minimise) -> Multipliers:
    """Better multipliers: of rows that are near the peaks of choices of which all rows are within the limit."""
    for _ in range(FAVOURED):
        if seen.cost <= prices.bound * (1 + GAP):
            break
        seen.misfit = None
        _look(seen, prices, seen.limit)
        more = None if seen.misfit is None else nearer(seen.problem, seen.misfit, seen.limit)
        if more is None:
            break
        seen.problem = more
        prices = _priced(seen.problem, seen.limit, prices.over(seen.problem), minimise)
        tighten(seen, prices, minimise)
    return prices


def _enumerated(seen: Known, prices: Multipliers, memory_bytes: float, prove: bool) -> float:
    """Looks for the fastest choice among all that bounds leave: a lower bound of all that fit."""
    shares = ROOM if prove else ROOM[:1]
    found = _beams(seen, prices, memory_bytes, shares)
    lower = found.lower_s
    if found.complete and seen.cost > lower * SLACK and prove:
        rest = Rest.of(seen.problem, prices.criteria(seen.problem, seen.limit, seen.cost), memory_bytes)
        lower = lower if rest is None else max(lower, rest.fastest(seen))
    return lower


def _beams(seen: Known, prices: Multipliers, memory_bytes: float, shares: Iterable[float]) -> Bounded:
    """Enumerates what no other choice beats, first the best of it, then with more room, until the gap is closed."""
    lower, complete = prices.bound, True
    for share in shares if prices.price else ():
        if seen.cost <= lower * SLACK:
            break
        spare, cost = SPARE * lower, seen.cost
        rest = Rest.of(seen.problem, prices.surrogate(seen.problem, seen.limit, cost + spare), memory_bytes)
        if rest is None:
            return Bounded(lower, False)
        found = rest.undominated(seen, cost, spare, share)
        lower, complete = max(lower, found.lower_s), found.complete
        if complete or seen.cost <= lower * (1 + GAP):
            break
    return Bounded(lower, complete)


def tighten(seen: Known, prices: Multipliers, minimise: Minimise) -> None:
    """Looks for what truly fits, with limits that are lower by what rows miss."""
    target = seen.limit
    for _ in range(TIGHTER):
        lower = _look(seen, prices, target)
        if not 0 < lower < target:
            break
        target = lower
        prices = best_multipliers(seen.problem, target, minimise, prices)


def _look(seen: Known, prices: Multipliers, target: float = np.inf) -> float:
    """Asks for true peaks of the fastest choices whose rows are within `target`, until one fits.

    A lower target: the limit less what the rows of the first are below its peak. Infinite where that fits.
    """
    target = min(target, seen.limit)
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
    for choice in [*known, *(met.choice for met in game.lightest(LOOKS))]:
        seen.see(choice)
    rest = Rest.of(problem, game.mixed(seen.least_bytes), memory_bytes)
    lower = game.bound if rest is None else max(game.bound, rest.smallest(seen))
    assert seen.least is not None
    return Least(seen.least, seen.least_bytes, min(lower, seen.least_bytes))
