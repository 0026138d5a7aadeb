"""The search under a memory limit: cells, recomputation and states of every layer, so that a step fits.

Equation 1 is minimised over the strategies whose simulated peak (`cost.memory.step`) is at most the limit. First
roughly: transfers are bounded by what a few devices see of them, multipliers come from message passing, and what cannot
be part of a strategy better than one in hand goes (as in `narrow`). Then exact tables of what is left, and `limited`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from layerwise.config import Config, States
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, EdgeName, Progress
from layerwise.geometry.arrays import Floats
from layerwise.search.limit.additive import (
    Choice,
    Costs,
    Problem,
    by_messages,
    inside,
    least_by_base,
    lower_bounds,
)
from layerwise.search.limit.limited import LOOKS, Least, Limited, fastest_within, least_memory, tighten
from layerwise.search.limit.multipliers import best_multipliers, least_rows
from layerwise.search.limit.rest import Known, possible
from layerwise.search.limit.variants import OFFERS, Configs, Forms, Memory, Strategy, Variants
from layerwise.search.solve.narrow import SLACK, exact_costs, node_costs, rough_tables

TRIES = 12  # true peaks that are asked for where what saves nothing is undone


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """The price of memory: the seconds of a step that a byte less takes, at one instant on one device."""

    instant: str
    device: int
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Within:
    """The answer under a limit."""

    limit_bytes: float
    strategies: tuple[Strategy, ...]  # the best that were found, by equation 1
    cost_s: float  # of the first: inf where none was found
    lower_bound_s: float  # of equation 1, of all strategies that fit: inf where it is proven that none does
    prices: tuple[MemoryPrice, ...]
    configurations: int  # that were left after bounds

    @property
    def proven(self) -> bool:
        """True if no strategy that fits is faster, or none fits."""
        return self.cost_s <= self.lower_bound_s * SLACK


class LimitedSearch:
    """Searches of one model under any limits, which share what they find out.

    cells: the configurations of every layer. offer: of OFFERS, what may save memory, but of layers that are `fixed`.
    memory_bytes: of a search table.
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
        self.model, self.cells, self.memory_bytes, self.progress = model, dict(cells), memory_bytes, progress
        self.forms = Forms.of(model.graph, model.devices.count, offer, fixed)
        self._edges: dict[str, list[EdgeName]] = {name: [] for name in self.cells}
        for edge in model.graph.edges():
            for end in dict.fromkeys(edge[:2]):
                self._edges[end].append(edge)
        self._costs: dict[object, tuple[float, float]] = {}

    def under(self, limit: float, known: Sequence[Strategy]) -> Within:
        """The best strategies whose peak is at most `limit` bytes. known: strategies over `cells` to begin with."""
        hand = self._begun(limit, known)
        space = Variants.of(self._cells_within(np.inf if hand is None else self.cost(hand)), self.forms)
        rough, memory = rough_tables(self.model, space.bases, self.progress), Memory.of(self.model, space)
        node = node_costs(self.model, space.configs)
        problem = space.problem(node, rough.transfer, memory, self.peak, self.cost)
        seen = Known(problem, limit)
        if hand is not None:
            seen.see(space.choice(hand))
        prices = best_multipliers(problem, limit, by_messages)
        tighten(seen, prices, by_messages)
        keep = possible(problem, prices.criteria(problem, limit, seen.cost))
        if not all(mask.any() for mask in keep.values()):  # nothing fits
            return Within(limit, (), np.inf, np.inf, (), 0)
        small, found = space.restrict(keep), [] if seen.best is None else [seen.best]
        best, price = self._exact(small, memory.restrict(keep, small), limit, inside(found, keep))
        strategies = [space.strategy(choice) for choice in found]
        strategies += [] if best.choice is None else [small.strategy(best.choice)]
        strategies = _distinct(self.plainer(strategy, limit) for strategy in strategies)
        strategies.sort(key=self.cost)
        cost = min([best.cost_s, *map(self.cost, strategies)])
        # Of what is left all may fit: then memory has the price that it had among all.
        price = price or _prices(memory, prices.price)
        left = sum(map(len, small.configs.values()))
        return Within(limit, tuple(strategies), cost, min(cost, best.lower_bound_s), price, left)

    def _exact(
        self, space: Variants, memory: Memory, limit: float, known: list[Choice]
    ) -> tuple[Limited, tuple[MemoryPrice, ...]]:
        """The search with transfers as they are. known: what may fit."""
        tables = self.model.tables(space.bases, self.progress)
        problem = space.problem(node_costs(self.model, space.configs), tables.transfer, memory, self.peak)
        found = fastest_within(problem, limit, memory_bytes=self.memory_bytes, known=known)
        return found, _prices(memory, found.price)

    def least(self, known: Sequence[Strategy]) -> Least[Strategy]:
        """The least memory of all strategies. known: strategies over `cells` to begin with."""
        space = Variants.of(self.cells, self.forms)
        memory = Memory.of(self.model, space)
        problem = self._memory_alone(space, memory)
        game = least_rows(problem, by_messages)
        formed = [space.choice(s) for strategy in known for s in self.formed(strategy)]
        least = min([*formed, *(met.choice for met in game.lightest(LOOKS))], key=problem.peak)
        keep = possible(problem, game.mixed(problem.peak(least)))
        small, begin = space.restrict(keep), inside([least], keep)
        found = least_memory(
            self._memory_alone(small, memory.restrict(keep, small)), memory_bytes=self.memory_bytes, known=begin
        )
        bound = max(found.lower_bound_bytes, game.bound)
        return Least(small.strategy(found.best), found.bytes, min(bound, found.bytes))

    def _memory_alone(self, space: Variants, memory: Memory) -> Problem:
        """The problem in which time does not matter."""
        nothing = {name: np.zeros(len(configs)) for name, configs in space.configs.items()}
        edges = self.model.graph.edges()
        transfer = {e: np.zeros((len(space.bases[e[0]]), len(space.bases[e[1]]))) for e in edges}
        return space.problem(nothing, transfer, memory, self.peak)

    def formed(self, strategy: Strategy) -> list[Strategy]:
        """The strategy in each form that is offered, on all layers for which it means anything."""
        forms = self.forms
        every = [{name: forms.of_layer(name, c, form) for name, c in strategy.items()} for form in forms.offered]
        return _distinct(every)

    def plainer(self, strategy: Strategy, limit: float) -> Strategy:
        """A strategy without forms that save nothing: what fits into `limit` bytes without them, and takes no longer.

        Bounds take longer steps for equal within a gap, so a choice may have some. Equal layers are undone together, as
        many as fit, what gains most first. Peaks take time: after TRIES of them, what is left stays.
        """
        tries = TRIES
        for old, plain, among in self._undoable(strategy):
            names = [name for name in among if strategy[name] == old]
            fewest, most = 0, len(names)
            count = most
            while fewest < most and tries:
                other = {**strategy, **dict.fromkeys(names[:count], plain)}
                no_longer = self._no_longer(other, strategy)
                tries -= no_longer
                if no_longer and self.peak(other) <= limit:
                    fewest, undone = count, other
                else:
                    most = count - 1
                count = (fewest + most + 1) // 2
            strategy = undone if fewest else strategy
        return strategy

    def _undoable(self, strategy: Strategy) -> list[tuple[Config, Config, list[str]]]:
        """Forms that can be undone one by one and take no longer: of equal layers, from and to which, and their names.

        What gains most time together comes first, and of what gains as much the plainest.
        """
        found: dict[tuple[int, Config, Config], list[str]] = {}
        gained: dict[tuple[int, Config, Config], float] = {}
        for name in [name for name in strategy if name not in self.forms.fixed]:
            old, kind = strategy[name], self.model.kind(self.model.graph[name])
            plain = list(_plainer(old))
            now, *costs = self._of_layer(strategy, name, [old, *plain]) if plain else [np.zeros(2)]
            for config, cost in zip(plain, costs, strict=True):
                if cost[0] <= now[0] * SLACK and cost.sum() <= now.sum() * SLACK:
                    key = kind, old, config
                    found.setdefault(key, []).append(name)
                    gained[key] = gained.get(key, 0.0) + float(now.sum() - cost.sum())
        return [(*key[1:], found[key]) for key in sorted(found, key=lambda key: -gained[key])]

    def _no_longer(self, strategy: Strategy, than: Strategy) -> bool:
        """True if it takes no longer, whatever t_S weighs."""
        return all(self.cost(strategy, weight) <= self.cost(than, weight) * SLACK for weight in (0.0, 1.0))

    def _of_layer(self, strategy: Strategy, name: str, configs: Sequence[Config]) -> Floats:
        """(configs, 2) what a layer and its edges cost under each of these, all else as it is: without t_S, and t_S."""
        own = tuple(configs)
        node = self.model.node_cost(self.model.graph[name], own)
        rest, sync = node.total - node.overlapped, node.overlapped
        for edge in self._edges[name]:
            u, v, _ = edge
            pairs = [(c if u == name else strategy[u], c if v == name else strategy[v]) for c in own]
            rest = rest + np.asarray(self.model.pair_costs(edge, pairs), np.float64)
        return np.stack([rest, sync], axis=1)

    def peak(self, strategy: Strategy) -> float:
        """Bytes of the fullest device."""
        return float(peak_bytes(self.model, strategy).max())

    def cost(self, strategy: Strategy, weight: float = 1.0) -> float:
        """Equation 1, with `weight` times t_S."""
        key = tuple(strategy.values())
        if key not in self._costs:
            (self._costs[key],) = exact_costs(self.model, [strategy])
        rest, sync = self._costs[key]
        return rest + weight * sync

    def _begun(self, limit: float, known: Sequence[Strategy]) -> Strategy | None:
        """A fast strategy that fits, of the cells of those that are known, in whatever forms."""
        kept = self.forms.fixed
        cells = {n: tuple(dict.fromkeys(s[n] if n in kept else s[n].cells for s in known)) for n in self.cells}
        space = Variants.of(cells, self.forms)
        tables, memory = self.model.tables(space.bases), Memory.of(self.model, space)
        problem = space.problem(node_costs(self.model, space.configs), tables.transfer, memory, self.peak)
        formed = space.choices(f for strategy in known for f in self.formed(strategy))
        found = fastest_within(problem, limit, memory_bytes=self.memory_bytes, prove=False).choice
        for choice in sorted(formed, key=problem.cost) if found is None else ():
            if memory.rows(choice).max() <= limit * SLACK and problem.peak(choice) <= limit:
                found = choice
                break
        return None if found is None else space.strategy(found)

    def _cells_within(self, upper: float) -> Configs:
        """The cells that a strategy of at most this cost can have, in whatever form."""
        cells = self.cells
        kept = tuple(form for form in self.forms.offered if not form[0])  # to be recomputed costs more
        forms = replace(self.forms, offered=kept)
        for watched in ((0,), None) if np.isfinite(upper) else ():  # as in `narrow`
            tables = (
                self.model.tables(cells, self.progress, watched)
                if watched
                else rough_tables(self.model, cells, self.progress)
            )
            space = Variants.of(cells, forms)
            node = node_costs(self.model, space.configs)
            own = {name: least_by_base(cost, space.cell[name])[0] for name, cost in node.items()}
            lower = lower_bounds(Costs(own, tables.transfer), {name: np.arange(len(c)) for name, c in cells.items()})
            keep = {name: lower_s <= upper * SLACK for name, lower_s in lower.items()}
            cells = {n: tuple(c for c, k in zip(these, keep[n], strict=True) if k) for n, these in cells.items()}
        return cells


def _distinct(strategies: Iterable[Strategy]) -> list[Strategy]:
    return list({tuple(strategy.values()): strategy for strategy in strategies}.values())


def _plainer(config: Config) -> Iterator[Config]:
    """A configuration with less that saves memory, the plainest first, as far as it has any."""
    states = get_args(States)
    for recompute in (False, True)[: 1 + config.recompute]:
        for these in states[: 1 + states.index(config.states)]:
            plain = replace(config, recompute=recompute, states=these)
            if plain != config:
                yield plain


def _prices(memory: Memory, price: Mapping[int, float]) -> tuple[MemoryPrice, ...]:
    """The prices of rows of bytes, the dearest first."""
    dearest = sorted(price.items(), key=lambda row: (-row[1], row[0]))
    return tuple(MemoryPrice(*memory.where(row), seconds) for row, seconds in dearest)
