"""Tables over the few configurations that an optimum can contain, exact where it matters.

Exact tables over all configurations take far longer to build than to search. So transfers are first bounded by a few
devices' share of them; message passing turns that into a bound for every configuration (`Messages`); a strategy decoded
from the messages is priced exactly, and configurations with a higher bound are dropped. The optimum over bounds is the
optimum if its own transfers are exact; if not, they are made exact, and the search repeats (`exact_optimum`).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostModel, CostTables, EdgeName, Progress
from layerwise.cost.transfer import telling_devices, with_ports
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats, Mask
from layerwise.quantities import units
from layerwise.search.solve.eliminate import Optimum, eliminate

Keep = dict[str, Mask]
SLACK = 1 + 1e-9  # rounding: never drop an optimum that ties with the bound
PAYS = 0.9  # pass over the tables again if the last pass left at most this fraction of the configurations
SWEEPS = 1  # of message passing: more improve the bounds little
FEW = 16  # configurations of a layer, below which better bounds take longer than they save
ROUNDS = 8  # of looking for the devices that limit the best strategy
Configs = Mapping[str, tuple[Config, ...]]


def narrow(
    model: CostModel, configs: Configs, named: Sequence[Mapping[str, Config]], progress: Progress | None = None
) -> tuple[CostTables, float]:
    """Tables of the configurations that an optimum may contain, with lower bounds for transfers, and the cost of the
    best strategy so far. named: known strategies.
    """
    check_room(model, configs)
    upper_s = min(map(model.step_s, named), default=np.inf)
    left: CostTables | None = None
    # The first device has a cell in every configuration; for the inner device see `telling_devices`.
    for watched in ((0,), (model.devices.count // 3,), None):
        if left is not None and max(map(len, configs.values())) <= FEW:
            break  # `exact_optimum` makes exact what it needs
        tables = model.tables(configs, progress, watched) if watched else rough_tables(model, configs, progress)
        if left is not None:
            raised_s = {edge: np.maximum(cost, tables.transfer[edge]) for edge, cost in left.transfer.items()}
            tables = replace(tables, transfer=raised_s)
        bounds = Messages(tables.transfer, list(configs)).bounds(tables.node, SWEEPS)
        upper_s = min(upper_s, model.step_s(strategy_of(configs, bounds.choice)))
        if not np.isfinite(upper_s):
            raise LayerwiseError("every strategy takes infinitely long: check the profile's latencies and rates")
        left = restrict(tables, bounds.within(upper_s))
        configs = left.configs
    assert left is not None
    return left, upper_s


def check_room(model: CostModel, configs: Configs) -> None:
    """Raises LayerwiseError if the tables of the first bounds (equal ones shared) exceed the memory.

    They count twice: while they were built, the peak was 1.6 to 2.1 times their size (VGG-16, 1,024 to 65,536 GPUs).
    """
    names = [name for name in model.graph.edges() if model.directions(name)]
    edges = {model.edge(name, configs[name[0]], configs[name[1]]) for name in names}
    wanted, there = sum(2 * 8 * u * v for u, v in (edge.pairs for edge in edges)), memory_of_host()
    if wanted > there:
        raise LayerwiseError(
            f"the tables for {max(map(len, configs.values()))} configurations of a layer on {model.devices.count} "
            f"devices need {units(wanted, 'B')}, but this host has {units(there, 'B')} of memory: search fewer "
            "dimensions (--dims), powers of two only (--degrees powers-of-two) or fewer devices"
        )


def memory_of_host() -> int:
    """The bytes of the host's memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def rough_tables(model: CostModel, configs: Configs, progress: Progress | None) -> CostTables:
    """Tables whose transfers are lower bounds, but exact where it matters.

    Transfers are priced for a few devices. If the strategy that then looks best is in fact slower, the devices that
    limit it are watched too, until it is not.
    """
    watched = telling_devices(model.devices)
    if model.options.link_model == "sum" or 2 * len(watched) > model.devices.count:
        return model.tables(configs, progress)
    rough = model.tables(configs, progress, watched)
    for _ in range(ROUNDS):
        bounds = Messages(rough.transfer, list(configs)).bounds(rough.node, SWEEPS)
        if not raised(model, rough, bounds.choice):
            break
    return rough


