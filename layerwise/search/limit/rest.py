"""What bounds leave of a problem under a limit, and how it is enumerated; choices whose true peaks were looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from layerwise.geometry.arrays import Mask
from layerwise.search.limit.additive import Choice, Costs, Problem, lower_bounds, outside
from layerwise.search.limit.completion import Completion, Order
from layerwise.search.limit.enumerate import Criterion, Enumerated, within
from layerwise.search.solve.prune import SLACK, Keep

NUMBERS = 1e8  # that an enumeration may form: one or two seconds
CHECKS = 2000  # layers times true peaks that an enumeration may ask for: about a second


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
            if peak > self.limit:
                self.misfit = choice
            elif (cost := self.problem.cost(choice)) < self.cost:
                self.best, self.cost = choice, cost
        return self.peaks[key]


@dataclass(frozen=True, slots=True)
class Bounded:
    """What an enumeration says."""

    lower_s: float  # nothing within the limit takes less
    missed: float  # bytes by which rows are below true peaks
    complete: bool  # whether there was room for everything


@dataclass(frozen=True, slots=True)
class Rest:
    """The variants that bounds leave, to be enumerated. The first cost decides what goes where there is no room."""

    problem: Problem  # over what is left
    keep: Mapping[str, Mask]
    order: Order
    completions: list[Completion]  # of the costs

    @staticmethod
    def of(problem: Problem, costs: Sequence[Costs], most: Sequence[float], memory_bytes: float) -> Rest | None:
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
        return Rest(small, keep, order, [Completion.of(cost, small.base, order) for cost in left])

    @property
    def checks(self) -> int:
        """How many true peaks an enumeration may ask for."""
        return max(8, CHECKS // len(self.keep))

    def enumerate(
        self, most: Sequence[float], dominance: tuple[int, int] | None = None, step: float = 0.0
    ) -> Enumerated:
        """All choices with every cost at most `most`, as far as NUMBERS allow."""
        criteria = [Criterion(c, bound * SLACK) for c, bound in zip(self.completions, most, strict=True)]
        variants = sum(map(len, self.problem.base.values()))
        room = NUMBERS if dominance else NUMBERS / 4  # what all have is seldom little enough
        width = max(1, int(room / (variants * len(criteria))))
        return within(criteria, self.order, self.problem.base, width, dominance, step)

    def undominated(self, seen: Known, charged: float, cost: float, spare: float) -> Bounded:
        """Looks for choices of at most `cost` that no others beat in time and in what their bytes cost together.

        The costs are those of `Multipliers.surrogate`. True peaks are asked for where rows are so far within the limit
        as they were seen to be below peaks. spare: seconds by which what beats others may take longer.
        """
        most = [cost + spare + charged, cost + spare, charged]
        found = self.enumerate(most, (1, 2), spare / len(self.order.names))
        lower, checks, missed = min(found.dropped - charged - spare, cost), self.checks, 0.0
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


def possible(problem: Problem, costs: Sequence[Costs], most: Sequence[float]) -> Keep:
    """The variants (V_l,) that may be part of a choice of which every cost is at most `most`."""
    keep = {name: np.ones(len(own), bool) for name, own in problem.time.node.items()}
    for cost, bound in zip(costs, most, strict=True):
        if np.isfinite(bound):
            for name, lower in lower_bounds(cost, problem.base).items():
                keep[name] &= lower <= bound * SLACK
    return keep
