"""Choose: elimination with a price on memory, the second stage of a search under a limit.

With a price on each row that is exceeded the problem is additive, so elimination solves it. That gives a lower bound of
the time of all choices that fit, and one more choice. The best prices come from the choices found so far
(`priced.prices`). Peaks of choices are simulated in the order of their time. If the rows of a choice are within the
limit and its peak is not, the limit for rows is lowered by the difference.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import replace
from itertools import count

import numpy as np

from layerwise.cost.additive import Choice, Costs, weighted_sum
from layerwise.geometry.arrays import Mask
from layerwise.search.priced.prices import DEAREST, SHARE, Minimise, Prices, Problem, best_prices, least_rows
from layerwise.search.solve.narrow import SLACK

LOOKS = 4  # the most peaks to simulate of the choices that one search for prices has found
GAP = 0.002  # a choice within this fraction of its bound is not made faster
FEW = 16  # a network of at most so many layers has few
CASES = (48, 12)  # the most cases to divide, with few layers and with more
TRIED = 3  # with more layers, so many cases must close a quarter of the gap, or no more are divided
NEAR = (0.005, 0.01)  # gaps that are small enough, with few layers and with more
TIGHTER = 6  # the most rounds with a lowered limit for rows
FACTORS = (0.3, 0.5, 0.7, 0.85, 0.95, 1.05, 1.2, 1.5, 2.0, 4.0)  # times the best prices, for other choices


class Seen:
    """The choices whose peaks were simulated, and the fastest that fits."""

    def __init__(self, problem: Problem, limit: float, exact: Callable[[Choice], float] | None = None) -> None:
        """exact: the seconds of a choice, if the problem's are a lower bound."""
        self.problem, self.limit, self.exact = problem, limit, exact or problem.cost
        self.best: Choice | None = None
        self.cost = np.inf

    def fits(self, choice: Choice) -> bool:
        """True if the simulated peak of a choice is within the limit; rows above it need no simulation."""
        return bool(self.problem.rows(choice).max() <= self.limit) and self.peak(choice) <= self.limit

    def peak(self, choice: Choice) -> float:
        """The simulated peak of a choice, in bytes. If it fits and is the fastest so far, it becomes `best`."""
        peak = self.problem.peak(choice)
        if peak <= self.limit and (cost := self.exact(choice)) < self.cost:
            self.best, self.cost = choice, cost
        return peak

    def choose(self, minimise: Minimise, start: Prices | None = None) -> Prices:
        """Searches for the fastest choice that fits. Returns the best prices; their bound is inf if nothing fits."""
        best = prices = best_prices(self.problem, self.limit, minimise, start)
        if not any(met.rows.max() <= self.limit for met in prices.met):
            least = least_rows(self.problem, minimise, prices, enough=self.limit)
            if least.bound > self.limit * SLACK:
                return replace(prices, bound=np.inf)
            best = prices = replace(prices, met=least.met, solved=least.solved)
        target = self.limit
        for _ in range(TIGHTER):
            lower = self._look(prices, target)
            if not 0 < lower < target:
                break
            target = lower
            prices = best_prices(self.problem, target, minimise, prices)
        return replace(best, met=prices.met, solved=prices.solved)

    def cases(self, prices: Prices, minimise: Minimise) -> float:
        """A better lower bound, by cases: a layer has one of its lighter variants, or one of its heavier ones.

        The least bound of all cases is the bound. The case that has it is divided next, until the gap is small.
        """
        many = len(self.problem.base) > FEW
        # Variants that a case excludes cost more than any price on memory (`prices.DEAREST`).
        tables = (*self.problem.time.node.values(), *self.problem.time.edge.values())
        most, number = DEAREST**2 * max(sum(float(table.max()) for table in tables), 1e-30), count()
        cases: list[tuple[float, int, Problem, Prices]] = [(prices.bound, next(number), self.problem, prices)]
        start = prices.bound
        for divided in range(CASES[many]):
            if many and divided == TRIED and cases and cases[0][0] - start < (self.cost - start) / 4:
                break  # many layers make up the gap, and a few cases do not close it
            if not cases or cases[0][0] * (1 + NEAR[many]) >= self.cost:
                break
            bound, _, problem, prices = cases[0]
            lighter = self._lighter(problem, prices) or self._another(problem, prices, most)
            if lighter is None:
                break
            heapq.heappop(cases)
            name, light = lighter
            for side in (light, ~light) if light.any() else ():  # else only the choices found are left, and none fits
                own = np.where(side, problem.time.node[name], most)
                case = replace(problem, time=Costs({**problem.time.node, name: own}, problem.time.edge))
                begin = Prices(met=[m for m in prices.met if side[m.choice[name]]], solved=dict(prices.solved))
                found = best_prices(case, self.limit, minimise, begin)
                self._look(found, self.limit)
                if found.bound < self.cost and found.met:
                    heapq.heappush(cases, (max(bound, found.bound), next(number), case, found))
        return min(cases[0][0] if cases else np.inf, self.cost)

    def _lighter(self, problem: Problem, prices: Prices) -> tuple[str, Mask] | None:
        """The layer whose bytes cost the most different amounts in the mixture, and its lighter variants."""
        if not prices.price or not prices.met:
            return None
        shares, charge = prices.mixture(self.limit), prices.charge
        mixed = [prices.met[i].choice for i in np.flatnonzero(shares > SHARE)]
        share, most, found = shares[shares > SHARE], 0.0, None
        if len(mixed) < 2:
            return None
        for name, cost in charge.beside(mixed[0], problem.base).items():
            taken = np.array([cost[choice[name]] for choice in mixed])
            apart = float(share @ (taken - share @ taken / share.sum()) ** 2)
            if apart > most and np.ptp(taken) > 1e-9 * abs(taken).max():
                most, found = apart, (name, cost <= (taken.min() + taken.max()) / 2)
        return found

    def _another(self, problem: Problem, prices: Prices, most: float) -> tuple[str, Mask] | None:
        """If the fastest choice does not fit, but its rows do: the layer with most variants, and the chosen one."""
        choice = min(prices.met, key=lambda m: m.cost).choice
        if self.peak(choice) <= self.limit:
            return None
        sizes = {name: int((cost < most).sum()) for name, cost in problem.time.node.items()}
        name = max(sizes, key=sizes.__getitem__)
        alone = np.arange(len(problem.base[name])) == choice[name]
        return name, alone if sizes[name] > 1 else np.zeros_like(alone)

    def others(self, prices: Prices, minimise: Minimise) -> list[Choice]:
        """The choices found, and the cheapest ones at other prices. Peaks of those that may fit are simulated."""
        found = [met.choice for met in prices.met]
        for factor in FACTORS if prices.price else ():
            paid = weighted_sum([1.0, factor], [self.problem.time, prices.charge])
            found.append(minimise(paid, self.problem.base)[0])
        for choice in sorted(found, key=self.problem.cost):
            if self.problem.cost(choice) < self.cost:
                self.fits(choice)
        return found

    def _look(self, prices: Prices, target: float) -> float:
        """Simulates peaks until one fits. Returns the limit, lowered by what rows are below peaks; inf if none was."""
        fitting = sorted((met for met in prices.met if met.rows.max() <= target), key=lambda met: met.cost)
        lower = np.inf
        for met in fitting[:LOOKS]:
            if met.cost >= self.cost:
                break
            peak = self.peak(met.choice)
            if peak <= self.limit:
                break
            lower = min(lower, self.limit - (peak - float(met.rows.max())))
        return lower