def exact_optimum(
    model: CostModel, tables: CostTables, upper_s: float, memory_bytes: float
) -> tuple[CostTables, Optimum]:
    """The cheapest strategy, and the tables over the remaining configurations.

    Transfers may be lower bounds: the optimum's are made exact, until it is the optimum of exact ones.
    """
    while True:
        bounds = Messages(tables.transfer, list(tables.node)).bounds(tables.node, SWEEPS)
        tables = restrict(tables, bounds.within(upper_s))
        found = eliminate(tables, memory_bytes)
        if not raised(model, tables, found.choice):
            return tables, found


def raised(model: CostModel, tables: CostTables, choice: Mapping[str, int]) -> bool:
    """Raises the transfer bounds that are below a choice's transfers; returns whether there were any.

    Each is raised by the device that limits it, so it is exact for this choice and better for others.
    """
    strategy = strategy_of(tables.configs, choice)
    found = list[EdgeName]()
    for edge, cost in tables.transfer.items():
        ends, pair = (strategy[edge[0]], strategy[edge[1]]), (choice[edge[0]], choice[edge[1]])
        exact = model.pair_s(edge, ends)
        if exact > cost[pair] * SLACK:
            found.append(edge)
            watched = with_ports((model.busiest_device(edge, *ends),), model.devices)
            more = model.edge_cost(edge, tables.configs[edge[0]], tables.configs[edge[1]], watched)
            tables.transfer[edge] = np.maximum(cost, more)
            tables.transfer[edge][pair] = exact  # a rack's uplink is shared by more devices than are watched
    return bool(found)


def strategy_of(configs: Mapping[str, tuple[Config, ...]], choice: Mapping[str, int]) -> dict[str, Config]:
    """The configurations with these indices."""
    return {name: configs[name][i] for name, i in choice.items()}


def node_costs(model: CostModel, configs: Configs) -> dict[str, Floats]:
    """(C_l,) each layer's own cost under each configuration."""
    return {layer.name: model.node_cost(layer, configs[layer.name]).total for layer in model.graph.layers}


def restrict(tables: CostTables, keep: Keep) -> CostTables:
    """The tables over the kept configurations."""
    return CostTables(
        {name: tuple(c for c, k in zip(cs, keep[name], strict=True) if k) for name, cs in tables.configs.items()},
        {name: cost[keep[name]] for name, cost in tables.node.items()},
        {e: cost[keep[e[0]]][:, keep[e[1]]] for e, cost in tables.transfer.items()},
    )


