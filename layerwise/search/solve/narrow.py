"""Tables over the few configurations that an optimum can contain, exact where an optimum is.

Exact tables over all configurations take far longer to build than to search. So transfers are first bounded by what a
few devices see of them; message passing turns that into a bound for every configuration (`solve.bound`), a strategy
decoded from the messages is priced exactly, and what is bounded to cost more goes. The optimum over bounds is the
optimum if its own transfers are exact: where they are not, they are made so, until they are (`exact_optimum`).
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostTables, EdgeName, Progress
from layerwise.cost.transfer import telling_devices, with_ports
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats
from layerwise.quantities import units
from layerwise.search.solve.bound import Messages
from layerwise.search.solve.eliminate import Optimum, eliminate, total
from layerwise.search.solve.prune import PAYS, SLACK, Keep, by_edge_cost, restrict

SWEEPS = 1  # of message passing for each weight: more tighten the bounds little
FEW = 16  # configurations of a layer, for which better bounds take longer than they save
ROUNDS = 8  # of looking for the devices that the best strategy waits for
Configs = Mapping[str, tuple[Config, ...]]


@dataclass(frozen=True, slots=True)
class Narrowed:
    """Tables of what is left, and for each weight of t_S the node costs and the cost of a strategy in hand."""

    tables: CostTables  # of which transfers are lower bounds
    nodes: list[dict[str, Floats]]
    uppers: list[float]
    bounding_s: float  # time that the message passing took


def narrow(
    model: CostModel,
    configs: Configs,
    named: Mapping[str, Mapping[str, Config]],
    weights: Sequence[float],
    progress: Progress | None = None,
) -> Narrowed:
    """Leaves out the configurations that no optimum for any weight of t_S contains; `named` strategies are in hand."""
    check_room(model, configs)
    known = _Known(model, weights)
    tables = model.tables(configs, progress, (0,))  # the first device has a cell of every configuration
    hand = [{name: s[name] for name in configs} for s in named.values()]
    left = _bounded(tables, weighted(model, configs, weights), known, hand)
    for watched in ((model.devices.count // 3,), None):  # an inner device, see `telling_devices`
        configs = left.tables.configs
        if max(map(len, configs.values())) <= FEW:
            break  # `exact_optimum` makes exact what it needs
        more = model.tables(configs, progress, watched) if watched else rough_tables(model, configs, progress)
        raised_s = {edge: np.maximum(cost, more.transfer[edge]) for edge, cost in left.tables.transfer.items()}
        again = _bounded(replace(more, transfer=raised_s), left.nodes, known, [])
        left = replace(again, bounding_s=left.bounding_s + again.bounding_s)
    return left


def _bounded(
    tables: CostTables, nodes: list[dict[str, Floats]], known: _Known, hand: Sequence[Mapping[str, Config]]
) -> Narrowed:
    """Leaves out what is bounded to cost more than what is known, one weight of t_S after the other.

    Strategies in `hand` are priced where these bounds leave hope, those decoded from the messages always.
    """
    bounding_s, weights = 0.0, known.weights
    lower: dict[float, dict[str, Floats]] = {}  # of each weight so far
    for weight in _ends_first(weights):
        started = time.perf_counter()
        bounds = Messages(tables.transfer, list(tables.configs)).bounds(nodes[weights.index(weight)], SWEEPS)
        bounding_s += time.perf_counter() - started
        lower[weight] = bounds.lower_s
        known.add([strategy_of(tables.configs, bounds.choice)])
        known.add(_worthwhile(hand, tables, nodes, known.least))
        hand = []
        keep: Keep = {name: np.zeros(len(configs), bool) for name, configs in tables.configs.items()}
        for other, upper in zip(weights, known.least, strict=True):
            for name, lower_s in between(lower, other).items():
                keep[name] |= lower_s <= upper * SLACK
        if len(lower) == len(set(weights)) or _shrinks(tables, keep):
            tables, nodes = restrict(tables, keep), [_of(node, keep) for node in nodes]
            lower = {w: _of(bound, keep) for w, bound in lower.items()}
    return Narrowed(tables, nodes, known.least, bounding_s)


def check_room(model: CostModel, configs: Configs) -> None:
    """LayerwiseError where the tables of the first bounds, of which equal ones are kept once, are more than memory.

    They count twice: while they are made, the peak was 1.6 to 2.1 times what they hold (VGG-16, 1,024 to 65,536 GPUs).
    """
    names = [name for name in model.graph.edges() if model.directions(name)]
    edges = {model.edge(name, configs[name[0]], configs[name[1]]) for name in names}
    wanted, there = sum(2 * 8 * u * v for u, v in (edge.pairs for edge in edges)), memory_of_host()
    if wanted > there:
        raise LayerwiseError(
            f"{max(map(len, configs.values()))} configurations of a layer on {model.devices.count} devices need "
            f"{units(wanted, 'B')} for their tables, and here are {units(there, 'B')} of memory: search fewer "
            "dimensions (--dims), powers of two only (--degrees powers-of-two) or fewer devices"
        )


def _ends_first(weights: Sequence[float]) -> list[float]:
    """The least weight, the greatest, and those between."""
    ordered = sorted(set(weights))
    return [*ordered[:1], *ordered[:0:-1]]


def between(lower: Mapping[float, dict[str, Floats]], weight: float) -> dict[str, Floats]:
    """Bounds for a weight of t_S from those for the least one and some others.

    What a strategy costs is linear in the weight and does not fall with it. So the least of any strategies is concave:
    between two weights no less than on the line, and beyond the last no less than there.
    """
    below = max(w for w in lower if w <= weight)
    above = min((w for w in lower if w >= weight), default=below)
    if above == below:
        return lower[below]
    share = (weight - below) / (above - below)
    return {name: (1 - share) * lower[below][name] + share * lower[above][name] for name in lower[below]}


def _shrinks(tables: CostTables, keep: Keep) -> bool:
    """Whether tables of what is kept take less memory: those of equal edges are held once, but not once restricted."""
    held = {id(cost): cost.size for cost in tables.transfer.values()}
    left = sum(int(keep[u].sum()) * int(keep[v].sum()) for u, v, _ in tables.transfer)
    return left < sum(held.values()) * PAYS


def _of(values: Mapping[str, Floats], keep: Keep) -> dict[str, Floats]:
    """Of each layer's (C_l,) those that are kept."""
    return {name: value[keep[name]] for name, value in values.items()}


