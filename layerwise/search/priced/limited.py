"""The search under a memory limit: it chooses cells, recomputation and states of every layer such that a step fits.

Equation 1 is minimised over the strategies whose simulated peak (`cost.memory.step`) is at most the limit. There are
three stages: tables of seconds and bytes, elimination with a price on memory (`choose`), and moves (`moves`). They run
three times: over the few cells of known strategies, whose answer excludes many others; over the rest, with messages in
place of elimination; and over what is left, with exact transfers and elimination.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

import numpy as np

from layerwise.config import Config
from layerwise.cost.additive import Choice, Costs
from layerwise.cost.memory.rows import ByteRows, byte_rows, is_view
from layerwise.cost.memory.step import fullest_bytes
from layerwise.cost.model import Configs, CostModel, EdgeName, Progress
from layerwise.cost.terms import LAYER_TERMS
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.search.priced.answers import Least, MemoryPrice, Within
from layerwise.search.priced.choose import GAP, LOOKS, Seen
from layerwise.search.priced.moves import PEAKS, STARTS, Moves, Together, improve, lightest, plainer
from layerwise.search.priced.prices import (
    Minimise,
    Prices,
    Problem,
    by_elimination,
    by_messages,
    least_by_base,
    least_rows,
    possible,
)  # fmt: skip
from layerwise.search.priced.variants import OFFERS, Forms, Strategy, Variants
from layerwise.search.solve.eliminate import sums_of
from layerwise.search.solve.narrow import PAYS, SLACK, SWEEPS, Messages, node_costs, restrict, rough_tables

Met = tuple[
    Sequence[Strategy], Sequence[int]
]  # strategies that eliminations have found, and rows that may have a price
WORK = 5e6  # the most sums of one elimination
CLOSE = 0.005  # a gap, as a fraction of the bound, that need not become smaller
NEAR = 0.002  # strategies within this fraction of the bound are searched, whatever elimination takes
FEW = 8  # the number of peaks to simulate if it is proven that nothing fits


def fastest_within(
    problem: Problem,
    limit: float,
    minimise: Minimise,
    together: Together,
    known: Sequence[Choice] = (),
    known_s: tuple[float, float] = (-np.inf, np.inf),
    start: Prices | None = None,
) -> tuple[Seen, Prices, float]:
    """Searches for the fastest choice that fits into `limit` bytes. Returns what was seen, the prices, and a bound.

    together: moves of several layers. known: choices to begin with. known_s: a lower bound of all that fit, and one of
    all choices that are not in the problem. start: see `best_prices`.
    """
    seen = Seen(problem, limit)
    for choice in known:
        seen.peak(choice)
    prices = seen.choose(minimise, start)
    least, others = known_s
    bound = max(least, min(prices.bound, others))
    if prices.bound < np.inf:
        moves = Moves(problem, together, seen.others(prices, minimise))
        if seen.cost > bound * (1 + GAP):
            moves.others += moves.repaired(seen, prices.exceeding(limit)[:STARTS])
        improve(moves, seen, bound)
        bound = max(bound, min(seen.cases(prices, minimise), others))
    return seen, prices, min(bound, seen.cost)


@dataclass(frozen=True, slots=True)
class _Tables:
    """The variants of a space, their seconds, and their bytes."""

    space: Variants
    time: Costs
    rows: ByteRows

    def restrict(self, keep: Mapping[str, Mask]) -> _Tables:
        """The tables of the kept variants."""
        few, bases = self.space.restrict(keep), dict[str, Ints]()
        for name, these in few.bases.items():
            place = {config: i for i, config in enumerate(self.space.bases[name])}
            bases[name] = np.array([place[config] for config in these], np.int64)
        return _Tables(few, self.time.restrict(keep, bases), self.rows.restrict(keep, bases, few.base))


@dataclass(frozen=True, slots=True)
class _Left:
    """The configurations left of a space, the best choice seen in it, the prices, and a lower bound of all that fit."""

    tables: _Tables
    seen: Seen
    prices: Prices
    lower_s: float

    @property
    def space(self) -> Variants:
        """The variants."""
        return self.tables.space

    @property
    def met(self) -> Met:
        """The strategies that eliminations have found, and the rows whose tables they used."""
        return [self.space.strategy(met.choice) for met in self.prices.met], list(self.prices.solved)

    @property
    def fitting(self) -> list[Strategy]:
        """The fastest strategy seen, if one fits."""
        return [] if self.seen.best is None else [self.space.strategy(self.seen.best)]

    def promising(self, edges: Sequence[tuple[str, str]], work: float = np.inf) -> tuple[dict[str, Mask], float]:
        """The variants that a choice may have that fits and takes less than a number of seconds; and this number.

        It is the time of the best choice seen, or less, such that elimination forms at most `work` sums. The best
        choice's variants are always kept.
        """
        seen, bound, base = self.seen, self.prices.bound, self.space.base
        fits, lower = possible(base, self.prices.rows, seen.limit), self.prices.least_s(seen.problem, seen.limit)
        beyond = seen.cost - bound if np.isfinite(seen.cost) else abs(bound)
        below = seen.cost
        while True:
            keep = {name: fits[name] & (least <= below * SLACK) for name, least in lower.items()}
            for name, variant in (seen.best or {}).items():
                keep[name][variant] = True
            sizes = {name: len(np.unique(base[name][mask])) for name, mask in keep.items()}
            if beyond < NEAR * abs(bound) or work == np.inf or sums_of(sizes, edges) <= work:
                return keep, below
            beyond /= 2
            below = bound + beyond


class LimitedSearch:
    """Searches of one model under any limits.

    cells: the configurations of every layer. offer: the ways in OFFERS that may save memory, except for `fixed` layers.
    memory_bytes: the size of a search table.
    """

    def __init__(
        self,
        model: CostModel,
        cells: Configs,
        *,
        offer: Iterable[str] = OFFERS,
        fixed: Collection[str] = (),
        memory_bytes: float = 2.0**31,
        progress: Progress | None = None,
    ) -> None:
        self.model, self.cells, self.progress = model, dict(cells), progress
        self.forms = Forms.of(model.graph, model.devices.count, offer, fixed)
        self.minimise = by_elimination(memory_bytes)
        self.edges = [(u, v) for u, v, _ in model.graph.edges()]
        may = self.forms.recomputable - self.forms.fixed
        self._views = [(u, v) for u, v in self.edges if u in may and v in may and is_view(model.graph[v])]

    def under(self, limit: float, known: Sequence[Strategy]) -> Within:
        """The best strategies whose peak is at most `limit` bytes. known: strategies over `cells` to begin with."""
        begun = self._begun(limit, known)
        hand = next(iter(begun.fitting), None)
        if hand is None and self._bytes_alone[2].bound > limit * SLACK:
            return Within((), np.inf, np.inf, (), 0)
        space = Variants.of(self.cells if hand is None else self._cells_within(self.model.step_s(hand)), self.forms)
        tables = self._tables(space, rough_tables(self.model, space.bases, self.progress).transfer)
        left = self._left(limit, tables, hand, begun.met)
        if left.prices.bound == np.inf:
            return Within(tuple(left.fitting), left.seen.cost, left.seen.cost, (), 0)
        lower_s = left.lower_s
        while True:
            within, below = self._exactly(limit, left, lower_s)
            if not within.strategies or within.lower_bound_s * (1 + CLOSE) >= within.cost_s:
                return within
            # If all that was promising was searched, it is not searched again for the sake of a faster strategy.
            gained = below < left.seen.cost and within.cost_s < left.seen.cost * (1 - GAP)
            left = self._left(limit, left.tables, within.strategies[0], left.met)
            lower_s = min(max(within.lower_bound_s, left.lower_s), within.cost_s)
            if not gained or left.prices.bound == np.inf:
                return replace(within, lower_bound_s=lower_s)

    def _left(self, limit: float, tables: _Tables, hand: Strategy | None, met: Met) -> _Left:
        """The variants of the choices that fit and are faster than the strategy `hand`.

        Dropping variants raises the bounds of the others, so it repeats. tables: their transfers may be lower bounds.
        met: what to begin with.
        """
        lower_s, (strategies, rows) = -np.inf, met
        while True:
            space, problem = tables.space, self._problem(tables)
            seen = Seen(problem, limit, partial(self._cost_of, space))
            if hand is not None:
                seen.peak(space.choice(hand))
            prices = seen.choose(by_messages, Prices.warm(problem, space.choices(strategies), rows))
            lower_s = max(lower_s, min(prices.bound, seen.cost))
            left = _Left(tables, seen, prices, lower_s)
            hand = next(iter(left.fitting), None)
            if prices.bound == np.inf:
                return left
            keep, _ = left.promising(self.edges)
            if not all(mask.any() for mask in keep.values()):
                return replace(left, prices=replace(prices, bound=np.inf), lower_s=seen.cost)
            if sum(int(mask.sum()) for mask in keep.values()) > PAYS * sum(map(len, space.configs.values())):
                return left
            tables, (strategies, rows) = tables.restrict(keep), left.met

    def _cost_of(self, space: Variants, choice: Choice) -> float:
        return self.model.step_s(space.strategy(choice))

    def _exactly(self, limit: float, left: _Left, lower_s: float) -> tuple[Within, float]:
        """The answer over the promising variants, with exact transfers, and a lower bound of all other choices.

        lower_s: a lower bound of all that fit.
        """
        keep, below = left.promising(self.edges, WORK)
        few = left.tables.restrict(keep)
        space, transfer = few.space, self.model.tables(few.space.bases, self.progress).transfer
        problem = self._problem(replace(few, time=Costs(few.time.node, transfer)))
        together = partial(space.together, self.model)
        begin, known_s = space.choices(left.fitting), (lower_s, below)
        met, looked_at = left.met
        start = Prices.warm(problem, space.choices(met), looked_at)
        seen, prices, bound = fastest_within(problem, limit, self.minimise, together, begin, known_s, start)
        found = left.fitting
        if seen.best is not None:
            found = [self._plainer(limit, space.strategy(seen.best)), *found]
        strategies = sorted({tuple(s.values()): s for s in found}.values(), key=self.model.step_s)
        cost, price = min(map(self.model.step_s, strategies), default=np.inf), prices.price
        dearest = sorted(price.items(), key=lambda row: -row[1])
        told = tuple(MemoryPrice(few.rows.instants[row], 0, seconds) for row, seconds in dearest)
        count = sum(map(len, space.configs.values()))
        return Within(tuple(strategies), cost, min(cost, bound), told, count), below

    def _plainer(self, limit: float, strategy: Strategy) -> Strategy:
        """A strategy that fits, without the forms that save memory in vain: with its cells, in all forms."""
        space = Variants.of({n: (c if n in self.forms.fixed else c.cells,) for n, c in strategy.items()}, self.forms)
        problem = self._problem(self._tables(space, self.model.tables(space.bases).transfer))
        moves = Moves(problem, partial(space.together, self.model))
        return space.strategy(plainer(moves, Seen(problem, limit), space.choice(strategy), space.forms))

    def least(self, known: Sequence[Strategy], wanted: float = 0.0) -> Least:
        """The least memory of all strategies. known: strategies over `cells` to begin with.

        wanted: bytes at which it ends. If it is proven that no strategy needs so few, it looks less closely.
        """
        tables, problem, game = self._bytes_alone
        space = tables.space
        formed = [space.choice(form) for strategy in known for form in self.formed(strategy)]
        bound, begin = game.bound, [*formed, *(met.choice for met in game.lightest(LOOKS))]
        together = partial(space.together, self.model)
        best, size = lightest(problem, together, begin, wanted, PEAKS if bound <= wanted * SLACK or not wanted else FEW)
        if bound < size and (bound <= wanted * SLACK or not wanted):
            tables = tables.restrict(game.possible(space.base, size))
            small, few = tables.space, self._problem(tables)
            work = sums_of({name: len(these) for name, these in small.bases.items()}, self.edges)
            closer = least_rows(few, self.minimise if work <= WORK else by_messages)
            begin = [*small.choices([space.strategy(best)]), *(met.choice for met in closer.lightest(LOOKS))]
            other, fewer = lightest(few, partial(small.together, self.model), begin, max(wanted, closer.bound))
            bound = max(bound, closer.bound)
            if fewer < size:
                return Least(small.strategy(other), fewer, min(bound, fewer))
        return Least(space.strategy(best), size, min(max(bound, 0.0), size))

    @cached_property
    def _bytes_alone(self) -> tuple[_Tables, Problem, Prices]:
        """All variants, the problem without time, and a lower bound of the least memory."""
        space = Variants.of(self.cells, self.forms)
        nothing = {name: np.zeros(len(configs)) for name, configs in space.configs.items()}
        edges = {e: np.zeros((len(space.bases[e[0]]), len(space.bases[e[1]]))) for e in self.model.graph.edges()}
        tables = _Tables(space, Costs(nothing, edges), byte_rows(self.model, space.configs, space.base))
        problem = self._problem(tables)
        return tables, problem, least_rows(problem, by_messages)

    def formed(self, strategy: Strategy) -> list[Strategy]:
        """The strategy in each form that is offered, on all layers that can have it."""
        forms = self.forms
        every = [{name: forms.of_layer(name, c, form) for name, c in strategy.items()} for form in forms.offered]
        return list({tuple(strategy.values()): strategy for strategy in every}.values())

    def _tables(self, space: Variants, transfer: Mapping[EdgeName, Floats]) -> _Tables:
        time = Costs(node_costs(self.model, space.configs), transfer)
        return _Tables(space, time, byte_rows(self.model, space.configs, space.base))

    def _problem(self, tables: _Tables) -> Problem:
        space, node, transfer = tables.space, tables.time.node, dict(tables.time.edge)
        for u, v in self._views:  # recomputing a view alone is in vain, but rows do not show that
            again = [np.array([config.recompute for config in space.bases[name]], np.bool_) for name in (u, v)]
            dear = sum(float(cost.max()) for cost in node.values())
            transfer[u, v, 0] = transfer[u, v, 0] + dear * (~again[0][:, None] & again[1][None])

        def peak(choice: dict[str, int]) -> float:
            return fullest_bytes(self.model, space.strategy(choice))

        rows = tables.rows
        return Problem(Costs(node, transfer), space.base, rows.row, rows.rows, rows.changes, peak)

    def _begun(self, limit: float, known: Sequence[Strategy]) -> _Left:
        """Searches the cells of known strategies, in all forms, for a fast strategy that fits."""
        kept = self.forms.fixed
        cells = {n: tuple(dict.fromkeys(s[n] if n in kept else s[n].cells for s in known)) for n in self.cells}
        space = Variants.of(cells, self.forms)
        tables = self._tables(space, self.model.tables(space.bases).transfer)
        problem = self._problem(tables)
        seen = Seen(problem, limit)
        prices = seen.choose(self.minimise)
        if prices.bound < np.inf and seen.cost > prices.bound * (1 + GAP):
            Moves(problem, partial(space.together, self.model)).repaired(seen, prices.exceeding(limit)[:STARTS])
        formed = space.choices(f for strategy in known for f in self.formed(strategy)) if seen.best is None else ()
        for choice in sorted(formed, key=problem.cost):
            if seen.best is None:
                seen.fits(choice)
        return _Left(tables, seen, prices, -np.inf)

    def _cells_within(self, upper: float) -> Configs:
        """The cells that a strategy of at most `upper` seconds can have, in any form."""
        tables = self.model.tables(self.cells, self.progress, (0,))  # as in `narrow`
        # First without what forms change, so that few cells are priced in all of them.
        for seconds in (self._least_s, self._formed_s):
            own = {name: seconds(self.model.graph[name], these) for name, these in tables.configs.items()}
            tables = restrict(tables, Messages(tables.transfer, list(own)).bounds(own, SWEEPS).within(upper))
        return tables.configs

    def _least_s(self, layer: Layer, cells: tuple[Config, ...]) -> Floats:
        """(C,) seconds that a layer takes in any form: without its update, and without sums and gathers of states."""
        cost = self.model.node_cost(layer, cells)
        return cost.total - cost.compute.update - sum(cost.seconds[term.name] for term in LAYER_TERMS if term.by_states)

    def _formed_s(self, layer: Layer, cells: tuple[Config, ...]) -> Floats:
        """(C,) the seconds of a layer in its fastest form; recomputation only adds to them."""
        formed = self.forms.saved.of_layers(layer.name, cells)
        cost = self.model.node_cost(layer, tuple(formed)).total
        return least_by_base(cost, np.array(list(formed.values())))[0]
