"""Moves: the last stage of a search under a limit. They make a choice faster, as long as its simulated peak fits.

A move changes the variant of one layer or of several equal layers, or takes over a connected part in which another
choice differs, or is two of these together. Moves that gain most time come first. Rows exclude moves that cannot fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import NamedTuple

import numpy as np

from layerwise.cost.additive import Choice, Costs, edges_of
from layerwise.geometry.arrays import Floats, Ints
from layerwise.search.priced.additive import Problem, least_by_base
from layerwise.search.priced.choose import GAP, Seen

Move = tuple[float, Choice]  # the seconds that it adds, and the new variants
STARTS = 4  # the most choices from which moves start
FAR = 1.05  # starts that take more than so many times the best are skipped
PEAKS = 100  # the most peaks to simulate from one start
MISSED = 0.02  # rows are taken to be at most this fraction of the limit below the peak
MISSES = 12  # so many moves that do not fit end a round, of single moves and of pairs
TOP = 32  # the number of faster moves to make pairs of
LEAST = 1e-9  # the least gain, as a fraction of the time
REPAIRS = 40  # the most moves to make a choice fit
SHARE = 0.02  # a repair frees at least this fraction of what does not fit
LIGHTER = 128  # of so many moves that lower the fullest row most, all rows are computed


class _Moved(NamedTuple):
    """n moves of the same layers."""

    names: Sequence[str]
    to: Sequence[Ints]  # for each layer, (n,) its new variants
    seconds: Floats  # (n,) added to the step
    bytes_: Floats  # (n,) added to the fullest row

    def move(self, i: int) -> Choice:
        return {name: int(variants[i]) for name, variants in zip(self.names, self.to, strict=True)}


class Moves:
    """Moves between the choices of a problem.

    kinds: a key of each layer, equal for equal layers. others: choices to begin with, beside the best one seen.
    """

    def __init__(self, seen: Seen, kinds: Mapping[str, object], others: Sequence[Choice]) -> None:
        self.seen, self.problem, self.kinds, self.left = seen, seen.problem, kinds, PEAKS
        self.others = list({tuple(choice.values()): choice for choice in others}.values())
        self.edges = edges_of(self.problem.base, self.problem.time.edge)

    def repair(self, mixed: Sequence[Choice]) -> None:
        """Moves choices that do not fit until they fit. Later moves begin there, too."""
        self.others += [choice for choice in map(self._repaired, mixed) if choice is not None]

    def improve(self, lower: float) -> None:
        """Makes the best choice faster, until it is near the lower bound, no move helps, or PEAKS were simulated."""
        seen, cost = self.seen, self.problem.cost
        near = [choice for choice in self.others if cost(choice) < FAR * seen.cost]
        starts = {tuple(choice.values()): choice for choice in (seen.best, *near) if choice is not None}
        fitting = [choice for choice in starts.values() if seen.peak(choice) <= seen.limit]
        for choice in sorted(fitting, key=cost)[:STARTS]:
            self.left = PEAKS
            better: Choice | None = choice
            while better is not None and self.left > 0 and seen.cost > lower * (1 + GAP):
                choice, better = better, self._better(better)

    def _better(self, choice: Choice) -> Choice | None:
        """A faster choice that fits, by moves or pairs of them; those that are no neighbours are made at once."""
        seen, rows, least = self.seen, self.problem.rows(choice), LEAST * self.problem.cost(choice)
        fullest, row = float(rows.max()), self.problem.row(int(rows.argmax()))
        missed = min(seen.peak(choice) - fullest, MISSED * seen.limit)
        moved = list(self._moves(choice, row))
        for moves in (self._faster(moved, -least, seen.limit - missed - fullest), self._pairs(choice, row, moved)):
            misses, taken, near = 0, choice, set[str]()
            for gain, move in moves:
                if gain >= -least or misses == MISSES or self.left <= 0:
                    break
                if near & move.keys() or float(self.problem.rows(taken | move).max()) + missed > seen.limit:
                    continue
                self.left -= 1
                if seen.peak(taken | move) <= seen.limit:
                    taken = taken | move
                    near.update(*(edge[:2] for name in move for edge in self.edges[name]), move)
                else:
                    misses += 1
            if near:
                return taken
        return None

    def _repaired(self, choice: Choice) -> Choice | None:
        """The choice, moved until it fits, or None. Each move frees the most bytes of the fullest row a second."""
        missed = 0.0
        for _ in range(REPAIRS):
            rows = self.problem.rows(choice)
            over = float(rows.max()) + missed - self.seen.limit
            if over <= 0:
                if (peak := self.seen.peak(choice)) <= self.seen.limit:
                    return choice
                missed = over = peak - float(rows.max())

            def worth(m: _Moved, over: float = over) -> Floats:
                freed = np.minimum(-m.bytes_, over)
                ratio: Floats = np.full(freed.shape, np.inf)
                less = freed > over * SHARE
                ratio[less] = m.seconds[less] / freed[less]
                return ratio

            moved = list(self._moves(choice, self.problem.row(int(rows.argmax()))))
            best = next(_sorted(moved, worth), None)
            if best is None:
                break
            choice = choice | best[1]
        return None

    def _moves(self, choice: Choice, row: Costs) -> Iterator[_Moved]:
        """All moves: of one layer, of equal layers together, and to parts of other choices."""
        base = self.problem.base
        seconds, bytes_ = (costs.beside(choice, base) for costs in (self.problem.time, row))
        for name, now in choice.items():
            own, size = seconds[name], bytes_[name]
            yield _Moved([name], [np.arange(len(own))], own - own[now], size - size[now])
        several = [names for names in self._equal(choice) if len(names) > 1]
        moves = [dict.fromkeys(names, np.arange(len(base[names[0]]))) for names in several]
        parts = (part for other in self.others for part in self._parts(choice, other))
        moves += [{name: np.array([variant]) for name, variant in part.items()} for part in parts]
        for move in moves:
            changes = (costs.change(choice, move, base, self.edges) for costs in (self.problem.time, row))
            yield _Moved(list(move), list(move.values()), *changes)

    def _faster(self, moved: Sequence[_Moved], most: float, room: float) -> Iterator[Move]:
        """Moves that add less than `most` seconds and at most `room` bytes to the fullest row, the fastest first."""
        yield from _sorted(moved, lambda m: np.where((m.seconds < most) & (m.bytes_ <= room), m.seconds, np.inf))

    def _equal(self, choice: Choice) -> list[list[str]]:
        """The groups of equal layers that have the same variant."""
        groups = dict[object, list[str]]()
        for name, now in choice.items():
            groups.setdefault((self.kinds[name], now), []).append(name)
        return list(groups.values())

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

    def _pairs(self, choice: Choice, row: Costs, moved: Sequence[_Moved]) -> Iterator[Move]:
        """Pairs of a move that is faster and needs more memory, and one that needs less, the best first."""
        room = self.seen.limit - self.seen.peak(choice)
        faster = list(islice(self._faster(moved, 0.0, np.inf), TOP))
        if not faster:
            return
        most = -faster[0][0]

        def worth(m: _Moved) -> Floats:  # seconds a byte less
            less = (m.bytes_ < 0) & (m.seconds > 0) & (m.seconds < most)
            ratio: Floats = np.full(m.seconds.shape, np.inf)
            ratio[less] = m.seconds[less] / -m.bytes_[less]
            return ratio

        slower = [move for _, move in islice(_sorted(moved, worth), 4 * TOP)]
        taken = [(gain, self._change(row, choice, move), move) for gain, move in faster]
        freed = [(self._change(self.problem.time, choice, m), self._change(row, choice, m), m) for m in slower]
        both = [
            (gain + cost, one | two)
            for gain, more, one in taken
            for cost, less, two in freed
            if gain + cost < 0 and more + less <= room and not one.keys() & two.keys()
        ]
        best = [move for _, move in sorted(both, key=_first)[: 4 * TOP]]
        yield from sorted(((self._change(self.problem.time, choice, move), move) for move in best), key=_first)

    def _change(self, costs: Costs, choice: Choice, move: Choice) -> float:
        return float(costs.change(choice, move, self.problem.base, self.edges))


def _sorted(moved: Sequence[_Moved], worth: Callable[[_Moved], Floats]) -> Iterator[Move]:
    """Moves of finite worth, in ascending order, with the seconds that they add."""
    found = [worth(m) for m in moved]
    every, ends = np.concatenate(found), np.cumsum([len(these) for these in found])
    finite = np.flatnonzero(np.isfinite(every))
    for place in finite[every[finite].argsort(kind="stable")].tolist():
        which = int(np.searchsorted(ends, place, "right"))
        i = place - int(ends[which]) + len(found[which])
        yield float(moved[which].seconds[i]), moved[which].move(i)


def lightest(
    problem: Problem, begin: Sequence[Choice], enough: float = 0.0, peaks: int = PEAKS
) -> tuple[Choice, float]:
    """The choice of the least simulated peak that moves of one layer and of two neighbours reach, and that peak.

    begin: choices; moves start at those with the least peaks. enough: bytes at which it ends. peaks: the number of
    peaks to simulate from each start.
    """
    starts = sorted({tuple(c.values()): c for c in begin}.values(), key=problem.peak)[:STARTS]
    found = [_lightened(problem, start, enough, peaks) for start in starts[: 1 + peaks // PEAKS * STARTS]]
    return min(found, key=lambda one: one[1])


def _lightened(problem: Problem, best: Choice, enough: float, left: int) -> tuple[Choice, float]:
    size = problem.peak(best)
    while size > enough and left > 0:
        for move in _lighter(problem, best, size):
            left -= 1
            if (peak := problem.peak(best | move)) < size:
                best, size = best | move, peak
                break
            if left <= 0:
                break
        else:
            break
    return best, size


def _lighter(problem: Problem, choice: Choice, size: float) -> Iterator[Choice]:
    """Moves after which all rows are below a peak: of one layer, then of two neighbours. The least rows come first."""
    row, base = problem.row(int(problem.rows(choice).argmax())), problem.base
    own = {name: table - table[choice[name]] for name, table in row.beside(choice, base).items()}
    ones = [
        (float(change[i]), {name: i}) for name, change in own.items() for i in range(len(change)) if i != choice[name]
    ]
    yield from _below(problem, choice, size, ones)
    pairs, light = list[Move](), {name: least_by_base(change, base[name]) for name, change in own.items()}
    for u, v in dict.fromkeys(edge[:2] for edge in problem.time.edge):
        (of_u, lightest_u), (of_v, lightest_v) = light[u], light[v]
        together: Floats = of_u[:, None] + of_v[None]
        for edge, table in row.edge.items():
            if edge[:2] == (u, v):
                at, to = base[u][choice[u]], base[v][choice[v]]
                together = together + (table - table[at] - table[:, to : to + 1] + table[at, to])
        for flat in np.argpartition(together, min(LIGHTER, together.size) - 1, axis=None)[:LIGHTER]:
            i, j = divmod(int(flat), together.shape[1])
            pairs.append((float(together[i, j]), {u: int(lightest_u[i]), v: int(lightest_v[j])}))
    yield from _below(problem, choice, size, pairs)


def _below(problem: Problem, choice: Choice, size: float, moves: Sequence[Move]) -> Iterator[Choice]:
    few = [move for _, move in sorted(moves, key=_first)[:LIGHTER]]
    after = [(float(problem.rows(choice | move).max()), move) for move in few]
    yield from (move for rows, move in sorted(after, key=_first) if rows < size)


def _first(move: Move) -> float:
    return move[0]
