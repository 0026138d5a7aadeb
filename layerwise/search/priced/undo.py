"""Undo: forms that save memory which the plan does not need are taken back where that costs no time."""

from __future__ import annotations

from collections.abc import Collection

from layerwise.config import Config
from layerwise.cost.additive import edges_of
from layerwise.cost.memory.step import fullest_bytes
from layerwise.cost.model import CostModel
from layerwise.search.priced.variants import Strategy
from layerwise.search.solve.narrow import SLACK


def without_vain_forms(model: CostModel, strategy: Strategy, fixed: Collection[str], limit: float) -> Strategy:
    """The strategy without recomputation and sharded states, as far as it still fits into `limit` bytes and takes no
    longer.

    Equal layers are changed together. fixed: layers that stay as they are.
    """
    near = edges_of((layer.name for layer in model.graph.layers), model.graph.edges())
    slack = (SLACK - 1) * model.step_s(strategy)

    def added_s(move: Strategy) -> float:
        """Seconds that a step takes longer if some layers get other configurations."""
        after, own = {**strategy, **move}, [model.graph[name] for name in move]
        seconds = sum(model.layer_s(x, after[x.name]) - model.layer_s(x, strategy[x.name]) for x in own)
        for edge in dict.fromkeys(edge for name in move for edge in near[name]):
            u, v, _ = edge
            seconds += model.pair_s(edge, (after[u], after[v])) - model.pair_s(edge, (strategy[u], strategy[v]))
        return seconds

    def fits(move: Strategy) -> bool:
        return fullest_bytes(model, {**strategy, **move}) <= limit

    groups = dict[tuple[int, Config], list[str]]()
    for name, config in strategy.items():
        if name not in fixed:
            groups.setdefault((model.kind(model.graph[name]), config), []).append(name)
    free = list[list[Strategy]]()  # by group, the changes that cost no time, largest first
    for (_, c), names in groups.items():
        less = c.cells, c.saving(recompute=False, states=c.states), c.saving(recompute=c.recompute, states="replicated")
        plainer = [dict.fromkeys(names, form) for form in dict.fromkeys(less) if form != c]
        free.append([move for move in plainer if added_s(move) <= slack])
    every = {name: config for moves in free if moves for name, config in moves[0].items()}
    if added_s(every) <= slack and fits(every):
        return {**strategy, **every}
    for moves in free:
        found = (move for move in moves if added_s(move) <= slack and fits(move))
        strategy = {**strategy, **next(found, {})}
    return strategy
