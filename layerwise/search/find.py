"""The search: prune, build the tables, eliminate, and choose among the optima and all baselines by timeline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Config, SearchSpace
from layerwise.cost.price import Price, complete, price
from layerwise.cost.tables import CostModel, CostTables, Progress
from layerwise.cost.timeline import Timeline, timeline
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.eliminate import Optimum, eliminate
from layerwise.search.prune import Keep, by_edge_cost, by_node_cost, restrict

Floats = NDArray[np.float64]
SYNC_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.0)  # how much of t_S overlap leaves exposed is not known beforehand
TIE = 1e-3  # a plan predicted to gain less than this over data parallelism is not worth running


@dataclass(frozen=True, slots=True)
class Candidate:
    """A strategy and what it is predicted to cost. `fits`: within every device's memory."""

    name: str
    strategy: dict[str, Config]
    price: Price
    timeline: Timeline
    fits: bool


@dataclass(frozen=True, slots=True)
class SearchResult:
    """`best` is what to run. `additive` is the strategy that is optimal by step_time_s, and `optimum` its proof."""

    best: Candidate
    additive: Candidate
    baselines: dict[str, Candidate]
    optimum: Optimum
    seconds: dict[str, float]  # tables, search
    configurations: dict[str, int]  # of the whole space: largest of a layer, sum over layers, kept after pruning


def search(
    model: CostModel,
    space: SearchSpace,
    *,
    objective: Literal["timeline", "additive"] = "timeline",
    memory_bytes: float = 2**31,
    fixed: Mapping[str, Config] | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The best strategy over `space`. `fixed` layers keep their configuration; `memory_bytes` bounds search tables."""
    started = time.perf_counter()
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    configs = configurations(model, space, named, fixed or {})
    weights = SYNC_WEIGHTS if objective == "timeline" else SYNC_WEIGHTS[:1]
    tables, nodes, uppers = pruned_tables(model, space, configs, named, fixed or {}, weights, progress)
    built = time.perf_counter()
    optima = []
    for node, upper in zip(nodes, uppers, strict=True):
        keep = by_edge_cost(tables, node, upper)
        small = restrict(tables, keep)
        optima.append((small, eliminate(small, memory_bytes, {name: node[name][keep[name]] for name in node})))
    seconds = {"tables": built - started, "search": time.perf_counter() - built}
    strategies = [_decode(small, optimum) for small, optimum in optima]
    additive = candidate(model, "layerwise", strategies[0])
    baselines = {name: candidate(model, name, strategy) for name, strategy in named.items()}
    best = additive
    if objective == "timeline" and not fixed:
        found = {tuple(s.items()): s for s in strategies[1:]}
        others = [candidate(model, "layerwise", s) for s in found.values()]
        best = choose([additive, *others], baselines)
    counts = {
        "largest": max(map(len, configs.values())),
        "total": sum(map(len, configs.values())),
        "kept": sum(map(len, tables.configs.values())),
    }
    return SearchResult(best, additive, baselines, optima[0][1], seconds, counts)


def choose(found: Sequence[Candidate], baselines: Mapping[str, Candidate]) -> Candidate:
    """The fastest by timeline among those that fit into memory (or among all where none does); ties to data parallelism."""
    everyone = [baselines["data"], *found, *(c for name, c in baselines.items() if name != "data")]
    fitting = [c for c in everyone if c.fits] or everyone
    best = min(fitting, key=lambda c: c.timeline.total_s)
    data = baselines["data"]
    tied = data in fitting and best.timeline.total_s >= data.timeline.total_s * (1 - TIE)
    return data if tied else best


def candidate(model: CostModel, name: str, strategy: Mapping[str, Config]) -> Candidate:
    """Prices a strategy both ways."""
    cost = price(model, strategy)
    fits = cost.memory_bytes <= model.devices.processor.memory_bytes
    return Candidate(name, dict(strategy), cost, timeline(model, strategy), fits)


def configurations(
    model: CostModel, space: SearchSpace, named: Mapping[str, Mapping[str, Config]], fixed: Mapping[str, Config]
) -> dict[str, tuple[Config, ...]]:
    """The configurations of every layer: the space, and whatever a baseline uses; one for inputs, sink, fixed layers."""
    result: dict[str, tuple[Config, ...]] = {}
    for layer in model.graph.layers:
        if layer.op.kind in ("input", "sink"):
            result[layer.name] = (model.end_config(layer),)
        elif layer.name in fixed:
            result[layer.name] = (fixed[layer.name],)
        else:
            known = space.configurations(layer.space.dims)
            extra = dict.fromkeys(s[layer.name] for s in named.values())
            result[layer.name] = known + tuple(c for c in extra if c not in known)
    return result


def pruned_tables(
    model: CostModel,
    space: SearchSpace,
    configs: Mapping[str, tuple[Config, ...]],
    named: Mapping[str, Mapping[str, Config]],
    fixed: Mapping[str, Config],
    weights: Sequence[float],
    progress: Progress | None = None,
) -> tuple[CostTables, list[dict[str, Floats]], list[float]]:
    """Tables without the configurations that no optimum for any weight of t_S contains; node costs and upper bounds.

    The upper bounds come from an exact search over samples and channels only, which is small.
    """
    coarse = SearchSpace(space.devices, ("n", "c"), powers_of_two=True)
    few = configurations(model, coarse, named, fixed)
    few = {name: tuple(c for c in few[name] if c in configs[name]) for name in few}
    small = model.tables(few)
    uppers = []
    for weight in weights:
        node = weighted(model, few, weight)
        uppers.append(eliminate(small, node=node).cost_s)
    keep: Keep = {name: np.zeros(len(cs), bool) for name, cs in configs.items()}
    for weight, upper in zip(weights, uppers, strict=True):
        for name, kept in by_node_cost(weighted(model, configs, weight), upper).items():
            keep[name] |= kept
    kept_configs = {name: tuple(c for c, k in zip(cs, keep[name], strict=True) if k) for name, cs in configs.items()}
    tables = model.tables(kept_configs, progress)
    nodes = [{name: cost[keep[name]] for name, cost in weighted(model, configs, w).items()} for w in weights]
    return tables, nodes, uppers


def weighted(model: CostModel, configs: Mapping[str, tuple[Config, ...]], weight: float) -> dict[str, Floats]:
    """Node costs (C_l,) with `weight` times t_S."""
    result = {}
    for layer in model.graph.layers:
        cost = model.node_cost(layer, configs[layer.name])
        result[layer.name] = cost.total - (1 - weight) * cost.sync
    return result


def _decode(tables: CostTables, optimum: Optimum) -> dict[str, Config]:
    return {name: tables.configs[name][i] for name, i in optimum.choice.items()}