def memory_of_host() -> int:
    """Bytes."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _worthwhile(
    strategies: Sequence[Mapping[str, Config]],
    tables: CostTables,
    nodes: Sequence[Mapping[str, Floats]],
    uppers: Sequence[float],
) -> Iterator[Mapping[str, Config]]:
    """Those that may be better than what is known, as far as these bounds can tell."""
    rows = {name: {config: i for i, config in enumerate(configs)} for name, configs in tables.configs.items()}
    for strategy in strategies:
        choice = {name: rows[name][config] for name, config in strategy.items()}
        if any(total(node, tables.transfer, choice) < upper for node, upper in zip(nodes, uppers, strict=True)):
            yield strategy


class _Known:
    """Strategies in hand."""

    def __init__(self, model: CostModel, weights: Sequence[float]) -> None:
        self.model, self.weights = model, weights
        self._costs: dict[tuple[Config, ...], tuple[float, float]] = {}

    def add(self, strategies: Iterable[Mapping[str, Config]]) -> None:
        """Some more."""
        new = {key: s for s in strategies if (key := tuple(s.values())) not in self._costs}
        self._costs |= zip(new, exact_costs(self.model, list(new.values())), strict=True)

    @property
    def least(self) -> list[float]:
        """Seconds of the best of them for each weight of t_S. LayerwiseError where none takes a finite time."""
        costs = [min(rest + weight * sync for rest, sync in self._costs.values()) for weight in self.weights]
        if not np.isfinite(costs).all():
            raise LayerwiseError("every strategy takes infinitely long: the profile's latencies or rates are absurd")
        return costs


def rough_tables(model: CostModel, configs: Configs, progress: Progress | None) -> CostTables:
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
        if not raised(model, rough, bounds.choice):
            break
    return rough


def exact_optimum(
    model: CostModel, tables: CostTables, node: Mapping[str, Floats], upper_s: float, memory_bytes: float
) -> tuple[CostTables, Optimum]:
    """The cheapest strategy, and the tables over the configurations that were left to choose from.

    Transfers may be lower bounds: those of the optimum are made exact, and what is learned stays in `tables`.
    """
    while True:
        keep = by_edge_cost(tables, node, upper_s)
        small = restrict(tables, keep)
        found = eliminate(small, memory_bytes, {name: cost[keep[name]] for name, cost in node.items()})
        kept = {name: np.flatnonzero(mask) for name, mask in keep.items()}
        if not raised(model, tables, {name: int(kept[name][i]) for name, i in found.choice.items()}):
            return small, found


def raised(model: CostModel, tables: CostTables, choice: Mapping[str, int]) -> bool:
    """Raises the bounds of transfers that are no bounds of a choice's: whether there were any.

    Each by the device that it waits for, so that it is exact for this choice and better for others.
    """
    strategy = strategy_of(tables.configs, choice)
    found = list[EdgeName]()
    for edge, cost in tables.transfer.items():
        ends, pair = (strategy[edge[0]], strategy[edge[1]]), (choice[edge[0]], choice[edge[1]])
        (exact,) = model.pair_costs(edge, [ends])
        if exact > cost[pair] * SLACK:
            found.append(edge)
            watched = with_ports((model.busiest_device(edge, *ends),), model.devices)
            more = model.edge_cost(edge, tables.configs[edge[0]], tables.configs[edge[1]], watched)
            tables.transfer[edge] = np.maximum(cost, more)
            tables.transfer[edge][pair] = exact  # a rack's uplink is shared by more devices than are watched
    return bool(found)


def exact_cost(model: CostModel, strategy: Mapping[str, Config]) -> tuple[float, float]:
    """Equation 1 of a strategy without t_S, and t_S."""
    return exact_costs(model, [strategy])[0]


def exact_costs(model: CostModel, strategies: Sequence[Mapping[str, Config]]) -> list[tuple[float, float]]:
    """Of each of these, equation 1 without t_S, and t_S. They share tables, as most of their layers are alike."""
    if not strategies:
        return []
    found = np.zeros((2, len(strategies)))
    for name in strategies[0]:
        own = tuple(dict.fromkeys(s[name] for s in strategies))
        cost, rows = model.node_cost(model.graph[name], own), [own.index(s[name]) for s in strategies]
        found += np.stack([cost.total - cost.overlapped, cost.overlapped])[:, rows]
    for edge in model.graph.edges():
        found[0] += model.pair_costs(edge, [(s[edge[0]], s[edge[1]]) for s in strategies])
    return [(float(rest), float(sync)) for rest, sync in found.T]


def strategy_of(configs: Mapping[str, tuple[Config, ...]], choice: Mapping[str, int]) -> dict[str, Config]:
    """The configurations of these indices."""
    return {name: configs[name][i] for name, i in choice.items()}


def weighted(model: CostModel, configs: Configs, weights: Sequence[float]) -> list[dict[str, Floats]]:
    """Node costs (C_l,) with each of these weights of t_S."""
    costs = {layer.name: model.node_cost(layer, configs[layer.name]) for layer in model.graph.layers}
    totals = {name: (cost.total, cost.overlapped) for name, cost in costs.items()}
    return [{name: total - (1 - weight) * sync for name, (total, sync) in totals.items()} for weight in weights]
