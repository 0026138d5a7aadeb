"""The cost model: equation 1's terms for every layer and edge, for one configuration or for all of them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property, reduce

import numpy as np

from layerwise.arguments import checked
from layerwise.config import Config, distinct_cells
from layerwise.cost.compute.roofline import ComputeTime, compute_time
from layerwise.cost.node_cost import NodeCost, NodeCosts
from layerwise.cost.setting import MANY, Configs, CostOptions, EdgeName, Progress, Setting, Strategy
from layerwise.cost.terms import COMPUTE, EDGE_TERMS, LAYER_TERMS, owned_share
from layerwise.cost.transfer import busiest_device
from layerwise.cost.unequal import weight_vectors
from layerwise.errors import LayerwiseError
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.edge import Edge, cells_on
from layerwise.partition.layout import Layout
from layerwise.partition.place import data_parallel

Pair = tuple[Config, Config]  # of the two ends of an edge

__all__ = ["Configs", "CostModel", "CostOptions", "CostTables", "EdgeName", "NodeCost", "Progress", "Strategy"]


@dataclass(frozen=True, slots=True)
class CostTables:
    """Equation 1 as tables: node (C_l,) and transfer (C_source, C_target), float64 seconds."""

    configs: dict[str, tuple[Config, ...]]
    node: dict[str, Floats]
    transfer: dict[EdgeName, Floats]

    def price(self, strategy: Strategy) -> float:
        """step_time_s of a strategy whose configurations are all in the tables."""
        choice = {name: self.configs[name].index(strategy[name]) for name in self.configs}
        total = sum(float(cost[choice[name]]) for name, cost in self.node.items())
        return total + sum(float(cost[choice[u], choice[v]]) for (u, v, _), cost in self.transfer.items())


@checked
class CostModel(Setting):
    """The cost model: t_C, t_X and t_S of a network's layers and edges on a device graph.

    It computes equation 1 of docs/explanation/cost_model.md, and caches everything by shape. `price`, `timeline` and
    `layerwise.search.find.search` take a CostModel.

    Attributes:
        graph: The network, fused or not, at its batch.
        devices: The machine.
        options: The assumptions; mixed precision changes `graph`'s element types.
        shares: The weights by which unequal devices feed their parts of a batch. None: the first of `weights`.

    Examples:
        >>> import layerwise
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> layerwise.price(model, {layer.name: layerwise.Config.of({"n": 4}) for layer in graph.inner}).step_time_s > 0
        True
    """

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.shares is None:
            self.shares = self.weights[0] if self.weights else ()
        self._rows: dict[object, NodeCosts] = {}
        self._pairs: dict[object, dict[Pair, dict[str, Floats]]] = {}
        self._layer_s: dict[tuple[int, Config], float] = {}
        self._pair_s: dict[tuple[object, Pair], float] = {}
        self._cells: dict[int, tuple[tuple[Config, ...], tuple[Config, ...], list[int]]] = {}
        self._same: dict[tuple[Config, ...], tuple[Config, ...]] = {}

    def node_cost(self, layer: Layer, configs: tuple[Config, ...]) -> NodeCost:
        """A layer's own costs under each configuration."""
        kind = self.kind(layer)

        def found() -> NodeCost:
            known = self._rows.setdefault(kind, NodeCosts())
            if new := tuple(config for config in dict.fromkeys(configs) if config not in known.row):
                known.add(new, self._node_cost(layer, new, self.graph.flows_back(layer)))
            return known.of(configs)

        return self.once(("node", kind, configs), found)

    def _node_cost(self, layer: Layer, configs: tuple[Config, ...], wanted: tuple[bool, ...]) -> NodeCost:
        layout = self.layout(layer, configs)
        cells = tuple(config.cells for config in configs)
        if cells == configs:
            times = self._compute_times(layer, layout, wanted)
            compute = ComputeTime.slowest(times)
            seconds = {term.name: term.seconds(self, layer, layout, False) for term in LAYER_TERMS}
            return NodeCost(compute, {COMPUTE.name: compute.total, **seconds}, times if len(times) > 1 else ())
        plain = self.node_cost(layer, cells)
        compute, seconds, kinds = plain.compute, dict(plain.seconds), plain.kinds
        if any(config.states != "replicated" for config in configs):
            share = owned_share(self, layer, layout)
            kinds = [time.updating(share) for time in kinds]  # of which another may be the slowest now
            compute = ComputeTime.slowest(kinds) if kinds else compute.updating(share)
            seconds |= {term.name: term.seconds(self, layer, layout, False) for term in LAYER_TERMS if term.by_states}
        seconds[COMPUTE.name] = compute.total
        recomputed = np.array([config.recompute for config in configs])
        if recomputed.any():
            for name, once in self.recomputation(layer, cells).items():
                seconds[name] = seconds[name] + np.where(recomputed, once, 0.0)
        return NodeCost(compute, seconds, kinds)

    def recomputation(self, layer: Layer, configs: tuple[Config, ...]) -> dict[str, Floats]:
        """(C,) seconds, by term, of recomputing a layer, whether or not the configurations recompute it."""
        cells, rows = distinct_cells(configs)
        layout, compute = self.layout(layer, cells), self.node_cost(layer, cells).compute
        collectives = {term.name: term.seconds(self, layer, layout, True) for term in LAYER_TERMS if term.recomputes}
        return {name: once[rows] for name, once in {COMPUTE.name: compute.forward, **collectives}.items()}

    def _compute_times(self, layer: Layer, layout: Layout, wanted: tuple[bool, ...]) -> list[ComputeTime]:
        """By kind of devices: the time of the largest cell on any of them, or 0 if none has a cell."""
        found = list[ComputeTime]()
        for kind in range(len(self.devices.each_kind)):
            largest, some = self.largest_of_kind(layer, layout, kind)
            found.append(self._compute_time(layer, largest, wanted, kind).where(some))
        return found

    def largest_of_kind(self, layer: Layer, layout: Layout, kind: int) -> tuple[Layout, Mask | bool]:
        """The layout whose largest cells are the largest on devices of a kind, and where any of these has one."""
        if not self.devices.kinds:
            return layout, True
        devices = np.flatnonzero(np.array(self.devices.kind_of) == kind)
        size = cells_on(layer.space.dims, layout.computed, devices)
        return layout.only(devices[size.argmax(1)]), size.max(1) > 0

    def _compute_time(self, layer: Layer, layout: Layout, wanted: tuple[bool, ...], kind: int = 0) -> ComputeTime:
        """Measured as far as the profile allows; the step's overhead beside layers counts for the sink."""
        dtype = self.dtype(layer)
        measured = self.measurements_in(dtype, kind)
        if layer.end:
            if measured is not None and layer.role is Role.SINK:
                return measured.sink_time(layer, layout)
            zeros = np.zeros(len(layout.computed.degrees))
            return ComputeTime(zeros, zeros, zeros, zeros, zeros)
        if measured is not None:
            trained = self.trained[layer.name]  # that is how it was measured, also for inference
            return measured.compute_time(trained, layout, self.trained.flows_back(trained), self.uses[layer.name])
        processor = self.devices.each_kind[kind].processor
        return compute_time(layer, layout, wanted, processor, dtype, self.options.optimizer)

    @cached_property
    def weights(self) -> tuple[tuple[int, ...], ...]:
        """The vectors of weights that unequal devices may get (`cost.unequal`); () for equal devices."""
        if not self.devices.kinds:
            return ()
        parts = min(self.devices.count, self.graph.batch)
        return weight_vectors(self._kinds_s(1), self._kinds_s(parts), parts, self.devices)

    @property
    def ideal_s(self) -> float:
        """Seconds of a step if nothing were sent and unequal devices shared the work in proportion to their speeds."""
        return float(1 / (1 / self._kinds_s(1))[list(self.devices.kind_of)].sum())

    def check_measured(self) -> None:
        """Raises LayerwiseError if layers were measured on some kinds of devices, but not on others."""
        dtype, kinds = self.options.dtype, self.devices.kinds
        known = [self.measurements_in(dtype, kind) is not None for kind in range(len(kinds))]
        if any(known) and not all(known):
            without = kinds[known.index(False)].processor.name
            raise LayerwiseError(
                f"the profile has measured times of layers in {dtype}, but none for {without}: measure on a device of "
                "each kind (layerwise measure layers), or on none"
            )

    def _kinds_s(self, parts: int) -> Floats:
        """(K,) seconds of all layers for one of `parts` parts of the samples, on a device of each kind."""
        total, kinds = np.zeros(len(self.devices.kinds)), range(len(self.devices.kinds))
        for layer in self.graph.inner:
            layout, wanted = self.layout(layer, (data_parallel(layer, parts),)), self.graph.flows_back(layer)
            times = [self._compute_time(layer, layout, wanted, kind) for kind in kinds]
            known = [float(time.measured[0] + time.fitted[0]) > 0 for time in times]
            if any(known) and not all(known):  # measured of some kinds alone, which says nothing of their proportion
                more = self.dtype(layer), self.options.optimizer
                times = [compute_time(layer, layout, wanted, kind.processor, *more) for kind in self.devices.kinds]
            total += [time.total[0] for time in times]
        return total

    def edge_costs(
        self,
        name: EdgeName,
        sources: tuple[Config, ...],
        targets: tuple[Config, ...],
        watched: tuple[int, ...] | None = None,
    ) -> dict[str, Floats]:
        """(C_source, C_target) seconds of an edge by term, over all directions; equal edges share arrays.

        Recomputed targets count the forward direction twice. With `watched` devices only (see `port_seconds`): lower
        bounds.
        """
        if len(sources) > MANY or len(targets) > MANY:
            return self._edge_costs(name, sources, targets, watched)
        if watched is None and len(sources) == len(targets) == 1:
            pair = sources[0], targets[0]
            return self._priced(name, (pair,))[pair]
        key = "edge", self._kinds_of(name), sources, targets, watched
        return self.once(key, lambda: self._edge_costs(name, sources, targets, watched))

    def _edge_costs(
        self,
        name: EdgeName,
        sources: tuple[Config, ...],
        targets: tuple[Config, ...],
        watched: tuple[int, ...] | None,
    ) -> dict[str, Floats]:
        times = self.directions(name)
        if times == 0:
            return {term.name: np.zeros((len(sources), len(targets))) for term in EDGE_TERMS}
        (sources_cells, rows), (targets_cells, columns) = self._distinct(sources), self._distinct(targets)
        edge = self.edge(name, sources_cells, targets_cells)
        costs = dict(self._seconds(edge, times, watched))
        if len(sources_cells) < len(sources) or len(targets_cells) < len(targets):
            costs = {term: seconds[rows][:, columns] for term, seconds in costs.items()}
        recomputed = np.array([config.recompute for config in targets])
        if recomputed.any():
            for term, seconds in self._seconds(edge, 1, watched).items():
                costs[term] = costs[term] + np.where(recomputed, seconds[rows][:, columns], 0.0)
        if name[0] in self.graph.unfed:  # unsplit, every device computes it
            uncut = np.array([config.total == 1 for config in sources])
            costs = {term: np.where(uncut[:, None], 0.0, seconds) for term, seconds in costs.items()}
        return costs

    def _distinct(self, configs: tuple[Config, ...]) -> tuple[tuple[Config, ...], list[int]]:
        """`distinct_cells`; many are looked at once, and equal ones are one object, so that edges share tables."""
        if len(configs) <= MANY:
            return distinct_cells(configs)
        if id(configs) not in self._cells:
            cells, rows = distinct_cells(configs)
            # `configs` is kept so that no other object gets its id.
            self._cells[id(configs)] = configs, self._same.setdefault(cells, cells), rows
        _, cells, rows = self._cells[id(configs)]
        return cells, rows

    def _seconds(self, edge: Edge, times: int, watched: tuple[int, ...] | None) -> dict[str, Floats]:
        def made() -> dict[str, Floats]:
            return {term.name: term.seconds(self, edge, times, watched) for term in EDGE_TERMS}

        return self.once((times, edge, watched), made)

    def edge_cost(
        self,
        name: EdgeName,
        sources: tuple[Config, ...],
        targets: tuple[Config, ...],
        watched: tuple[int, ...] | None = None,
    ) -> Floats:
        """The sum of `edge_costs`. Do not write to it."""
        return reduce(np.add, self.edge_costs(name, sources, targets, watched).values())

    def layer_s(self, layer: Layer, config: Config) -> float:
        """Seconds of `node_cost` under one configuration."""
        key = self.kind(layer), config
        if key not in self._layer_s:
            self._layer_s[key] = float(self.node_cost(layer, (config,)).total[0])
        return self._layer_s[key]

    def pair_s(self, name: EdgeName, pair: Pair) -> float:
        """Seconds of `edge_cost` for one pair of configurations."""
        key = self._kinds_of(name), pair
        if key not in self._pair_s:
            self._pair_s[key] = float(reduce(np.add, self._priced(name, (pair,))[pair].values())[0, 0])
        return self._pair_s[key]

    def step_s(self, strategy: Strategy) -> float:
        """Equation 1 of a complete strategy."""
        own = sum(self.layer_s(layer, strategy[layer.name]) for layer in self.graph.layers)
        return own + sum(self.pair_s(edge, (strategy[edge[0]], strategy[edge[1]])) for edge in self.graph.edges())

    def _priced(self, name: EdgeName, pairs: Iterable[Pair]) -> dict[Pair, dict[str, Floats]]:
        """(1, 1) seconds by term for at least these pairs; unknown ones are priced together."""
        known = self._pairs.setdefault(self._kinds_of(name), {})
        if new := [pair for pair in pairs if pair not in known]:
            sources, targets = (tuple(dict.fromkeys(side)) for side in zip(*new, strict=True))
            costs = self._edge_costs(name, sources, targets, None)
            row, column = ({config: i for i, config in enumerate(ends)} for ends in (sources, targets))
            for u, v in new:
                cell = slice(row[u], row[u] + 1), slice(column[v], column[v] + 1)
                known[u, v] = {term: seconds[cell] for term, seconds in costs.items()}
        return known

    def _kinds_of(self, name: EdgeName) -> tuple[int, int, int]:
        """A key that edges of equal cost share."""
        return self.kind(self.graph[name[0]]), self.kind(self.graph[name[1]]), name[2]

    def learn(self, strategies: Sequence[Strategy]) -> None:
        """Prices everything in these complete strategies at once, which is faster than one after the other."""
        graph = self.graph
        of_kind: dict[int, tuple[Layer, dict[Config, None]]] = {}
        for layer in graph.layers if strategies else ():
            used = dict.fromkeys(s[layer.name] for s in strategies)
            of_kind.setdefault(self.kind(layer), (layer, {}))[1].update(used)
        for layer, configs in of_kind.values():
            self.node_cost(layer, tuple(configs))
        pairs: dict[object, tuple[EdgeName, dict[Pair, None]]] = {}
        for name in graph.edges() if strategies else ():
            here = ((s[name[0]], s[name[1]]) for s in strategies)
            pairs.setdefault(self._kinds_of(name), (name, {}))[1].update(dict.fromkeys(here))
        for name, wanted in pairs.values():
            self._priced(name, wanted)

    def busiest_device(self, name: EdgeName, source: Config, target: Config) -> int:
        """A device behind the port that limits the transfer."""
        return busiest_device(self.edge(name, (source,), (target,)), self.devices)

    def tables(
        self, configs: Configs, progress: Progress | None = None, watched: tuple[int, ...] | None = None
    ) -> CostTables:
        """Tables over the given configurations of every layer; with `watched` devices, transfers are lower bounds."""
        node = {layer.name: self.node_cost(layer, configs[layer.name]).total for layer in self.graph.layers}
        names = list(self.graph.edges())
        transfer: dict[EdgeName, Floats] = {}
        for done, name in enumerate(names, start=1):
            transfer[name] = self.edge_cost(name, configs[name[0]], configs[name[1]], watched)
            if progress:
                progress(done, len(names))
        return CostTables(dict(configs), node, transfer)
