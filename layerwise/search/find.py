"""The search: prune, build the tables, eliminate, and choose among the optima and all baselines by timeline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Config, SearchSpace
from layerwise.cost.price import Price, complete, price
from layerwise.cost.tables import CostModel, CostTables, Progress
from layerwise.cost.timeline import Timeline, timeline
from layerwise.cost.transfer import telling_devices, with_ports
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.bound import Messages
from layerwise.search.eliminate import Optimum, eliminate, total
from layerwise.search.prune import SLACK, Keep, by_edge_cost, restrict

Floats = NDArray[np.float64]
SYNC_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.0)  # how much of t_S overlap leaves exposed is not known beforehand
SWEEPS = 4  # of message passing: more tighten the bounds little
ROUNDS = 8  # of looking for the devices that the best strategy waits for
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
    strategies = [_chosen(small.configs, optimum.choice) for small, optimum in optima]
    distinct = {tuple(s.items()): s for s in strategies}
    found = [candidate(model, "layerwise", s) for s in distinct.values()]
    baselines = {name: candidate(model, name, strategy) for name, strategy in named.items()}
    additive, optimum = found[0], optima[0][1]
    if not optimum.proven and not fixed:  # what was found instead may be worse than a baseline
        additive = min([additive, *baselines.values()], key=lambda c: c.price.step_time_s)
        optimum = replace(optimum, cost_s=min(optimum.cost_s, additive.price.step_time_s))
    best = choose(found, baselines) if objective == "timeline" and not fixed else additive
    counts = {
        "largest": max(map(len, configs.values())),
        "total": sum(map(len, configs.values())),
        "kept": sum(map(len, tables.configs.values())),
    }
    return SearchResult(best, additive, baselines, optimum, seconds, counts)


def choose(found: Sequence[Candidate], baselines: Mapping[str, Candidate]) -> Candidate:
    """The fastest by timeline of those that fit into memory (of all, where none does); ties to data parallelism."""
    everyone = [baselines["data"], *found, *(c for name, c in baselines.items() if name != "data")]
    fitting = [c for c in everyone if c.fits] or everyone
    best = min(fitting, key=lambda c: c.timeline.total_s)
    data = baselines["data"]
    tied = data in fitting and best.timeline.total_s >= data.timeline.total_s * (1 - TIE)
    return data if tied else best


def candidate(model: CostModel, name: str, strategy: Mapping[str, Config]) -> Candidate:
    """Prices a strategy both ways."""
    strategy = complete(model, strategy)
    cost = price(model, strategy)
    fits = cost.memory_bytes <= model.devices.processor.memory_bytes
    return Candidate(name, strategy, cost, timeline(model, strategy), fits)


def configurations(
    model: CostModel, space: SearchSpace, named: Mapping[str, Mapping[str, Config]], fixed: Mapping[str, Config]
) -> dict[str, tuple[Config, ...]]:
    """The configurations of every layer: the space, and what a baseline uses; one for inputs, sink, fixed layers."""
    result: dict[str, tuple[Config, ...]] = {}
    for layer in model.graph.layers:
        if layer.end:
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

    A strategy decoded from lower bounds is priced exactly; whatever is bounded to cost more goes, and the exact tables
    are built for the rest.
    """
    rough = rough_tables(model, configs, progress)
    messages = Messages(rough.transfer, list(configs))
    known = [exact_cost(model, {name: s[name] for name in configs}) for s in named.values()] if not fixed else []
    keep: Keep = {name: np.zeros(len(cs), bool) for name, cs in configs.items()}
    uppers = []
    for weight in weights:
        bounds = messages.bounds(weighted(model, configs, weight), SWEEPS)
        known.append(exact_cost(model, _chosen(configs, bounds.choice)))
        uppers.append(min(rest + weight * sync for rest, sync in known))
        for name, lower in bounds.lower_s.items():
            keep[name] |= lower <= uppers[-1] * SLACK
    kept_configs = {name: tuple(c for c, k in zip(cs, keep[name], strict=True) if k) for name, cs in configs.items()}
    tables = model.tables(kept_configs, progress)
    nodes = [{name: cost[keep[name]] for name, cost in weighted(model, configs, w).items()} for w in weights]
    return tables, nodes, uppers


def rough_tables(model: CostModel, configs: Mapping[str, tuple[Config, ...]], progress: Progress | None) -> CostTables:
    """Tables whose transfers are lower bounds, but exact where it matters.

    Transfers are priced as a few devices see them. Where the strategy that then looks best is in truth slower, the
    devices that it waits for are watched too, until it is not.
    """
    watched = telling_devices(model.devices)
    if model.options.link_model != "port" or 2 * len(watched) > model.devices.count:
        return model.tables(configs, progress)
    rough = model.tables(configs, progress, watched)
    for _ in range(ROUNDS):
        bounds = Messages(rough.transfer, list(configs)).bounds(rough.node, SWEEPS)
        best = _chosen(configs, bounds.choice)
        waiting = set()
        for edge, cost in rough.transfer.items():
            seen = cost[bounds.choice[edge[0]], bounds.choice[edge[1]]]
            if model.edge_cost(edge, (best[edge[0]],), (best[edge[1]],))[0, 0] > seen * SLACK:
                waiting.add(model.busiest_device(edge, best[edge[0]], best[edge[1]]))
        new = with_ports(waiting, model.devices)
        if not new:
            break
        more = model.tables(configs, progress, new).transfer
        rough = replace(rough, transfer={edge: np.maximum(cost, more[edge]) for edge, cost in rough.transfer.items()})
    return rough


def exact_cost(model: CostModel, strategy: Mapping[str, Config]) -> tuple[float, float]:
    """Equation 1 of a strategy without t_S, and t_S."""
    tables = model.tables({name: (config,) for name, config in strategy.items()})
    choice = dict.fromkeys(strategy, 0)
    sync = sum(float(model.node_cost(model.graph[name], (config,)).sync[0]) for name, config in strategy.items())
    return total(tables.node, tables.transfer, choice) - sync, sync


def _chosen(configs: Mapping[str, tuple[Config, ...]], choice: Mapping[str, int]) -> dict[str, Config]:
    return {name: configs[name][i] for name, i in choice.items()}


def weighted(model: CostModel, configs: Mapping[str, tuple[Config, ...]], weight: float) -> dict[str, Floats]:
    """Node costs (C_l,) with `weight` times t_S."""
    result = {}
    for layer in model.graph.layers:
        cost = model.node_cost(layer, configs[layer.name])
        result[layer.name] = cost.total - (1 - weight) * cost.sync
    return result
