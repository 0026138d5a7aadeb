"""Moves: a choice becomes better, a few layers at a time. They make seconds fewer, as long as a choice fits, or bytes.

A move gives other variants to one layer, to layers that are alike, or to two neighbours; it takes over a connected part
in which another choice differs; or it is a faster and a lighter move together. The moves that an additive guide shows
to be best come first. Nothing is simulated that rows exclude. Under a limit, moves that are no neighbours are made at
once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from layerwise.cost.additive import Choice, Costs, Moved, edges_of
from layerwise.cost.model import EdgeName
from layerwise.geometry.arrays import Floats
from layerwise.search.priced.choose import GAP, Seen
from layerwise.search.priced.prices import Problem, least_by_base

Together = Callable[[Choice], Iterable[Moved]]  # moves of several layers that are alike
STARTS = 4  # the most choices from which moves start
FAR = 1.05  # starts that take more than so many times the best are skipped
PEAKS = 100  # the most peaks to simulate from one start
MISSED = 0.02  # rows are taken to be at most this fraction of the limit below the peak
MISSES = 12  # so many simulations in vain end a round, of simple moves and of pairs
TOP = 32  # the number of faster moves to make pairs of
LEAST = 1e-9  # the least gain, as a fraction
REPAIRS = 40  # the most moves to make a choice fit
SHARE = 0.02  # a repair frees at least this fraction of what does not fit
LIGHTER = 128  # of so many moves of the same layers, all rows of bytes are computed


@dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """The goal of moves: the value that they make smaller, and the limit that they keep."""

    value: Callable[[Choice], float]
    guide: Callable[[Choice], Costs]  # an additive lower bound of the value, to order the moves of a choice
    rows: bool = False  # whether the problem's rows are lower bounds of the value, too; else the guide is the value
    limit: Seen | None = None  # whose peaks must be within its limit
    gain: float = LEAST  # the least fraction that a move must gain
    swaps: bool = False  # whether a faster and a lighter move are tried together
    neighbours: bool = False  # whether moves of two neighbours are
    misses: int = MISSES
    looked: int | None = None  # of moves of the same layers, the number of which all rows are computed; None: all


@dataclass(frozen=True, slots=True)
class _Bounded:
    """Moves of the same layers, with a number each."""

    moved: Moved
    bounds: Floats  # (n,)

    def move(self, i: int) -> Choice:
        return {name: int(variants[i]) for name, variants in self.moved.items()}


class Moves:
    """Moves between the choices of a problem.

    others: choices whose parts others may take over. edges: of the graph, if the problem's time is of some alone.
    """

    def __init__(
        self,
        problem: Problem,
        together: Together,
        others: Iterable[Choice] = (),
        edges: Iterable[EdgeName] | None = None,
    ) -> None:
        self.problem, self.together, self.left = problem, together, 0  # how many choices may be simulated
        self.others = list({tuple(choice.values()): choice for choice in others}.values())
        self.edges = edges_of(problem.base, problem.time.edge if edges is None else edges)

    def descend(self, choice: Choice, goal: Goal, left: int, enough: float = -np.inf) -> Choice:
        """The best choice that successive moves reach.

        left: the number of choices to simulate. enough: the value at which it ends.
        """
        self.left, better = left, None
        while goal.value(choice) > enough and self.left > 0 and (better := self._better(choice, goal)) is not None:
            choice = better
        return choice

    def _better(self, choice: Choice, goal: Goal) -> Choice | None:
        """A better choice, by simple moves or by pairs; None if there is none."""
        seen, missed, target = goal.limit, 0.0, goal.value(choice) * (1 - goal.gain)
        if seen is not None:
            fullest = float(seen.problem.rows(choice).max())
            missed = min(seen.peak(choice) - fullest, MISSED * seen.limit)
        for moves in self._rounds(choice, goal, target, missed):
            taken, near, misses = choice, set[str](), 0
            for move in moves:
                if misses == goal.misses or self.left <= 0:
                    break
                other = taken | move
                if near & move.keys() or self._excluded(other, goal, target, missed):
                    continue
                self.left -= 1
                if goal.value(other) < target and (seen is None or seen.fits(other)):
                    if seen is None:
                        return other
                    taken, target = other, goal.value(other) * (1 - goal.gain)
                    near.update(*(edge[:2] for name in move for edge in self.edges[name]), move)
                else:
                    misses += 1
            if near:
                return taken
        return None

    def _rounds(self, choice: Choice, goal: Goal, target: float, missed: float) -> Iterator[Iterator[Choice]]:
        """Simple moves, then two at once, each round if the one before it does not help."""
        simple = list(self._simple(choice))
        yield self._ordered(choice, simple, goal, target, missed)
        if goal.swaps and goal.limit is not None:
            yield self._swaps(choice, simple, goal, goal.limit, target)
        if goal.neighbours:
            yield self._ordered(choice, self._neighbours(goal.guide(choice)), goal, target, missed)

    def _excluded(self, choice: Choice, goal: Goal, target: float, missed: float) -> bool:
        """True if rows show that a choice is not better, or does not fit."""
        seen = goal.limit
        vain = goal.rows and self.problem.rows(choice).max() >= target
        return vain or (seen is not None and float(seen.problem.rows(choice).max()) + missed > seen.limit)

    # ---- the moves from a choice ----

    def _simple(self, choice: Choice) -> Iterator[Moved]:
        """Moves of one layer, of layers that are alike, and to parts of other choices."""
        yield from ({name: np.arange(len(these))} for name, these in self.problem.base.items())
        yield from self.together(choice)
        for other in self.others:
            for part in self._parts(choice, other):
                yield {name: np.array([variant]) for name, variant in part.items()}

    def _parts(self, choice: Choice, other: Choice) -> Iterator[Choice]:
        """The connected parts in which another choice differs, of several layers."""
        left = {name for name in choice if choice[name] != other[name]}
        while left:
            part, waiting = set[str](), [left.pop()]
            while waiting:
                part.add(name := waiting.pop())
                near = {end for edge in self.edges[name] for end in edge[:2]} & left
                left -= near
                waiting += near
            if len(part) > 1:
                yield {name: other[name] for name in part}

    def _neighbours(self, guide: Costs) -> Iterator[Moved]:
        """Moves of two neighbours, to each pair of bases, in the variants of these that the guide prefers."""
        base = self.problem.base
        light = {name: least_by_base(cost, base[name])[1] for name, cost in guide.node.items()}
        for u, v in dict.fromkeys(edge[:2] for edge in self.problem.time.edge):
            both = np.indices((len(light[u]), len(light[v]))).reshape(2, -1)
            yield {u: light[u][both[0]], v: light[v][both[1]]}

    def _ordered(
        self, choice: Choice, moves: Iterable[Moved], goal: Goal, target: float, missed: float = 0.0
    ) -> Iterator[Choice]:
        """The moves after which a choice may be better and fit, the best first."""
        base, guide, found = self.problem.base, goal.guide(choice), list[_Bounded]()
        now = guide.of(choice, base)
        rows = self.problem.rows(choice) if goal.rows else None
        fullest = None if goal.limit is None else self._fullest(choice, goal.limit.problem)
        for move in moves:
            bounds = now + guide.change(choice, move, base, self.edges)
            worth = np.flatnonzero(bounds < target)
            if not len(worth):
                continue
            if goal.looked is not None and len(worth) > goal.looked:
                worth = worth[bounds[worth].argpartition(goal.looked)[: goal.looked]]
            move, bounds = {name: variants[worth] for name, variants in move.items()}, bounds[worth]
            if rows is not None:
                bounds = (self.problem.changes(choice, move) + rows).max(1)
            keep = bounds < target
            if fullest is not None and goal.limit is not None:
                keep &= fullest[1] + fullest[0].change(choice, move, base, self.edges) <= goal.limit.limit - missed
            if keep.any():
                found.append(_Bounded({name: variants[keep] for name, variants in move.items()}, bounds[keep]))
        yield from (move for _, move in _sorted(found))

    def _fullest(self, choice: Choice, problem: Problem) -> tuple[Costs, float]:
        """The fullest row of a choice, and its bytes."""
        rows = problem.rows(choice)
        return problem.row(int(rows.argmax())), float(rows.max())

    def _swaps(
        self, choice: Choice, simple: Sequence[Moved], goal: Goal, seen: Seen, target: float
    ) -> Iterator[Choice]:
        """Pairs of a move that is faster and needs more memory, and one that needs less, the best first."""
        guide, (row, _) = goal.guide(choice), self._fullest(choice, seen.problem)
        room = seen.limit - seen.peak(choice)
        every = [(move, *self._changes(choice, move, guide, row)) for move in simple]
        faster = list(islice(_sorted([_Bounded(m, np.where(s < 0, s, np.inf)) for m, s, _ in every]), TOP))
        if not faster:
            return
        most, slower = -faster[0][0], list[_Bounded]()
        for move, seconds, bytes_ in every:
            less, ratio = (bytes_ < 0) & (seconds > 0) & (seconds < most), np.full(seconds.shape, np.inf)
            ratio[less] = seconds[less] / -bytes_[less]  # seconds a byte less
            slower.append(_Bounded(move, ratio))

        def known(moves: Iterable[tuple[float, Choice]]) -> list[tuple[float, float, Choice]]:
            each = ((self._changes(choice, move, guide, row), move) for _, move in moves)
            return [(float(seconds), float(bytes_), move) for (seconds, bytes_), move in each]

        more, lighter = known(faster), known(islice(_sorted(slower), 4 * TOP))
        both = [
            (gain + cost, one | two)
            for gain, taken, one in more
            for cost, freed, two in lighter
            if gain + cost < 0 and taken + freed <= room and not one.keys() & two.keys()
        ]
        best = [move for _, move in sorted(both, key=_first)[: 4 * TOP]]
        exact = ((float(self._changes(choice, move, guide, row)[0]), move) for move in best)
        worth = target - guide.of(choice, self.problem.base)
        yield from (move for gain, move in sorted(exact, key=_first) if gain < worth)

    def _changes(self, choice: Choice, move: Moved | Choice, time: Costs, row: Costs) -> tuple[Floats, Floats]:
        """(n,) the seconds and the bytes of a row that each of n moves adds."""
        base, edges = self.problem.base, self.edges
        return time.change(choice, move, base, edges), row.change(choice, move, base, edges)

    # ---- choices that do not fit ----

    def repaired(self, seen: Seen, choices: Iterable[Choice]) -> list[Choice]:
        """The choices, moved until they fit, as far as they can be."""
        return [found for choice in choices if (found := self._repaired(seen, choice)) is not None]

    def _repaired(self, seen: Seen, choice: Choice) -> Choice | None:
        """Each move frees the most bytes of the fullest row a second."""
        missed = 0.0
        for _ in range(REPAIRS):
            row, fullest = self._fullest(choice, seen.problem)
            over = fullest + missed - seen.limit
            if over <= 0:
                if seen.fits(choice):
                    return choice
                missed = over = seen.peak(choice) - fullest
            found = list[_Bounded]()
            for move in self._simple(choice):
                seconds, bytes_ = self._changes(choice, move, self.problem.time, row)
                freed, ratio = np.minimum(-bytes_, over), np.full(bytes_.shape, np.inf)
                less = freed > over * SHARE
                ratio[less] = seconds[less] / freed[less]
                found.append(_Bounded(move, ratio))
            best = next(_sorted(found), None)
            if best is None:
                break
            choice = choice | best[1]
        return None


def _sorted(found: Sequence[_Bounded]) -> Iterator[tuple[float, Choice]]:
    """Moves whose numbers are finite, with these, in ascending order."""
    if not found:
        return
    every, ends = np.concatenate([one.bounds for one in found]), np.cumsum([len(one.bounds) for one in found])
    finite = np.flatnonzero(np.isfinite(every))
    for place in finite[every[finite].argsort(kind="stable")].tolist():
        one = found[which := int(np.searchsorted(ends, place, "right"))]
        yield float(every[place]), one.move(place - int(ends[which]) + len(one.bounds))


def _first(move: tuple[float, Choice]) -> float:
    return move[0]


def plainer(moves: Moves, seen: Seen, choice: Choice, forms: Mapping[str, Floats]) -> Choice:
    """A choice that fits, without the forms that it has in vain: it takes as long as before, or less.

    forms: (V_l,) how many forms that save memory each variant has.
    """
    added = LEAST / (2 * len(forms))  # of the time, for each form; all together are less than what counts as a gain
    added_s = added * moves.problem.cost(choice)
    own = {name: cost + added_s * forms[name] for name, cost in moves.problem.time.node.items()}
    time = Costs(own, moves.problem.time.edge)
    value = replace(moves.problem, time=time).cost
    goal = Goal(value=value, guide=lambda _: time, limit=seen, misses=2 * MISSES, gain=added / 2)
    return moves.descend(choice, goal, PEAKS)


def improve(moves: Moves, seen: Seen, lower: float) -> None:
    """Makes the best choice seen faster, by equation 1, until it is near the lower bound or no move helps."""
    cost, time = moves.problem.cost, moves.problem.time
    goal = Goal(value=cost, guide=lambda _: time, limit=seen, swaps=True)
    near = (choice for choice in moves.others if cost(choice) < FAR * seen.cost)
    starts = {tuple(choice.values()): choice for choice in (seen.best, *near) if choice is not None}
    fitting = (choice for choice in sorted(starts.values(), key=cost) if seen.fits(choice))
    for choice in islice(fitting, STARTS):
        if seen.cost > lower * (1 + GAP):
            moves.descend(choice, goal, PEAKS, lower * (1 + GAP))


def lightest(
    problem: Problem, together: Together, begin: Sequence[Choice], enough: float = 0.0, peaks: int = PEAKS
) -> tuple[Choice, float]:
    """The choice of the least simulated peak that moves reach, and that peak.

    begin: choices; moves start at those with the least peaks. enough: bytes at which it ends. peaks: the number of
    peaks to simulate from each start.
    """
    moves = Moves(problem, together)
    goal = Goal(
        value=problem.peak,
        guide=lambda choice: problem.row(int(problem.rows(choice).argmax())),
        rows=True,
        neighbours=True,
        misses=peaks,
        looked=LIGHTER,
    )
    starts = sorted({tuple(c.values()): c for c in begin}.values(), key=problem.peak)[:STARTS]
    found = [moves.descend(start, goal, peaks, enough) for start in starts[: 1 + peaks // PEAKS * STARTS]]
    best = min(found, key=problem.peak)
    return best, problem.peak(best)
