"""Problems, which ask for the fastest choice that fits into memory, and the best prices of a byte at the instants that
may be the fullest.

With a price on memory the problem is additive again, so elimination solves it: this is Lagrangian relaxation. The best
prices are found as by Dantzig and Wolfe (Oper. Res. 8(1), 1960). A linear program mixes the choices found so far such
that they fit on average in the least time, and its dual prices are the next prices. It begins without rows, and adds
those that the mixture exceeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from layerwise.cost.additive import Choice, Costs, Moved, weighted_sum
from layerwise.cost.model import CostTables
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.search.solve.eliminate import eliminate
from layerwise.search.solve.narrow import SLACK, SWEEPS, Messages

ROUNDS = 60  # the most eliminations
SHARE = 1e-6  # smaller shares of a mixture are rounding errors
CLOSE = 1e-6  # bounds that differ by less, as a fraction, are equal
Mixture = tuple[Floats, Floats, float]  # shares of choices, prices of rows, and the seconds or bytes of the mixture
DEAREST = 1e3  # exceeding the limit by the most of any choice costs at most so many unconstrained steps


Minimise = Callable[[Costs, Mapping[str, Ints]], tuple[Choice, float]]  # finds a good choice, and a lower bound of all


@dataclass(frozen=True, slots=True)
class Problem:
    """The tables of a problem.

    A *row* is an additive lower bound of the bytes that are alive at one instant, so no choice's peak is below it.
    """

    time: Costs  # seconds
    base: Mapping[str, Ints]  # (V_l,) the index of each variant's base
    row: Callable[[int], Costs]  # the table of a row, in bytes
    rows: Callable[[Choice], Floats]  # (R,) the bytes of a choice in every row
    changes: Callable[[Choice, Moved], Floats]  # (n, R) the bytes that each of n moves adds to every row
    simulate: Callable[[Choice], float]  # the peak of a choice, in bytes, which must fit
    _peaks: dict[tuple[int, ...], float] = field(default_factory=dict)  # a cache, also of a copy with other times

    def cost(self, choice: Choice) -> float:
        """Seconds of one choice."""
        return self.time.of(choice, self.base)

    def peak(self, choice: Choice) -> float:
        """The simulated peak of one choice."""
        key = tuple(choice[name] for name in self.base)
        if key not in self._peaks:
            self._peaks[key] = self.simulate(choice)
        return self._peaks[key]


def least_by_base(node: Floats, base: Ints) -> tuple[Floats, Ints]:
    """(B,) the cost and the index of the cheapest variant of every base."""
    order = np.lexsort((node, base))
    first = order[np.r_[True, np.diff(base[order]) > 0]]
    return node[first], first


def by_elimination(memory_bytes: float) -> Minimise:
    """Elimination: it finds the cheapest choice, with its cost as the bound, if tables of `memory_bytes` suffice."""

    def minimise(costs: Costs, base: Mapping[str, Ints]) -> tuple[Choice, float]:
        least = {name: least_by_base(node, base[name]) for name, node in costs.node.items()}
        found = eliminate(
            CostTables({}, {name: cost for name, (cost, _) in least.items()}, dict(costs.edge)), memory_bytes
        )
        return {name: int(least[name][1][i]) for name, i in found.choice.items()}, found.lower_bound_s

    return minimise


def by_messages(costs: Costs, base: Mapping[str, Ints]) -> tuple[Choice, float]:
    """A good choice and a bound from one sweep of message passing: on large tables far quicker than elimination."""
    least = {name: least_by_base(node, base[name]) for name, node in costs.node.items()}
    bounds = Messages(costs.edge, list(least)).bounds({name: cost for name, (cost, _) in least.items()}, SWEEPS)
    choice = {name: int(least[name][1][i]) for name, i in bounds.choice.items()}
    return choice, max(float(lower.min()) for lower in bounds.lower_s.values())


def lower_bounds(costs: Costs, base: Mapping[str, Ints]) -> dict[str, Floats]:
    """(V_l,) for each variant, a lower bound of the cost of all choices that have it, by message passing."""
    own = {name: least_by_base(node, base[name])[0] for name, node in costs.node.items()}
    lower = Messages(costs.edge, list(own)).bounds(own, SWEEPS).lower_s
    return {name: (lower[name] - own[name])[base[name]] + node for name, node in costs.node.items()}


def possible(base: Mapping[str, Ints], rows: Iterable[Costs], most: float) -> dict[str, Mask]:
    """(V_l,) True for variants that may be part of a choice of which no row is more than `most`."""
    keep = {name: np.ones(len(these), bool) for name, these in base.items()}
    for row in rows:
        for name, lower in lower_bounds(row, base).items():
            keep[name] &= lower <= most * SLACK
    return keep


@dataclass(frozen=True, slots=True)
class Met:
    """A choice that an elimination found."""

    choice: Choice
    cost: float
    rows: Floats  # (R,) bytes


@dataclass
class Prices:
    """Prices of rows, and the bound that they prove."""

    price: dict[int, float] = field(default_factory=dict)  # by row, in seconds a byte; for `least_rows` a share
    bound: float = -np.inf  # no choice that fits takes less time
    met: list[Met] = field(default_factory=list)  # what eliminations have found
    solved: dict[int, Costs] = field(default_factory=dict)  # the tables of rows that may have a price

    @staticmethod
    def begun(start: Prices | None) -> Prices:
        """An object without prices that begins with the choices and rows of `start`."""
        return Prices() if start is None else Prices(met=list(start.met), solved=dict(start.solved))

    @staticmethod
    def warm(problem: Problem, choices: Sequence[Choice], rows: Iterable[int]) -> Prices:
        """An object without prices that begins with these choices and rows."""
        met = [_known(problem, choice) for choice in choices]
        return Prices(met=met, solved={row: problem.row(row) for row in rows})

    def lightest(self, count: int) -> list[Met]:
        """The choices found whose fullest rows have the fewest bytes."""
        return sorted(self.met, key=lambda met: float(met.rows.max()))[:count]

    def taken(self, rows: Sequence[int]) -> Floats:
        """(rows, choices) bytes of the choices found in these rows."""
        return np.stack([met.rows for met in self.met])[:, rows].T

    @property
    def rows(self) -> list[Costs]:
        """The tables of the rows that have a price."""
        return [self.solved[row] for row in self.price]

    @property
    def charge(self) -> Costs:
        """The sum of the rows, each times its price; for `least_rows` their mean, which is never above the fullest."""
        return weighted_sum(list(self.price.values()), self.rows)

    def possible(self, base: Mapping[str, Ints], most: float) -> dict[str, Mask]:
        """(V_l,) True for variants that may be part of a choice of which no row is above `most`, by `least_rows`."""
        return possible(base, [self.charge, *self.rows], most)

    def mixture(self, limit: float) -> Floats:
        """(choices,) the share of each choice in the mixture that fits on average and takes the least time."""
        return _fit_on_average(self.met, self.taken(list(self.price)), limit, max(self.met[0].cost, 1e-30))[0]

    def exceeding(self, limit: float) -> list[Choice]:
        """The choices in the mixture that do not fit, that of the largest share first."""
        shares = self.mixture(limit) if self.price and self.met else np.zeros(0)
        order = [i for i in np.argsort(-shares).tolist() if shares[i] > SHARE]
        return [self.met[i].choice for i in order if self.met[i].rows.max() > limit]

    def least_s(self, problem: Problem, limit: float) -> dict[str, Floats]:
        """(V_l,) for each variant, a lower bound of the seconds of all choices within the limit that have it."""
        paid = weighted_sum([1.0, *self.price.values()], [problem.time, *self.rows])
        charged, alone = sum(self.price.values()) * limit, lower_bounds(problem.time, problem.base)
        lower = lower_bounds(paid, problem.base) if self.price else alone
        return {name: np.maximum(least - charged, alone[name]) for name, least in lower.items()}


def best_prices(problem: Problem, limit: float, minimise: Minimise, start: Prices | None = None) -> Prices:
    """Prices that make the bound of the least time within `limit` bytes as large as it gets.

    start: choices and rows from a search with another limit.
    """
    best = Prices.begun(start)
    if not best.met:
        choice, best.bound = minimise(problem.time, problem.base)
        best.met.append(_known(problem, choice))

    def mix(taken: Floats) -> Mixture:
        return _fit_on_average(best.met, taken, limit, max(best.met[0].cost, 1e-30))

    return _raised(problem, minimise, best, sorted(best.solved), mix, limit=limit)


def _raised(
    problem: Problem,
    minimise: Minimise,
    best: Prices,
    active: list[int],
    mix: Callable[[Floats], Mixture],
    *,
    limit: float | None = None,
    rounds: int = ROUNDS,
    enough: float = -np.inf,
) -> Prices:
    """Raises the bound: the best choice at the prices of the best mixture is one more choice to mix, and so on.

    active: the rows to begin with. limit: bytes, each of which has its price beside the seconds; None: bytes alone.
    """
    solved, time = False, [] if limit is None else [problem.time]
    for _ in range(rounds):
        mixture = _next(problem, best, active, mix, solved, limit)
        if mixture is None:
            break
        price, value = mixture
        rows = [best.solved[row] for row in price]
        costs = weighted_sum([*(1.0 for _ in time), *price.values()], [*time, *rows])
        choice, least = minimise(costs, problem.base)
        charged = 0.0 if limit is None else sum(price.values()) * limit
        if least - charged > best.bound:
            best.bound, best.price = least - charged, price
        solved = costs.of(choice, problem.base) - charged >= value - CLOSE * abs(value)
        best.met.append(_known(problem, choice))
        if best.met[-1].rows.max() <= enough:
            break
    return best


def _next(
    problem: Problem,
    best: Prices,
    active: list[int],
    mix: Callable[[Floats], Mixture],
    solved: bool,
    limit: float | None,
) -> tuple[dict[int, float], float] | None:
    """The prices of the best mixture of the choices found, and its value; None if the bound cannot become better.

    Rows that a mixture exceeds become `active`. mix: makes the mixture from the bytes of active rows. solved: whether
    its prices over these rows are the best. limit: bytes that no row of a mixture may exceed; None: its own value.
    """
    while True:
        best.solved |= {row: problem.row(row) for row in active if row not in best.solved}
        share, prices, value = mix(best.taken(active))
        near = np.isfinite(best.bound) and value <= best.bound + CLOSE * abs(best.bound)
        if not solved and not near:
            return {row: float(p) for row, p in zip(active, prices, strict=True) if p > 0}, value
        mixed = share @ np.stack([met.rows for met in best.met])
        mixed[active] = 0.0
        worst = int(mixed.argmax())
        if mixed[worst] <= (value if limit is None else limit) * (1 + CLOSE):
            return None
        active.append(worst)
        solved = False


def _known(problem: Problem, choice: Choice) -> Met:
    return Met(choice, problem.time.of(choice, problem.base), problem.rows(choice))


def _fit_on_average(met: list[Met], taken: Floats, limit: float, scale: float) -> Mixture:
    """The mixture of choices that fits on average and takes the least time: shares, prices of rows, and the time.

    Bytes above the limit are paid for at the highest price. taken: (rows, choices) bytes.
    """
    cost = np.array([m.cost for m in met]) / scale
    over = taken - limit
    much = float(np.abs(over).max(initial=1.0))
    over /= much
    count, rows = len(met), len(taken)
    matrix = np.zeros((rows + 1, count + 2 * rows))
    matrix[:rows, :count], matrix[rows, :count] = over, 1.0
    matrix[:rows, count : count + rows], matrix[:rows, count + rows :] = np.eye(rows), -np.eye(rows)
    costs = np.concatenate([cost, np.zeros(rows), np.full(rows, DEAREST)])
    basis = [count + row + rows * bool(over[row, 0] > 0) for row in range(rows)]
    solution, prices = simplex(costs, matrix, np.r_[np.zeros(rows), 1.0], [*basis, 0])
    return solution[:count], np.maximum(-prices[:rows], 0.0) * scale / much, float(costs @ solution) * scale


def least_rows(
    problem: Problem,
    minimise: Minimise,
    start: Prices | None = None,
    *,
    enough: float = 0.0,
    rounds: int = ROUNDS,
) -> Prices:
    """Shares of rows, which add up to 1, and the bound that they prove: no choice's peak is below so many bytes.

    This is a matrix game: one player mixes choices, the other rows. It ends early if a choice is found whose rows are
    at most `enough`.
    """
    best = Prices.begun(start)
    if not best.met:
        best.met.append(_known(problem, minimise(problem.time, problem.base)[0]))
    active = sorted({*best.solved, int(best.met[0].rows.argmax())})
    return _raised(problem, minimise, best, active, _fullest_on_average, rounds=rounds, enough=enough)


def _fullest_on_average(taken: Floats) -> Mixture:
    """The mixture of choices whose fullest row has the fewest bytes: shares of choices, shares of rows, and the bytes.

    taken: (rows, choices) bytes.
    """
    scale = max(float(taken.max()), 1.0)
    taken = taken / scale
    rows, count = taken.shape
    matrix = np.zeros((rows + 1, count + 1 + rows))  # choices, the fullest, room in each row
    matrix[:rows, :count], matrix[rows, :count] = taken, 1.0
    matrix[:rows, count], matrix[:rows, count + 1 :] = -1.0, np.eye(rows)
    costs = np.zeros(count + 1 + rows)
    costs[count] = 1.0
    fullest = int(taken[:, 0].argmax())
    basis = [count if row == fullest else count + 1 + row for row in range(rows)]
    solution, prices = simplex(costs, matrix, np.r_[np.zeros(rows), 1.0], [*basis, 0])
    shares = np.maximum(-prices[:rows], 0.0)
    return solution[:count], shares / max(shares.sum(), 1e-30), float(solution[count]) * scale


STEPS = 500  # the most steps; some hundred columns over some ten rows take tens
QUICK = 50  # the first steps take the steepest column, which is quicker, but may cycle
TOLERANCE = 1e-10


def simplex(cost: Floats, matrix: Floats, right: Floats, basis: Sequence[int]) -> tuple[Floats, Floats]:
    """Minimises cost·z over z >= 0 with matrix z = right: z (columns,) and its dual prices (rows,).

    cost: (columns,); matrix: (rows, columns); right: (rows,); basis: the columns of a feasible z, as many as there are
    rows. The least must be finite. In the end columns enter by Bland's rule (Math. Oper. Res. 2(2), 1977), which ends.
    """
    basis = list(basis)
    for step in range(STEPS):
        square = matrix[:, basis]
        prices = np.linalg.solve(square.T, cost[basis])
        reduced = cost - prices @ matrix
        cheaper = np.flatnonzero(reduced < -TOLERANCE)
        if not cheaper.size:
            break
        entering = int(reduced.argmin() if step < QUICK else cheaper[0])
        level, change = np.linalg.solve(square, np.stack([right, matrix[:, entering]], 1)).T
        shrinking = np.flatnonzero(change > TOLERANCE)
        if not shrinking.size:  # a rounding error: there is a least
            break
        ratio = level[shrinking] / change[shrinking]
        tied = shrinking[ratio <= ratio.min() + TOLERANCE]
        leaving = min(tied.tolist(), key=lambda row: basis[row])
        basis[leaving] = entering
    solution: Floats = np.zeros(len(cost))
    square = matrix[:, basis]
    solution[basis] = np.maximum(np.linalg.solve(square, right), 0.0)
    return solution, np.linalg.solve(square.T, cost[basis]).astype(np.float64)
