"""The cost model: equation 1's terms for every layer and edge, for one configuration or for all of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Config, Layout, layout
from layerwise.cost.collectives import Group, all_reduce_s, group_of, groups, reduce_scatter_s, sync_rate
from layerwise.cost.compute.fullest import gradient_uses
from layerwise.cost.compute.measured import Measurements, chosen
from layerwise.cost.compute.roofline import ComputeTime, all_boxes, compute_time, largest_box, largest_extents
from layerwise.cost.gathers import are_gathers, gather_s
from layerwise.cost.transfer import Traffic, busiest_device, port_seconds, seconds, traffic
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.ops.base import Dim, Maps, Role
from layerwise.partition.place import fed_config, input_maps
from layerwise.tensor import TensorSpec

Floats = NDArray[np.float64]
Edge = tuple[str, str, int]  # producer, consumer, input slot
Strategy = Mapping[str, Config]
Configs = Mapping[str, tuple[Config, ...]]
Progress = Callable[[int, int], None]  # done, of


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What the cost model assumes.

    link_model: `port`, the busiest port with latencies, or `sum`, all bytes over bandwidth (the paper's). sync:
    `all-reduce` or `parameter-server` (the paper's). io: `sample`, every device feeds and gets its slice of the
    samples, or `free`, not counted. local_batch_norm: statistics of each device's own samples, as DDP has it.
    """

    link_model: Literal["port", "sum"] = "port"
    sync: Literal["all-reduce", "parameter-server"] = "all-reduce"
    io: Literal["sample", "free"] = "sample"
    optimizer: str = "sgd"
    dtype: str = "float32"
    local_batch_norm: bool = False