Pair = tuple[str, str]
CACHED = 1 << 16  # elements of a table summed at once, to stay in the cache


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the cost of strategies, by message passing."""

    lower_s: dict[str, Floats]  # (C_l,) for each layer: of every strategy with the configuration
    choice: dict[str, int]  # a good strategy's indices, decoded from the same messages

    def within(self, upper_s: float) -> Keep:
        """Masks (C_l,) of configurations that may be part of a strategy of at most `upper_s`."""
        return {name: lower_s <= upper_s * SLACK for name, lower_s in self.lower_s.items()}


class Messages:
    """Messages along the edges of a graph; they stay valid when node costs change."""

    def __init__(self, transfer: Mapping[EdgeName, Floats], names: Sequence[str]) -> None:
        self.names = list(names)
        self.edges: dict[Pair, Floats] = {}
        for (u, v, _), cost in transfer.items():
            self.edges[u, v] = self.edges[u, v] + cost if (u, v) in self.edges else cost
        self.down = {pair: np.zeros(cost.shape[1]) for pair, cost in self.edges.items()}  # to the consumer
        self.up = {pair: np.zeros(cost.shape[0]) for pair, cost in self.edges.items()}  # to the producer
        self.ins: dict[str, list[Pair]] = {name: [] for name in self.names}
        self.outs: dict[str, list[Pair]] = {name: [] for name in self.names}
        for u, v in self.edges:
            self.outs[u].append((u, v))
            self.ins[v].append((u, v))

    def bounds(self, node: Mapping[str, Floats], sweeps: int) -> Bounds:
        """Passes messages forward and backward `sweeps` times, then bounds every configuration."""
        for _ in range(sweeps):
            for name in self.names:
                share = self._share(name, node)
                for pair in self.outs[name]:
                    (self.down[pair],) = _least_by_column(self.edges[pair], share - self.up[pair])
            for name in reversed(self.names):
                share = self._share(name, node)
                for pair in self.ins[name]:
                    self.up[pair] = _least_by_row(self.edges[pair], share - self.down[pair])
        return Bounds(self._lower(node), self._decode(node))

    def _belief(self, name: str, node: Mapping[str, Floats]) -> Floats:
        """A layer's cost plus all messages from its neighbours."""
        total = node[name].copy()
        for pair in self.ins[name]:
            total += self.down[pair]
        for pair in self.outs[name]:
            total += self.up[pair]
        return total

    def _share(self, name: str, node: Mapping[str, Floats]) -> Floats:
        return self._belief(name, node) / max(len(self.ins[name]), len(self.outs[name]), 1)

    def _lower(self, node: Mapping[str, Floats]) -> dict[str, Floats]:
        """The terms left after a backward sweep: none is negative, so any of them may be added up.

        A layer has given parts of its belief to its inward edges; what it keeps is bounded by its minimum. Beyond the
        sum of all minima, a configuration costs at least the cheapest path to it from the first layer, by the most
        expensive of its inward edges, and the minimum of each other inward edge.
        """
        floor, beyond = 0.0, {}
        for name in self.names:
            share = self._share(name, node)
            kept = share * max(len(self.outs[name]) - len(self.ins[name]), 0 if self.ins[name] else 1)
            floor += float(kept.min())
            beyond[name] = kept - kept.min()
            if self.ins[name]:
                by_way, least = [], []
                for u, v in self.ins[name]:
                    up, here = self.up[u, v], share - self.down[u, v]
                    edge_s, way_s = _least_by_column(self.edges[u, v], -up, beyond[u] - up)
                    least.append(edge_s + here)
                    by_way.append(way_s - edge_s)
                beyond[name] += np.sum(least, axis=0) + np.max(by_way, axis=0)
        return {name: floor + cost for name, cost in beyond.items()}

    def _decode(self, node: Mapping[str, Floats]) -> dict[str, int]:
        """Decodes layer by layer: the cheapest, given the choices so far and the messages from later layers."""
        choice: dict[str, int] = {}
        for name in self.names:
            cost = node[name].copy()
            for pair in self.ins[name]:
                cost += self.edges[pair][choice[pair[0]]]
            for pair in self.outs[name]:
                cost += self.up[pair]
            choice[name] = int(cost.argmin())
        return choice


def _least_by_column(table: Floats, *rows: Floats) -> list[Floats]:
    """The minimum of table + row[:, None] in every column, (C_v,), for each of `rows` (C_u,)."""
    found = [np.full(table.shape[1], np.inf) for _ in rows]
    for part, sums in _parts(table):
        for least, row in zip(found, rows, strict=True):
            np.add(table[part], row[part, None], out=sums)
            np.minimum(least, sums.min(0), out=least)
    return found


def _least_by_row(table: Floats, column: Floats) -> Floats:
    """The minimum of table + column[None, :] in every row, (C_u,)."""
    least = np.empty(len(table))
    for part, sums in _parts(table):
        np.add(table[part], column, out=sums).min(1, out=least[part])
    return least


def _parts(table: Floats) -> Iterator[tuple[slice, Floats]]:
    """Blocks of rows of a table, each with a buffer of its size."""
    step = min(max(1, CACHED // table.shape[1]), len(table))
    room = np.empty((step, table.shape[1]))
    for start in range(0, len(table), step):
        yield slice(start, start + step), room[: len(table) - start]
