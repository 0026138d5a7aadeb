"""The best prices: what a byte costs at the instants that can be the fullest.

With a price on memory the problem is additive again, and elimination solves it: Lagrangian relaxation. The best prices
are found as Dantzig and Wolfe (Oper. Res. 8(1), 1960) do: the choices met so far are mixed so that they fit on average
in the least time, a linear program whose dual prices are the next prices. It starts without any row, and takes in
what the mixture exceeds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from layerwise.cost.additive import Choice, Costs, weighted_sum
from layerwise.geometry.arrays import Floats
from layerwise.search.priced.additive import Cap, Minimise, Problem, lower_bounds

ROUNDS = 60  # of elimination
SHARE = 1e-6  # less of a mixture is rounding
CLOSE = 1e-6  # of the bound: nearer to the best, it is the best
Mixture = tuple[Floats, Floats, float]  # shares of choices, prices of rows, and what the mixture takes
DEAREST = 1e3  # the most that any choice is beyond the limit costs at most that many times the unconstrained step


@dataclass(frozen=True, slots=True)
class Met:
    """A choice that an elimination found."""

    choice: Choice
    cost: float
    rows: Floats  # (R,) bytes


@dataclass
class Prices:
    """Prices of rows, and what they prove."""

    price: dict[int, float] = field(default_factory=dict)  # by row, a second a byte (of `least_rows`: a share)
    bound: float = -np.inf  # no choice that fits takes less
    met: list[Met] = field(default_factory=list)
    solved: dict[int, Costs] = field(default_factory=dict)  # the tables of the rows that were looked at

    @staticmethod
    def begun(start: Prices | None) -> Prices:
        """Prices without prices, with what `start` has met and looked at."""
        return Prices() if start is None else Prices(met=list(start.met), solved=dict(start.solved))

    @staticmethod
    def warm(problem: Problem, choices: Sequence[Choice], rows: Iterable[int]) -> Prices:
        """Prices without prices that begin with these choices, and these rows."""
        met = [_known(problem, choice) for choice in choices]
        return Prices(met=met, solved={row: problem.row(row) for row in rows})

    def lightest(self, count: int) -> list[Met]:
        """Returns, of the choices that were met, those whose fullest rows have the fewest bytes."""
        return sorted(self.met, key=lambda met: float(met.rows.max()))[:count]

    def taken(self, rows: Sequence[int]) -> Floats:
        """(rows, choices) bytes."""
        return np.stack([met.rows for met in self.met])[:, rows].T

    def charge(self, problem: Problem) -> Costs:
        """The cost of the bytes of all rows together."""
        return weighted_sum([0.0, *self.price.values()], [problem.time, *(self.solved[row] for row in self.price)])

    def mixture(self, limit: float) -> Floats:
        """(choices,) the shares of what was met in the mixture that fits on average and takes the least."""
        return _fit_on_average(self.met, self.taken(list(self.price)), limit, max(self.met[0].cost, 1e-30))[0]

    def exceeding(self, limit: float) -> list[Choice]:
        """Of what was met, what is in the mixture and does not fit, that of the largest share first."""
        shares = self.mixture(limit) if self.price and self.met else np.zeros(0)
        order = [i for i in np.argsort(-shares).tolist() if shares[i] > SHARE]
        return [self.met[i].choice for i in order if self.met[i].rows.max() > limit]

    def least_s(self, problem: Problem, limit: float) -> dict[str, Floats]:
        """(V_l,) seconds that every choice within the limit takes at least that contains a variant."""
        rows = [self.solved[row] for row in self.price]
        paid = weighted_sum([1.0, *self.price.values()], [problem.time, *rows])
        charged, alone = sum(self.price.values()) * limit, lower_bounds(problem.time, problem.base)
        lower = lower_bounds(paid, problem.base) if self.price else alone
        return {name: np.maximum(least - charged, alone[name]) for name, least in lower.items()}

    def capped(self, limit: float) -> list[Cap]:
        """The rows, none of which may have more bytes than the limit."""
        return [(self.solved[row], limit) for row in self.price]

    def mixed(self, most: float) -> list[Cap]:
        """The mean of the rows by their shares, and each of them. All are bytes, and bounds of the fullest row."""
        rows = [self.solved[row] for row in self.price]
        mean = weighted_sum(list(self.price.values()), rows)
        return [(row, most) for row in (mean, *rows)]


def best_prices(problem: Problem, limit: float, minimise: Minimise, start: Prices | None = None) -> Prices:
    """Prices that make the bound of the least time within `limit` bytes as large as it gets.

    start: what was met with other limits.
    """
    best = Prices.begun(start)
    active = sorted(best.solved)
    price: dict[int, float] = {}
    value, solved = np.inf, False  # of the mixture that the prices are from: what was met allows no better bound

    def mix(taken: Floats) -> Mixture:
        return _fit_on_average(best.met, taken, limit, max(best.met[0].cost, 1e-30))

    for _ in range(ROUNDS):
        if best.met:
            mixture = _next(problem, best, active, mix, solved, limit)
            if mixture is None:
                break
            price, value = mixture
        costs = weighted_sum([1.0, *price.values()], [problem.time, *(best.solved[row] for row in price)])
        choice, least = minimise(costs, problem.base)
        charged = sum(price.values()) * limit
        if least - charged > best.bound:
            best.bound, best.price = least - charged, price
        solved = costs.of(choice, problem.base) - charged >= value - CLOSE * abs(value)
        best.met.append(_known(problem, choice))
    return best


def _next(
    problem: Problem,
    best: Prices,
    active: list[int],
    mix: Callable[[Floats], Mixture],
    solved: bool,
    limit: float | None = None,
) -> tuple[dict[int, float], float] | None:
    """The prices of the best mixture of what was met, and its value; None where the bound is as good as it gets.

    Rows that a mixture exceeds become `active`. mix: the mixture by the bytes of active rows. solved: whether its
    prices over these are the best. limit: bytes that no row of a mixture may exceed; None: the value itself.
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
    """The mixture of choices that fits on average and takes the least: shares, prices of rows, and the time.

    taken: (rows, choices) bytes.
    What does not fit is paid for at the dearest price.
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
    """Shares of rows, that add up to 1, and the bound that they prove: no choice's peak is below so many bytes.

    A matrix game: one mixes choices, the other rows. It ends early where a choice is met whose rows are at most
    `enough`.
    """
    best = Prices.begun(start)
    if not best.met:
        best.met.append(_known(problem, minimise(problem.time, problem.base)[0]))
    active = sorted({*best.solved, int(best.met[0].rows.argmax())})
    solved = False
    for _ in range(rounds):
        mixture = _next(problem, best, active, _fullest_on_average, solved)
        if mixture is None:
            break
        price, value = mixture
        costs = weighted_sum(list(price.values()), [best.solved[row] for row in price])
        choice, least = minimise(costs, problem.base)
        if least > best.bound:
            best.bound, best.price = least, price
        solved = costs.of(choice, problem.base) >= value * (1 - CLOSE)
        best.met.append(_known(problem, choice))
        if best.met[-1].rows.max() <= enough:
            break
    return best


def _fullest_on_average(taken: Floats) -> Mixture:
    """The mixture of choices whose fullest row is the least: shares of choices, shares of rows, and the bytes.

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


STEPS = 500  # a bound: some hundreds of columns over some ten rows take tens
QUICK = 50  # steps by the steepest column, which is quicker, but may go round in circles
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
        if not shrinking.size:  # rounding: a least is promised
            break
        ratio = level[shrinking] / change[shrinking]
        tied = shrinking[ratio <= ratio.min() + TOLERANCE]
        leaving = min(tied.tolist(), key=lambda row: basis[row])
        basis[leaving] = entering
    solution: Floats = np.zeros(len(cost))
    square = matrix[:, basis]
    solution[basis] = np.maximum(np.linalg.solve(square, right), 0.0)
    return solution, np.linalg.solve(square.T, cost[basis]).astype(np.float64)
