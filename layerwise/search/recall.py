"""Results of searches, cached for the next run of the same search (`layerwise.cache`): strategies and their proof.

Times that are shown are predicted anew, and a kept strategy must still have the cost that was proven.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from math import inf, isclose
from typing import Any, TypeVar

from layerwise.cache import Answers, UnkeyedError, key_of, restored
from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.cost.price import complete
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.opaque import TorchOp
from layerwise.plan import as_json, parse_strategy
from layerwise.search.limit.limited import Least
from layerwise.search.limit.variants import Strategy
from layerwise.search.limit.within import MemoryPrice, Within
from layerwise.search.overlap.polish import Overlapped
from layerwise.search.solve.eliminate import Optimum
from layerwise.search.solve.narrow import exact_costs

T = TypeVar("T")
Limited = tuple[Within, Least[Strategy] | None]


@dataclass(frozen=True, slots=True)
class Solved:
    """The optimum without a memory limit: a strategy, and its proof."""

    strategy: dict[str, Config]
    optimum: Optimum
    kept: int  # configurations that were left after pruning, of all layers
    seconds: Mapping[str, float] = field(compare=False)


class Recall:
    """The answers of one search. facts: what it follows from, beside the model."""

    def __init__(self, answers: Answers | None, model: CostModel, *facts: object) -> None:
        self.model, self._key = model, ""
        self.answers: Answers | None = None
        if answers is not None and not own_kernels(model.graph):
            with suppress(UnkeyedError):
                self._key = key_of(version("torch"), model.graph, model.devices, model.options, *facts)
                self.answers = answers

    def solved(self, find: Callable[[], Solved]) -> Solved:
        """The optimum without a limit; `find` finds it where none is kept."""
        return self.recalled((), find, self._solved_as_json, self._solved)

    def limited(self, find: Callable[[], Limited], limit_bytes: float, offer: Sequence[str]) -> Limited:
        """The result of a search under a limit."""
        return self.recalled((limit_bytes, list(offer)), find, self._limited_as_json, self._limited)

    def overlapped(self, find: Callable[[], Overlapped], *facts: object) -> Overlapped:
        """The result of the search over steps with overlap."""
        return self.recalled(("overlap", *facts), find, self._overlapped_as_json, self._overlapped)

    def recalled(
        self,
        facts: tuple[object, ...],
        find: Callable[[], T],
        write: Callable[[T], object],
        read: Callable[[Any], T],
    ) -> T:
        """The cached result for these facts, as `write` writes and `read` reads it; else what `find` finds."""
        if self.answers is None:
            return find()
        return self.answers.recalled(key_of(self._key, *facts), find, write, read)

    def _solved(self, kept: Any) -> Solved:
        optimum = restored(Optimum, kept["optimum"])
        (strategy,) = self._strategies(kept, optimum.cost_s)
        return Solved(strategy, optimum, restored(int, kept["kept"]), {})

    def _limited(self, kept: Any) -> Limited:
        told, least = kept["within"], kept["least"]
        cost_s, bound_s = (_number(restored(float | None, told[name])) for name in ("cost_s", "lower_bound_s"))
        prices = restored(tuple[MemoryPrice, ...], told["prices"])
        limit, left = restored(float, told["limit_bytes"]), restored(int, told["configurations"])
        within = Within(limit, self._strategies(told, cost_s), cost_s, bound_s, prices, left)
        if least is None:
            return within, None
        size, bound = (restored(float, least[name]) for name in ("bytes", "lower_bound_bytes"))
        return within, Least(self._strategy(least["best"]), size, bound)

    def _overlapped(self, cached: Any) -> Overlapped:
        costs_s = restored(tuple[float, ...], cached["costs_s"])
        strategies = self._strategies(cached, costs_s[0] if costs_s else 0.0)
        return Overlapped(strategies, restored(float, cached["lower_bound_s"]))

    def _overlapped_as_json(self, found: Overlapped) -> object:
        return {**self._written(found.strategies), "lower_bound_s": found.lower_bound_s}

    def _solved_as_json(self, found: Solved) -> object:
        return {**self._written([found.strategy]), "optimum": asdict(found.optimum), "kept": found.kept}

    def _limited_as_json(self, found: Limited) -> object:
        within, least = found
        times = {name: _finite(getattr(within, name)) for name in ("cost_s", "lower_bound_s")}
        return {
            "within": asdict(within) | self._written(within.strategies) | times,
            "least": least and asdict(least) | {"best": self._as_json(least.best)},
        }

    def _written(self, strategies: Sequence[Mapping[str, Config]]) -> dict[str, object]:
        """Strategies with what each costs, for `_strategies`."""
        costs_s = [sum(cost) for cost in exact_costs(self.model, strategies)]
        return {"strategies": [self._as_json(strategy) for strategy in strategies], "costs_s": costs_s}

    def _strategies(self, kept: Any, first_s: float) -> tuple[dict[str, Config], ...]:
        """LayerwiseError where one costs something else than is said of it, or the first than was proven."""
        strategies = tuple(self._strategy(strategy) for strategy in kept["strategies"])
        costs_s, found = restored(tuple[float, ...], kept["costs_s"]), exact_costs(self.model, strategies)
        wanted = [(first_s, cost_s) if i == 0 else (cost_s,) for i, cost_s in enumerate(costs_s)]
        for cost, those in zip(found, wanted, strict=True):
            if not all(isclose(sum(cost), cost_s, rel_tol=1e-9) for cost_s in those):
                raise LayerwiseError("its strategy costs something else now")
        return strategies

    def _as_json(self, strategy: Mapping[str, Config]) -> dict[str, object]:
        return {layer.name: as_json(strategy[layer.name]) for layer in self.model.graph.inner}

    def _strategy(self, kept: object) -> dict[str, Config]:
        return complete(self.model, parse_strategy(kept, self.model.graph, self.model.devices.count))


def own_kernels(graph: LayerGraph) -> bool:
    """True if an operator is code of somebody else's that is registered with torch, which no digest sees."""
    operators = (stage.op for layer in graph.layers for stage in layer.stages)
    return any(isinstance(op, TorchOp) and not op.target.startswith("aten::") for op in operators)


def _finite(seconds: float) -> float | None:
    """JSON has no infinity."""
    return None if seconds == inf else seconds


def _number(seconds: float | None) -> float:
    return inf if seconds is None else seconds
