"""What bounds leave of a problem under a limit, and how it is enumerated; choices whose true peaks were looked at."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from layerwise.geometry.arrays import Mask
from layerwise.search.limit.additive import Capped, Choice, Problem, lower_bounds, outside
from layerwise.search.limit.enumerate import Completion, Criterion, Enumerated, Order, within
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
    """With rows near the peak of a choice that does not fit; None where they do not tell that it does not."""
    more = None if problem.nearer is None else problem.nearer(misfit)
    return more if more is not None and more.rows(misfit).max() > limit else None


@dataclass(frozen=True, slots=True)
class Bounded:
    """What an enumeration says."""

    lower_s: float  # nothing within the limit takes less
    missed: float  # bytes by which rows are below true peaks
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
        """Without the variants of which no choice is within all that is capped. None where tables are too large."""
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
        """How many true peaks an enumeration may ask for."""
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
        return Bounded(lower, missed, bool(np.isinf(found.dropped)))

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
