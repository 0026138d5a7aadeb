"""Tables over the few configurations that an optimum can contain.

Exact tables over all configurations take far longer to build than to search. So transfers are first bounded by what a
few devices see of them; message passing turns that into a bound for every configuration (`bound.py`), a strategy
decoded from the messages is priced exactly, and what is bounded to cost more goes before exact tables are built.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostTables, Progress
from layerwise.cost.transfer import telling_devices, with_ports
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats
from layerwise.search.bound import Messages
from layerwise.search.eliminate import total
from layerwise.search.prune import SLACK, Keep

SWEEPS = 1  # of message passing for each weight: more tighten the bounds little
ROUNDS = 8  # of looking for the devices that the best strategy waits for


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Exact tables of what is left, and for each weight of t_S the node costs and the cost of a strategy in hand."""

    tables: CostTables
    nodes: list[dict[str, Floats]]
    uppers: list[float]
    bounding_s: float  # time that the message passing took


def narrow(
    model: CostModel,
    configs: Mapping[str, tuple[Config, ...]],
    named: Mapping[str, Mapping[str, Config]],
    weights: Sequence[float],
    progress: Progress | None = None,
) -> Narrowed:
    """Leaves out the configurations that no optimum for any weight of t_S contains; `named` strategies are in hand."""
    rough = rough_tables(model, configs, progress)
    messages = Messages(rough.transfer, list(configs))
    known = [exact_cost(model, {name: s[name] for name in configs}) for s in named.values()]
    keep: Keep = {name: np.zeros(len(cs), bool) for name, cs in configs.items()}
    uppers = []
    bounding_s = 0.0
    nodes = [weighted(model, configs, weight) for weight in weights]
    for weight, node in zip(weights, nodes, strict=True):
        started = time.perf_counter()
        bounds = messages.bounds(node, SWEEPS)
        bounding_s += time.perf_counter() - started
        known.append(exact_cost(model, strategy_of(configs, bounds.choice)))
        uppers.append(min(rest + weight * sync for rest, sync in known))
        if not np.isfinite(uppers[-1]):
            raise LayerwiseError("every strategy takes infinitely long: the profile's latencies or rates are absurd")
        for name, lower in bounds.lower_s.items():
            keep[name] |= lower <= uppers[-1] * SLACK
    kept_configs = {name: tuple(c for c, k in zip(cs, keep[name], strict=True) if k) for name, cs in configs.items()}
    tables = model.tables(kept_configs, progress)
    kept_nodes = [{name: cost[keep[name]] for name, cost in node.items()} for node in nodes]
    return Narrowed(tables, kept_nodes, uppers, bounding_s)


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
        best = strategy_of(configs, bounds.choice)
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
    sync = sum(float(model.node_cost(model.graph[name], (config,)).overlapped[0]) for name, config in strategy.items())
    return total(tables.node, tables.transfer, choice) - sync, sync


def strategy_of(configs: Mapping[str, tuple[Config, ...]], choice: Mapping[str, int]) -> dict[str, Config]:
    """The configurations of these indices."""
    return {name: configs[name][i] for name, i in choice.items()}


def weighted(model: CostModel, configs: Mapping[str, tuple[Config, ...]], weight: float) -> dict[str, Floats]:
    """Node costs (C_l,) with `weight` times t_S."""
    result = {}
    for layer in model.graph.layers:
        cost = model.node_cost(layer, configs[layer.name])
        result[layer.name] = cost.total - (1 - weight) * cost.overlapped
    return result
