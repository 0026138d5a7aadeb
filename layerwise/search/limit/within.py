"""The search under a memory limit: cells, recomputation and states of every layer, so that a step fits.

Equation 1 is minimised over the strategies whose simulated peak (`cost.memory.step`) is at most the limit. First
roughly: transfers are bounded by what a few devices see of them, multipliers come from message passing, and what cannot
be part of a strategy better than one in hand goes (as in `narrow`). Then exact tables of what is left, and `limited`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np

from layerwise.config import Config, States
from layerwise.cost.memory.bounds import MemoryBounds
from layerwise.cost.memory.footprints import Footprints
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, CostTables, Progress
from layerwise.search.limit.additive import Choice, Costs, Problem, by_messages, inside, least_by_base, lower_bounds
from layerwise.search.limit.limited import LOOKS, Least, Limited, fastest_within, least_memory, tighten
from layerwise.search.limit.multipliers import Multipliers, best_multipliers, least_rows
from layerwise.search.limit.rest import Known, possible
from layerwise.search.limit.variants import OFFERS, Configs, Forms, Memory, Strategy, Variants
from layerwise.search.solve.narrow import exact_costs, rough_tables, weighted
from layerwise.search.solve.prune import SLACK, Keep


@dataclass(frozen=True, slots=True)
class MemoryPrice:
    """What memory costs: the seconds of a step that a byte less takes, at one instant on one device."""

    instant: str
    device: int
    s_per_byte: float


@dataclass(frozen=True, slots=True)
class Within:
    """The answer under a limit."""

    limit_bytes: float
    strategies: tuple[Strategy, ...]  # the best that were found, for each weight of t_S: that of equation 1 first
    cost_s: float  # of the first: inf where none was found
    lower_bound_s: float  # of equation 1, of all strategies that fit: inf where it is proven that none does
    prices: tuple[MemoryPrice, ...]
    configurations: int  # that were left after bounds

    @property
    def proven(self) -> bool:
        """Whether no strategy that fits is faster, or none fits."""
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
        self._footprints = Footprints(model)
        self._peaks: dict[object, float] = {}
        self._costs: dict[object, tuple[float, float]] = {}

    def under(self, limit: float, weights: Sequence[float], known: Sequence[Strategy]) -> Within:
        """The best strategies whose peak is at most `limit` bytes, for each weight of t_S.

        The first weight is 1, and its answer is proven or has a lower bound. known: strategies over `cells` to begin
        with.
        """
        known = self._small_enough(limit, [formed for strategy in known for formed in self.formed(strategy)])
        hands = [self._in_hand(limit, weight, known) for weight in weights]
        space = Variants.of(self._cells_within(weights, [cost for _, cost in hands]), self.forms)
        rough, memory = rough_tables(self.model, space.bases, self.progress), Memory.of(self.model, space)
        keep: Keep = {name: np.zeros(len(configs), bool) for name, configs in space.configs.items()}
        found, met = list[Choice | None](), list[list[Choice]]()
        paid: list[tuple[MemoryPrice, ...]] = []
        for weight, (strategy, _) in zip(weights, hands, strict=True):
            node = weighted(self.model, space.configs, [weight])[0]
            problem = space.problem(node, rough.transfer, memory, self.peak, self._costing(weight))
            seen = Known(problem, limit)
            if strategy is not None:
                seen.see(space.choice(strategy))
            prices = best_multipliers(problem, limit, by_messages, Multipliers.begun(problem, met[-1] if met else ()))
            tighten(seen, prices, by_messages)
            left = possible(problem, prices.criteria(problem, limit, seen.cost))
            if not all(mask.any() for mask in left.values()):  # nothing fits, whatever t_S weighs
                return Within(limit, (), np.inf, np.inf, (), 0)
            found.append(seen.best)
            met.append(prices.nearest())
            paid.append(_prices(memory, prices.price))
            for name, mask in left.items():
                keep[name] |= mask
        fitting = [inside([] if choice is None else [choice], keep) for choice in found]
        near = [inside(choices, keep) for choices in met]
        within = self._exact(space.restrict(keep), limit, weights, fitting, near)
        # Of what is left all may fit: then memory has the price that it had among all.
        return within if within.prices else replace(within, prices=paid[0])

    def _exact(
        self,
        space: Variants,
        limit: float,
        weights: Sequence[float],
        known: Sequence[list[Choice]],
        met: Sequence[list[Choice]],
    ) -> Within:
        """With transfers as they are. known: by weight, what may fit; met: what is near the best."""
        tables, memory = self.model.tables(space.bases, self.progress), Memory.of(self.model, space)
        results: list[Limited] = []
        for weight, begin, near in zip(weights, known, met, strict=True):
            costs = Costs(weighted(self.model, space.configs, [weight])[0], tables.transfer)
            problem = space.problem(costs.node, costs.edge, memory, self.peak)
            begin = begin + [result.choice for result in results[:1] if result.choice is not None]
            found = fastest_within(
                problem, limit, memory_bytes=self.memory_bytes, known=begin, met=near, prove=not results
            )
            results.append(found)
        strategies = [space.strategy(result.choice) for result in results if result.choice is not None]
        strategies = [self.plainer(strategy, limit) for strategy in strategies]
        strategies = list({tuple(strategy.values()): strategy for strategy in strategies}.values())
        strategies.sort(key=self._costing(1.0))
        cost = min([results[0].cost_s, *(self.cost(strategy, 1.0) for strategy in strategies)])
        return Within(
            limit,
            tuple(strategies),
            cost,
            min(cost, results[0].lower_bound_s),
            _prices(memory, results[0].price),
            sum(map(len, space.configs.values())),
        )

    def constrained(self, within: Within) -> tuple[CostTables, list[Costs]]:
        """All that a search under a limit chose from, and the bytes of the rows that have a price: for `export`."""
        space = Variants.of(self.cells, self.forms)
        bounds = MemoryBounds(self.model, space.configs)
        priced = [bounds.tables(price.instant, price.device) for price in within.prices]
        return self.model.tables(space.configs), [Costs(table.node, table.edge) for table in priced]

    def least(self, known: Sequence[Strategy]) -> Least[Strategy]:
        """The least memory of all strategies. known: strategies over `cells` to begin with."""
        space = Variants.of(self.cells, self.forms)
        problem = self._memory_alone(space)
        game = least_rows(problem, by_messages)
        met = sorted(game.met, key=lambda met: float(met.rows.max()))[:LOOKS]
        formed = [space.choice(s) for strategy in known for s in self.formed(strategy)]
        least = min([*formed, *(m.choice for m in met)], key=problem.peak)
        keep = possible(problem, game.mixed(problem.peak(least)))
        small, begin = space.restrict(keep), inside([least], keep)
        found = least_memory(self._memory_alone(small), memory_bytes=self.memory_bytes, known=begin)
        bound = max(found.lower_bound_bytes, game.bound)
        return Least(small.strategy(found.best), found.bytes, min(bound, found.bytes))

    def _memory_alone(self, space: Variants) -> Problem:
        """Where time does not matter."""
        nothing = {name: np.zeros(len(configs)) for name, configs in space.configs.items()}
        edges = self.model.graph.edges()
        transfer = {e: np.zeros((len(space.bases[e[0]]), len(space.bases[e[1]]))) for e in edges}
        return space.problem(nothing, transfer, Memory.of(self.model, space), self.peak)

    def formed(self, strategy: Strategy) -> list[Strategy]:
        """The strategy in each form that is offered, on all layers for which it means anything."""
        forms = self.forms
        every = [{name: forms.of_layer(name, c, form) for name, c in strategy.items()} for form in forms.offered]
        return list({tuple(s.values()): s for s in every}.values())

    def plainer(self, strategy: Strategy, limit: float) -> Strategy:
        """Without the forms that save nothing: what fits into `limit` bytes without them, and takes no longer.

        Bounds take longer steps for equal within a gap, so a choice may have some.
        """
        for name in [name for name in strategy if name not in self.forms.fixed]:
            others = [{**strategy, name: plain} for plain in _plainer(strategy[name])]
            self._price(others)
            for other in others:
                slower = any(self.cost(other, weight) > self.cost(strategy, weight) for weight in (0.0, 1.0))
                if not slower and self.peak(other) <= limit:
                    strategy = other
                    break
        return strategy

    def peak(self, strategy: Strategy) -> float:
        """Bytes of the fullest device."""
        key = tuple(strategy.values())
        if key not in self._peaks:
            self._peaks[key] = float(peak_bytes(self.model, strategy, self._footprints).max())
        return self._peaks[key]

    def cost(self, strategy: Strategy, weight: float) -> float:
        """Equation 1, with `weight` times t_S."""
        self._price([strategy])
        rest, sync = self._costs[tuple(strategy.values())]
        return rest + weight * sync

    def _price(self, strategies: Iterable[Strategy]) -> None:
        """Several at once are sooner priced than one after the other."""
        new = {key: strategy for strategy in strategies if (key := tuple(strategy.values())) not in self._costs}
        self._costs |= zip(new, exact_costs(self.model, list(new.values())), strict=True)

    def _costing(self, weight: float) -> Callable[[Strategy], float]:
        return lambda strategy: self.cost(strategy, weight)

    def _in_hand(self, limit: float, weight: float, known: Sequence[Strategy]) -> tuple[Strategy | None, float]:
        """Of the strategies in hand the fastest that fits."""
        for strategy in sorted(known, key=self._costing(weight)):
            if self.peak(strategy) <= limit:
                return strategy, self.cost(strategy, weight)
        return None, np.inf

    def _small_enough(self, limit: float, known: Sequence[Strategy]) -> list[Strategy]:
        """Without the strategies whose lower bounds say that they do not fit: true peaks take longer."""
        space = Variants.grouped({name: tuple(dict.fromkeys(s[name] for s in known)) for name in self.cells})
        memory = Memory.of(self.model, space)
        return [strategy for strategy in known if memory.rows(space.choice(strategy)).max() <= limit * SLACK]

    def _cells_within(self, weights: Sequence[float], uppers: Sequence[float]) -> Configs:
        """The cells that a strategy of at most these costs can have, in whatever form."""
        if not np.isfinite(uppers).all():
            return self.cells
        space = Variants.of(self.cells, self.forms)
        rough = rough_tables(self.model, self.cells, self.progress)
        keep: Keep = {name: np.zeros(len(cells), bool) for name, cells in self.cells.items()}
        everywhere = {name: np.arange(len(cells)) for name, cells in self.cells.items()}
        for weight, upper in zip(weights, uppers, strict=True):
            node = weighted(self.model, space.configs, [weight])[0]
            own = {name: least_by_base(node[name], space.cell[name])[0] for name in node}
            for name, lower in lower_bounds(Costs(own, rough.transfer), everywhere).items():
                keep[name] |= lower <= upper * SLACK
        return {n: tuple(c for c, k in zip(cells, keep[n], strict=True) if k) for n, cells in self.cells.items()}


def _plainer(config: Config) -> Iterator[Config]:
    """A configuration with less that saves memory, the plainest first, as far as it has any."""
    states = get_args(States)
    for recompute in (False, True)[: 1 + config.recompute]:
        for these in states[: 1 + states.index(config.states)]:
            plain = replace(config, recompute=recompute, states=these)
            if plain != config:
                yield plain


def _prices(memory: Memory, price: Mapping[int, float]) -> tuple[MemoryPrice, ...]:
    """Of rows of bytes."""
    return tuple(MemoryPrice(*memory.where(row), seconds) for row, seconds in price.items())