@dataclass(frozen=True, slots=True)
class NodeCost:
    """Seconds of a layer by itself, arrays of shape (C,): t_C, t_S, and the collectives inside the layer."""

    compute: ComputeTime
    sync: Floats
    statistics: Floats  # both directions
    reduction: Floats  # reduce-scatter over k, and its adjoint

    @property
    def total(self) -> Floats:
        return self.compute.total + self.sync + self.statistics + self.reduction


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a layer under C configurations, and its groups.

    size_bytes: (C,) what the member with the largest box brings; total_bytes: (C,) what all devices bring. The groups
    are the devices that agree in the dimensions `keys` of their cells (`late`: of what they own).
    """

    size_bytes: Floats
    total_bytes: Floats
    groups: tuple[Group, ...]
    layout: Layout
    keys: tuple[int, ...]
    late: bool


@dataclass(frozen=True, slots=True)
class CostTables:
    """Equation 1 as tables: node (C_l,) and transfer (C_source, C_target), float64 seconds."""

    configs: dict[str, tuple[Config, ...]]
    node: dict[str, Floats]
    transfer: dict[Edge, Floats]

    def price(self, strategy: Strategy) -> float:
        """step_time_s of a strategy whose configurations are all in the tables."""
        at = {name: self.configs[name].index(strategy[name]) for name in self.configs}
        total = sum(float(cost[at[name]]) for name, cost in self.node.items())
        return total + sum(float(cost[at[u], at[v]]) for (u, v, _), cost in self.transfer.items())


@dataclass
class CostModel:
    """Prices the layers and edges of one network on one device graph. Everything is cached by shape."""

    graph: LayerGraph
    devices: DeviceGraph
    options: CostOptions = field(default_factory=CostOptions)

    def __post_init__(self) -> None:
        self._nodes: dict[object, NodeCost] = {}
        self._seconds: dict[object, Floats] = {}
        self.has_gradient = self.graph.has_gradient
        self.uses = gradient_uses(self.graph)
        times, options = chosen(self.devices.layers, self.options.dtype), self.options
        self.measurements = (
            Measurements(times, self.devices.processor, options.dtype, options.optimizer, options.local_batch_norm)
            if times is not None
            else None
        )

    def end_config(self, layer: Layer) -> Config:
        """The only configuration of an input or of the sink: samples over all devices that can have one."""
        return fed_config(layer, self.devices.count)

    def layout(self, layer: Layer, configs: Sequence[Config]) -> Layout:
        """Cells of the layer's configurations on these devices."""
        return layout(configs, layer.space, self.devices.count)

    def node_cost(self, layer: Layer, configs: tuple[Config, ...]) -> NodeCost:
        """Costs of a layer by itself under each configuration."""
        wanted = self.graph.flows_back(layer)
        owned = tuple(i not in layer.tied for i in range(len(layer.parameters)))
        key = (layer.space, wanted, owned, self.uses[layer.name], configs)
        if key not in self._nodes:
            self._nodes[key] = self._node_cost(layer, configs, wanted)
        return self._nodes[key]

    def _node_cost(self, layer: Layer, configs: tuple[Config, ...], wanted: tuple[bool, ...]) -> NodeCost:
        zeros = np.zeros(len(configs))
        lay = self.layout(layer, configs)
        compute = self._compute_time(layer, lay, wanted)
        if layer.end:
            return NodeCost(compute, zeros, zeros, zeros)
        sync, statistics, reduction = zeros.copy(), zeros.copy(), zeros.copy()
        for c in self.gradients_of(layer, lay):
            sync += c.size_bytes * [sync_rate(g, self.devices, self.options.sync) for g in c.groups]
        for c in self.statistics_of(layer, lay):
            statistics += self._each(all_reduce_s, c)
        for c in self.reductions_of(layer, lay):
            reduction += (1 + self.reduces_back(layer)) * self._each(reduce_scatter_s, c)
        return NodeCost(compute, sync, statistics, reduction)

    def _compute_time(self, layer: Layer, lay: Layout, wanted: tuple[bool, ...]) -> ComputeTime:
        """Measured as far as the profile has it; what a step takes beside its layers is the sink's."""
        measured, options = self.measurements, self.options
        if layer.end:
            if measured is not None and layer.role is Role.SINK:
                return measured.sink_time(layer, lay)
            zeros = np.zeros(len(lay.degrees))
            return ComputeTime(zeros, zeros, zeros, zeros, zeros)
        if measured is not None:
            return measured.compute_time(layer, lay, wanted, self.uses[layer.name])
        return compute_time(layer, lay, wanted, self.devices.processor, options.dtype, options.optimizer)

    def _each(self, cost: Callable[[float, Group, DeviceGraph], float], c: Collective) -> Floats:
        pairs = zip(c.size_bytes.tolist(), c.groups, strict=True)
        return np.array([cost(size, group, self.devices) for size, group in pairs])

    def gradients_of(self, layer: Layer, lay: Layout) -> list[Collective]:
        """What is synchronised after the backward pass, one entry for each kind of box."""
        by_keys: dict[tuple[tuple[int, ...], bool], tuple[Floats, Floats]] = {}
        zero = np.zeros(len(lay.degrees))
        for _, p, item_bytes in layer.held():
            if p.trainable:
                degrees = lay.own_degrees if p.late else lay.degrees
                keys = tuple(sorted({m.source for m in p.maps if m.source is not None}))
                size, total = by_keys.get((keys, p.late), (zero, zero))
                size = size + largest_box(p.maps, layer.space.dims, degrees) * item_bytes
                total = total + all_boxes(p.maps, layer.space.dims, degrees) * item_bytes
                by_keys[keys, p.late] = size, total
        found = [self._collective(*sizes, lay, keys, late) for (keys, late), sizes in by_keys.items()]
        return [self._replicated(c) for c in found] if layer.role is Role.TIED else found

    def _replicated(self, c: Collective) -> Collective:
        """Of a tied parameter: uncut, it is not on one device but on all, and its gradient is summed over them."""
        uncut, everyone = (c.layout.degrees == 1).all(1), group_of(np.zeros(self.devices.count, np.int64), self.devices)
        total = np.where(uncut, c.size_bytes * self.devices.count, c.total_bytes)
        members = tuple(everyone if u else g for u, g in zip(uncut.tolist(), c.groups, strict=True))
        return replace(c, total_bytes=total, groups=members)

    def _collective(self, size: Floats, total: Floats, lay: Layout, keys: Sequence[int], late: bool) -> Collective:
        return Collective(size, total, groups(lay, tuple(keys), late, self.devices), lay, tuple(keys), late)

    def statistics_of(self, layer: Layer, lay: Layout) -> list[Collective]:
        """All-reduces inside the layer: one forward, one back where the gradient of what is normalised is wanted."""
        found: list[Collective] = []
        for stage, gradients in zip(layer.stages, self.graph.gradients(layer), strict=True):
            out, statistics = stage.space.out, stage.statistics(local_batch_norm=self.options.local_batch_norm)
            if statistics is None:
                continue
            degrees = lay.own_degrees if stage.epilogue else lay.degrees
            extents = largest_extents(layer.space.dims[: degrees.shape[1]], degrees)
            keys = [i for i in range(degrees.shape[1]) if i not in statistics.over]
            each = statistics.per_key / statistics.block * max(out.item_bytes, 4)  # sums of 16-bit values are float32
            size = np.prod(extents[:, statistics.keys], axis=1, dtype=np.float64) * each
            spare = [i for i in range(degrees.shape[1]) if i not in statistics.keys]
            total = degrees[:, spare].prod(1) * prod(out.shape[i] for i in statistics.keys) * each
            found += [self._collective(size, total, lay, keys, stage.epilogue)] * (1 + gradients.inputs)
        return found

    def reductions_of(self, layer: Layer, lay: Layout) -> list[Collective]:
        """Where k is split: the reduce-scatter of the partial sums."""
        ks = layer.space.reductions
        if not ks or (lay.degrees[:, ks.start :] == 1).all():
            return []
        main = layer.stages[0].space.out
        extents = largest_extents(layer.space.dims, lay.degrees)[:, : ks.start]
        size = np.prod(extents, axis=1, dtype=np.float64) * main.item_bytes
        total = lay.degrees[:, ks.start :].prod(1) * float(main.volume * main.item_bytes)
        return [self._collective(size, total, lay, range(ks.start), False)]

    def reduces_back(self, layer: Layer) -> bool:
        """Whether the gradient of the partial sums is asked for: of the main operator's weights or inputs."""
        return self.graph.gradients(layer)[0].result

    def traffic(self, edge: Edge, sources: tuple[Config, ...], targets: tuple[Config, ...]) -> Traffic:
        """Load of one direction of an edge for all pairs of configurations."""
        return traffic(*self._ends(edge, sources, targets))

    def directions(self, edge: Edge) -> int:
        """How often an edge's tensor travels: 0 where it is not counted, 1 without a gradient, else 2.

        A tied parameter that is not cut does not travel either (see `edge_cost`).
        """
        source, target = self.graph[edge[0]], self.graph[edge[1]]
        if source.role is Role.CONSTANT or (self.options.io == "free" and (source.end or target.end)):
            return 0
        return 2 if self.has_gradient[edge[0]] and self.has_gradient[edge[1]] else 1

    def edge_cost(
        self,
        edge: Edge,
        sources: tuple[Config, ...],
        targets: tuple[Config, ...],
        watched: tuple[int, ...] | None = None,
    ) -> Floats:
        """t_X (C_source, C_target), both directions: the adjoint sends the same pieces the other way.

        Where the network has collectives, an all-gather is priced as one, everything else as messages. With `watched`
        devices only (see `port_seconds`): a lower bound.
        """
        times = self.directions(edge)
        if times == 0:
            return np.zeros((len(sources), len(targets)))
        ends = self._ends(edge, sources, targets)
        out, u, maps, dims, v, late, _ = ends
        where = tuple((d.extent, d.unit) for d in dims)
        key = (times, out.shape, out.units, out.item_bytes, u, maps, where, v, late, watched)
        if key not in self._seconds:
            self._seconds[key] = self._transfer_s(times, *ends, watched)
        cost = self._seconds[key].copy()
        if self.graph[edge[0]].role is Role.TIED:  # uncut, it is replicated: see gradients_of
            cost[[config.total == 1 for config in sources]] = 0.0
        return cost

    def _transfer_s(
        self,
        directions: int,
        source: TensorSpec,
        u: Layout,
        maps: Maps,
        dims: Sequence[Dim],
        v: Layout,
        late: bool,
        graph: DeviceGraph,
        watched: tuple[int, ...] | None,
    ) -> Floats:
        """(C_source, C_target) in one direction or in both."""
        ends = (source, u, maps, dims, v, late, graph)
        if self.options.link_model != "port":
            return directions * seconds(traffic(*ends), graph, self.options.link_model)
        messages: Floats = directions * port_seconds(*ends, watched)
        if not graph.collectives:
            return messages
        gathers = are_gathers(*ends[:-1])
        columns = np.flatnonzero(gathers.any(0))  # few
        if len(columns):
            found = gather_s(source, maps, dims, v.take(columns), late, graph, directions)
            messages[:, columns] = np.where(gathers[:, columns], found, messages[:, columns])
        return messages

    def busiest_device(self, edge: Edge, source: Config, target: Config) -> int:
        """A device behind the port that the transfer waits for."""
        return busiest_device(*self._ends(edge, (source,), (target,)))

    def _ends(
        self, edge: Edge, sources: tuple[Config, ...], targets: tuple[Config, ...]
    ) -> tuple[TensorSpec, Layout, Maps, tuple[Dim, ...], Layout, bool, DeviceGraph]:
        """The arguments of the functions of `cost.transfer`."""
        source, target = self.graph[edge[0]], self.graph[edge[1]]
        maps, late = input_maps(target, edge[2])
        u, v = self.layout(source, sources), self.layout(target, targets)
        return source.out, u, maps, target.space.dims, v, late, self.devices

    def tables(
        self, configs: Configs, progress: Progress | None = None, watched: tuple[int, ...] | None = None
    ) -> CostTables:
        """Tables over the given configurations of every layer; with `watched` devices, transfers are lower bounds."""
        node = {layer.name: self.node_cost(layer, configs[layer.name]).total for layer in self.graph.layers}
        edges = list(self.graph.edges())
        transfer: dict[Edge, Floats] = {}
        for done, edge in enumerate(edges):
            transfer[edge] = self.edge_cost(edge, configs[edge[0]], configs[edge[1]], watched)
            if progress:
                progress(done + 1, len(edges))
        return CostTables(dict(configs), node, transfer)
