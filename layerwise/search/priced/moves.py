"""Moves: the last stage of a search under a limit. What was chosen is made faster, as long as its simulated peak fits.

A move is a layer to another variant, equal layers to another together, what another choice has otherwise (each
connected part of that), or two of these together. Those of the most time gained come first; rows say which can fit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import numpy as np

from layerwise.cost.additive import Choice, Costs
from layerwise.cost.model import EdgeName
from layerwise.geometry.arrays import Floats
from layerwise.search.priced.additive import Problem, least_by_base
from layerwise.search.priced.choose import Seen
from layerwise.search.solve.narrow import SLACK

Move = tuple[float, Choice]  # what it changes in seconds, and the new variants
STARTS = 4  # choices from which moves are made
FAR = 1.05  # of the best: a start that is further away is left alone
PEAKS = 100  # that moves from a start may simulate
MISSED = 0.02  # of the limit: rows that are within it, less that, are simulated
MISSES = 24  # of these, one after the other that are too much
TOP = 32  # moves that are faster of which pairs are made
LEAST = 1e-9  # of the time: what gains less gains nothing
LIGHTER = 128  # moves that lower the fullest row most, of which all rows are looked at


class Moves:
    """Moves between the choices of a problem.

    kinds: of each layer, equal for equal layers. others: choices to begin with, beside the best that was seen.
    """

    def __init__(self, seen: Seen, kinds: Mapping[str, object], others: Sequence[Choice]) -> None:
        self.seen, self.problem, self.kinds, self.left = seen, seen.problem, kinds, PEAKS
        self.others = list({tuple(choice.values()): choice for choice in others}.values())
        self.edges: dict[str, list[EdgeName]] = {name: [] for name in self.problem.base}
        for edge in self.problem.time.edge:
            for end in dict.fromkeys(edge[:2]):
                self.edges[end].append(edge)

    def improve(self, lower: float) -> None:
        """Makes the best faster, until it is at the lower bound, no move helps, or peaks are used up."""
        seen, cost = self.seen, self.problem.cost
        starts = [seen.best, *(choice for choice in self.others if cost(choice) < FAR * seen.cost)]
        fitting = [choice for choice in starts if choice is not None and seen.peak(choice) <= seen.limit]
        for choice in sorted(fitting, key=cost)[:STARTS]:
            self.left = PEAKS
            better: Choice | None = choice
            while better is not None and self.left > 0 and seen.cost > lower * SLACK:
                choice, better = better, self._better(better)

    def plain(self, plainer: Mapping[str, Mapping[int, int]]) -> None:
        """Undoes, of the best, forms that save memory in vain: equal layers together, where that takes no longer.

        plainer: of each layer, the variant without the form by each variant with one.
        """
        for group in self._equal(self.seen.best or {}):
            best = self.seen.best
            assert best is not None
            move = {name: plainer[name][best[name]] for name in group if best[name] in plainer[name]}
            if (
                move
                and self._gain(best, move) <= LEAST * self.seen.cost
                and self.seen.peak(best | move) <= self.seen.limit
            ):
                self.seen.best = best | move

    def _better(self, choice: Choice) -> Choice | None:
        """What a move, or two together, make faster."""
        seen, rows, before, misses = self.seen, self.problem.rows(choice), self.problem.cost(choice), 0
        missed = min(seen.peak(choice) - float(rows.max()), MISSED * seen.limit)
        moves = [(self._gain(choice, move), move) for move in self._moves(choice)]
        for gain, move in [*sorted(moves, key=_first), *self._pairs(choice, rows, moves)]:
            if gain >= -LEAST * before or misses == MISSES or self.left <= 0:
                break
            if float(self.problem.rows(choice | move).max()) + missed > seen.limit:
                continue
            self.left -= 1
            if seen.peak(choice | move) <= seen.limit:
                return choice | move
            misses += 1
        return None

    def _moves(self, choice: Choice) -> Iterator[Choice]:
        base = self.problem.base
        for name, now in choice.items():
            yield from ({name: variant} for variant in range(len(base[name])) if variant != now)
        for names in self._equal(choice):
            if len(names) > 1:
                variants = range(len(base[names[0]]))
                yield from (dict.fromkeys(names, variant) for variant in variants if variant != choice[names[0]])
        for other in self.others:
            yield from self._parts(choice, other)

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

    def _pairs(self, choice: Choice, rows: Floats, moves: Sequence[Move]) -> list[Move]:
        """What is faster and needs more, with what is slower and needs less, the best first."""
        row, room = self.problem.row(int(rows.argmax())), self.seen.limit - self.seen.peak(choice)
        faster = sorted((m for m in moves if m[0] < 0), key=_first)[:TOP]
        slower = sorted((m for m in moves if 0 < m[0] < -faster[0][0]), key=_first)[: 16 * TOP] if faster else []
        more = [(gain, self._change(row, choice, move), move) for gain, move in faster]
        less = [(cost, self._change(row, choice, move), move) for cost, move in slower]
        less = sorted((m for m in less if m[1] < 0), key=lambda m: m[0] / -m[1])[: 4 * TOP]
        both = [
            (gain + cost, one | two)
            for gain, taken, one in more
            for cost, freed, two in less
            if gain + cost < 0 and taken + freed <= room and not one.keys() & two.keys()
        ]
        best = [move for _, move in sorted(both, key=_first)[: 4 * TOP]]
        return sorted(((self._gain(choice, move), move) for move in best), key=_first)

    def _gain(self, choice: Choice, move: Choice) -> float:
        """Seconds that a move changes."""
        return self._change(self.problem.time, choice, move)

    def _change(self, costs: Costs, choice: Choice, move: Choice) -> float:
        return self._of(costs, choice | move, move) - self._of(costs, choice, move)

    def _of(self, costs: Costs, choice: Choice, names: Iterable[str]) -> float:
        """What some layers and their edges cost."""
        base, total = self.problem.base, 0.0
        for name in names:
            total += float(costs.node[name][choice[name]])
        for edge in {edge for name in names for edge in self.edges[name]}:
            if edge in costs.edge:
                total += float(costs.edge[edge][base[edge[0]][choice[edge[0]]], base[edge[1]][choice[edge[1]]]])
        return total


def lightest(
    problem: Problem, begin: Sequence[Choice], enough: float = 0.0, peaks: int = PEAKS
) -> tuple[Choice, float]:
    """The choice of the least simulated peak that moves come to, of one layer and of two neighbours, and that peak.

    begin: choices, of which those of the least peaks are begun with. enough: bytes at which it ends.
    peaks: that are simulated from each start.
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
    """Moves of which all rows are below a peak: of one layer, then of two neighbours; those of the least rows first."""
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
