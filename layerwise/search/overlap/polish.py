"""The best step with overlap: a lower bound of all strategies, and moves from the best ones found so far.

Minimizing the largest row is a matrix game, like that of memory (`priced.prices.least_rows`): a mixture of rows is
additive, elimination minimizes it, and no simulated step is below that. Moves choose from what the bound leaves of each
layer: they change one layer, a run of layers that are split alike, or two neighbours. A move is simulated only if its
largest row is below the best step, smallest rows first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from operator import itemgetter
from typing import Literal, get_args

import numpy as np

from layerwise.cost.additive import Choice, Costs, edges_of
from layerwise.cost.model import CostModel
from layerwise.cost.transfer import telling_devices
from layerwise.geometry.arrays import Floats, Ints
from layerwise.search.overlap.cuts import Cuts
from layerwise.search.priced.additive import Problem, by_elimination, by_messages, possible
from layerwise.search.priced.prices import least_rows
from layerwise.search.priced.variants import Forms, Strategy, Variants
from layerwise.search.solve.eliminate import sums_of

Effort = Literal["quick", "normal", "thorough"]
EFFORTS: tuple[Effort, ...] = get_args(Effort)
SIMULATIONS: Mapping[Effort, int] = {"quick": 0, "normal": 80, "thorough": 1000}
PATIENCE: Mapping[Effort, int] = {"quick": 0, "normal": 8, "thorough": 200}  # simulations without a gain
STARTS = 2  # strategies from which moves start
NEAR = 0.01  # of the best step: starts further away are skipped
GAIN = 0.005  # of the step: moves that gain less are skipped
ROUGH = 8  # rounds of messages over the full space
MET = 8  # of the strategies that eliminations met, those to simulate
ENTRIES = 5e7  # in all tables of edges (VGG-16 on 1,024 GPUs: 3e7): beyond that, nothing is done
CLOSELY = 1e7  # of those left by the first bound: beyond that, no second bound and no moves
WORK = 2e7  # sums of an elimination: beyond that, messages bound as well as they can


@dataclass(frozen=True, slots=True)
class Overlapped:
    """The strategies with the best steps with overlap, and a bound of all."""

    strategies: tuple[Strategy, ...]  # reached by moves, fastest first
    lower_bound_s: float  # of all strategies in the space


class Polish:
    """Moves between the strategies of one space."""

    def __init__(
        self,
        cuts: Cuts,
        mean: Costs,
        step_s: Callable[[Strategy], float],
        fits: Callable[[Strategy], bool],
        effort: Effort,
    ) -> None:
        """mean: a mixture of rows, which is at most the largest of them, and fast to look up."""
        self.cuts, self.mean, self.space, self.graph = cuts, mean, cuts.space, cuts.model.graph
        self.step_s, self.fits, self.left, self.patience = step_s, fits, SIMULATIONS[effort], PATIENCE[effort]
        self.names = [layer.name for layer in self.graph.layers]
        self.edges = edges_of(self.names, cuts.edges)
        self.own = {name: cuts.layer(name) for name in self.names}
        self.best = np.inf  # seconds of the step to beat
        self.seen: dict[tuple[int, ...], float] = {}

    def seconds(self, choice: Choice) -> float:
        """The simulated step."""
        key = tuple(choice[name] for name in self.names)
        if key not in self.seen:
            self.left -= 1
            self.seen[key] = self.step_s(self.space.strategy(choice))
        return self.seen[key]

    def from_(self, choice: Choice) -> Choice:
        """The best choice that successive moves reach, most promising first."""
        self.best = self.seconds(choice)
        while (better := next(self._better(choice), None)) is not None:
            choice, self.best = better, self.seconds(better)
        return choice

    def _better(self, choice: Choice) -> Iterator[Choice]:
        """Choices that a move makes faster, as long as steps may be simulated."""
        rows = self.cuts.rows(choice)
        for moves in (self._single(choice, rows), self._pairs(choice, rows)):
            until = max(self.left - self.patience, 0)
            for _, move in sorted(moves, key=itemgetter(0)):
                if self.left <= until:
                    break
                other = choice | move
                if self.seconds(other) < self.best * (1 - GAIN) and self.fits(self.space.strategy(other)):
                    yield other

    def _single(self, choice: Choice, rows: Floats) -> Iterator[tuple[float, Choice]]:
        """Moves of one layer, and of several layers that are split alike."""
        configs = self.space.configs
        for names in [[name] for name in self.names] + list(self._runs(choice)):
            places = [{config: i for i, config in enumerate(configs[name])} for name in names]
            common = [config for config in places[0] if all(config in place for place in places[1:])]
            move = {
                name: np.array([place[c] for c in common], np.int64) for name, place in zip(names, places, strict=True)
            }
            yield from self._bounded(choice, rows, move)

    def _runs(self, choice: Choice) -> Iterator[list[str]]:
        """Consecutive layers that are split alike, if several, and layers of equal kinds."""
        inner = [layer.name for layer in self.graph.inner]
        config = {name: self.space.configs[name][choice[name]] for name in inner}
        for _, run in groupby(inner, key=config.__getitem__):
            names = list(run)
            if len(names) > 1:
                yield names
        kind = {name: (self.cuts.model.kind(self.graph[name]), config[name]) for name in inner}
        for key in dict.fromkeys(kind.values()):
            names = [name for name in inner if kind[name] == key]
            if len(names) > 1:
                yield names

    def _pairs(self, choice: Choice, rows: Floats) -> Iterator[tuple[float, Choice]]:
        for u, v, _ in self.cuts.edges:
            both = np.indices((len(self.space.base[u]), len(self.space.base[v]))).reshape(2, -1)
            yield from self._bounded(choice, rows, {u: both[0], v: both[1]})

    def _bounded(self, choice: Choice, rows: Floats, move: Mapping[str, Ints]) -> Iterator[tuple[float, Choice]]:
        """The largest row after each of n moves, which give each moved layer the variants (n,)."""
        change = self.mean.change(choice, move, self.space.base, self.edges)
        worth = np.flatnonzero(self.mean.of(choice, self.space.base) + change < self.best * (1 - GAIN))
        if not len(worth):
            return
        move = {name: variants[worth] for name, variants in move.items()}
        edges = list(dict.fromkeys(edge for name in move for edge in self.edges[name]))
        before = {name: np.array([variant]) for name, variant in choice.items()}
        after = self.cuts.sent(before | dict(move), edges) - self.cuts.sent(before, edges) + rows
        for name, variants in move.items():
            after = after + self.own[name][variants] - self.own[name][choice[name]]
        bounds = after.max(1)
        for i in np.flatnonzero(bounds < self.best * (1 - GAIN)).tolist():
            yield float(bounds[i]), {name: int(variants[i]) for name, variants in move.items()}


def overlapped(
    model: CostModel,
    space: Variants,
    known: Sequence[Strategy],
    step_s: Callable[[Strategy], float],
    forms: Forms | None = None,
    *,
    effort: Effort = "normal",
    fits: Callable[[Strategy], bool] = lambda _: True,
    memory_bytes: float = 2.0**31,
) -> Overlapped:
    """Bounds the step with overlap, and looks for strategies that are faster than the known ones.

    If its tables would be too large, it makes no moves; if far too large, the bound is 0.

    Args:
        model: The network on its machine.
        space: The configurations of every layer, none recomputed if `forms` are given.
        known: Strategies of the space that fit, fastest first.
        step_s: The simulated step of a strategy.
        forms: Forms in which layers may also be recomputed. That lowers no row, so bounds need not know it.
        effort: How many steps to simulate.
        fits: Whether a strategy fits into memory; only such are returned.
        memory_bytes: Bytes of a search table.
    """
    if _entries(model, space) > ENTRIES:
        return Overlapped((), 0.0)
    upper = step_s(known[0])
    rough = _problem(Cuts(model, space), step_s)
    game = least_rows(rough, by_messages, rounds=ROUGH)
    keep = possible(rough.base, game.mixed(upper))
    for strategy in known:
        saved = {name: config.saving(recompute=False, states=config.states) for name, config in strategy.items()}
        for name, variant in space.choice(strategy if forms is None else saved).items():
            keep[name][variant] = True
    small = space.restrict(keep) if forms is None else space.restrict(keep).recomputed(forms)
    if _entries(model, small) > CLOSELY:
        return Overlapped((), min(max(game.bound, 0.0), upper))
    cuts = Cuts(model, small, telling_devices(model.devices))
    sums = sums_of({name: len(base) for name, base in small.bases.items()}, (edge[:2] for edge in model.graph.edges()))
    minimise = by_elimination(memory_bytes) if sums <= WORK else by_messages
    game = least_rows(_problem(cuts, step_s), minimise)
    polish = Polish(cuts, game.mixed(upper)[0][0], step_s, fits, effort)
    met = game.lightest(MET if SIMULATIONS[effort] else 0)
    starts = [*map(small.choice, known), *(one.choice for one in met if one.rows.max() < upper)]
    ends = dict[float, Choice]()
    fitting = (start for start in sorted(starts, key=polish.seconds) if fits(small.strategy(start)))
    for start in islice(fitting, STARTS):
        if polish.seconds(start) < min(ends, default=np.inf) * (1 + NEAR):
            end = polish.from_(start)
            ends[polish.seconds(end)] = end
    found = tuple(small.strategy(ends[seconds]) for seconds in sorted(ends))
    return Overlapped(found, min(max(game.bound, 0.0), upper))


def _entries(model: CostModel, space: Variants) -> int:
    """The numbers in all tables of edges."""
    return sum(len(space.bases[u]) * len(space.bases[v]) for u, v, _ in model.graph.edges())


def _problem(cuts: Cuts, step_s: Callable[[Strategy], float]) -> Problem:
    last = cuts.row(len(cuts.points) - 1)
    return Problem(last, cuts.space.base, cuts.row, cuts.rows, lambda choice: step_s(cuts.space.strategy(choice)))
