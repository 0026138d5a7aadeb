"""The search: prune, build the tables, eliminate, and choose among the optima and all baselines by timeline."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Literal

from layerwise.config import Config, SearchSpace
from layerwise.cost.basis import model_error
from layerwise.cost.model import CostModel, Progress
from layerwise.cost.price import complete, price
from layerwise.cost.timeline.simulate import timeline
from layerwise.errors import LayerwiseError
from layerwise.partition.holding import held_configurations
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.eliminate import eliminate
from layerwise.search.narrow import narrow, strategy_of
from layerwise.search.prune import by_edge_cost, restrict
from layerwise.search.result import Candidate, SearchResult, preference

SYNC_WEIGHTS = (1.0, 0.5, 0.25, 0.1, 0.0)  # how much of t_S overlap leaves exposed is not known beforehand


def search(
    model: CostModel,
    space: SearchSpace,
    *,
    objective: Literal["timeline", "additive"] = "timeline",
    memory_bytes: float = 2**31,
    fixed: Mapping[str, Config] | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """The best strategy over `space`. `memory_bytes` bounds search tables.

    `fixed` layers keep their configuration; the answer is then the additive optimum, and no baseline.
    """
    if space.devices != model.devices.count:
        raise LayerwiseError(f"the space is for {space.devices} devices, the device graph has {model.devices.count}")
    if unknown := sorted(set(fixed or {}) - {layer.name for layer in model.graph.inner}):
        raise LayerwiseError(f"fixed layer {unknown[0]!r} is not in the model")
    started = time.perf_counter()
    named = {name: complete(model, baseline(model, name)) for name in NAMES}
    configs = configurations(model, space, named, fixed or {})
    weights = SYNC_WEIGHTS if objective == "timeline" else SYNC_WEIGHTS[:1]
    narrowed = narrow(model, configs, {} if fixed else named, weights, progress)
    built = time.perf_counter()
    tables, optima = narrowed.tables, []
    for node, upper in zip(narrowed.nodes, narrowed.uppers, strict=True):
        keep = by_edge_cost(tables, node, upper)
        small = restrict(tables, keep)
        optima.append((small, eliminate(small, memory_bytes, {name: node[name][keep[name]] for name in node})))
    searching = time.perf_counter() - built + narrowed.bounding_s
    seconds = {"tables": built - started - narrowed.bounding_s, "search": searching}
    strategies = [strategy_of(small.configs, optimum.choice) for small, optimum in optima]
    distinct = {tuple(s.items()): s for s in strategies}
    candidates = [candidate(model, "layerwise", s) for s in distinct.values()]
    baselines = {name: candidate(model, name, strategy) for name, strategy in named.items()}
    if not baselines["data"].timeline.total_s:
        raise LayerwiseError(f"model {model.graph.name!r} only renames its input, which takes no time: nothing to plan")
    additive, optimum = candidates[0], optima[0][1]
    if not optimum.proven and not fixed:  # a baseline may be better than what the search came to
        additive = min([additive, *baselines.values()], key=lambda c: c.price.step_time_s)
        optimum = replace(optimum, cost_s=min(optimum.cost_s, additive.price.step_time_s))
    best = choose(candidates, baselines) if objective == "timeline" and not fixed else additive
    best = next((c for c in baselines.values() if c.strategy == best.strategy), best)
    counts = {
        "largest": max(map(len, configs.values())),
        "total": sum(map(len, configs.values())),
        "kept": sum(map(len, tables.configs.values())),
    }
    # Equal strategies are listed once, under a baseline's name where one is equal: data parallelism's before others.
    everyone = [*candidates, *reversed(baselines.values())] if not fixed else candidates
    simulated = tuple({tuple(c.strategy.items()): c for c in everyone}.values())
    capacity = model.devices.processor.memory_bytes
    return SearchResult(best, additive, baselines, optimum, seconds, counts, simulated, capacity)


def choose(optima: Sequence[Candidate], baselines: Mapping[str, Candidate]) -> Candidate:
    """The best by `preference`; data parallelism where that gains no more than the model's error."""
    everyone = [baselines["data"], *optima, *(c for name, c in baselines.items() if name != "data")]
    best, data = min(everyone, key=preference), baselines["data"]
    least_s = data.timeline.total_s * (1 - model_error(data.price, best.price))
    return data if data.fits == best.fits and best.timeline.total_s >= least_s else best


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
            known = held_configurations(layer, space)
            extra = dict.fromkeys(s[layer.name] for s in named.values())
            result[layer.name] = known + tuple(c for c in extra if c not in known)
    return result
