"""Schedule: what a rank does in each layer of a plan: its boxes, what it receives and what it computes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import starmap

import numpy as np
import torch

from layerwise.comm.base import Comm, Group, TrafficKind
from layerwise.config import States, fewer
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box, in_proportion
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role
from layerwise.partition.blocks import blocks, recomputable, saved_within
from layerwise.partition.groups import statistics
from layerwise.partition.moved import Transfer, groups_of, transfer
from layerwise.partition.pieces import rounds
from layerwise.partition.place import Each, Place, data_parallel, input_maps, place, read
from layerwise.partition.sharding import Sharding, sharded, states_of
from layerwise.plan import Plan
from layerwise.program import Program, StepKind, StrategyFacts, program
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.redistribute import Redistribution
from layerwise.run.schedule.work import LayerWork, work


def places(graph: LayerGraph, plan: Plan) -> dict[str, Place]:
    """Returns the place of every layer of the plan's graph by rank, at the graph's batch size."""
    ranks, result = np.argsort(plan.device_order), {}  # each rank's device
    for layer in graph.layers:
        config = data_parallel(layer, plan.gpus, plan.shares) if layer.end else plan.strategy[layer.name]
        unfed = layer.name in graph.unfed
        result[layer.name] = place(layer, config, plan.gpus, plan.io, unfed=unfed).on(ranks)
    return result | read(graph, result, plan.io)


def samples(plan: Plan, batch: int) -> tuple[slice, ...]:
    """Returns the samples of a global batch that each rank feeds: cell i of min(N, batch), in the plan's order."""
    if plan.io != "sample":
        return (slice(0, batch),) * plan.gpus
    weights = fewer(plan.shares or (1,) * plan.gpus, batch)  # the first ones, of equal devices
    cuts = in_proportion(batch, tuple(w for w in weights if w)).tolist()
    ends = np.cumsum(np.array(weights) > 0).tolist()
    shares = [slice(cuts[end - (w > 0)], cuts[end]) for w, end in zip(weights, ends, strict=True)]
    return tuple(shares[device] for device in np.argsort(plan.device_order).tolist())


def shardings(graph: LayerGraph, plan: Plan) -> dict[str, tuple[Sharding, States]]:
    """Returns how ranks with the same box shard each parameter, by the model's name."""
    ranks, sharding_of = np.argsort(plan.device_order), dict[str, tuple[Sharding, States]]()
    for layer in graph.inner:
        config = plan.strategy[layer.name]
        for name, p in layer.own_parameters():
            if (sharding := sharded(layer, p, config, plan.gpus, unfed=layer.name in graph.unfed)) is not None:
                sharding_of[name] = sharding.on(ranks), states_of(layer, config)
    return sharding_of


def parameter_boxes(graph: LayerGraph, by_layer: Mapping[str, Place]) -> dict[str, Each]:
    """Returns, by the model's name, the box of each parameter and buffer that every rank computes with."""
    boxes: dict[str, Each] = {}
    for layer in graph.layers:
        for name, p in layer.own_parameters():
            if name in boxes:
                raise LayerwiseError(
                    f"layer {layer.name!r} shares buffer {name!r} with another layer, like a batch norm that is called "
                    "twice: give each use its own module"
                )
            boxes[name] = by_layer[layer.name].holds(p).each
    return boxes


@dataclass(frozen=True, slots=True)
class ScheduledEdge:
    """One input of a layer."""

    source: str  # the layer that computes it
    redistribution: Redistribution  # how it travels
    backward: bool  # whether a gradient comes back
    stays: bool  # whether nothing is sent, and all that this rank has is used
    within: bool  # whether the source's saved output is saved as a part of what is received

    @property
    def what(self) -> str:
        """`conv1 -> fc`."""
        return self.redistribution.what

    @property
    def travels(self) -> bool:
        """True if some rank sends some of it."""
        return self.redistribution.transfer.pattern != "local"

    @property
    def needs(self) -> bool:
        """True if this rank needs some of it."""
        need = self.redistribution.transfer.need
        return need is not None and need.volume > 0


@dataclass(frozen=True, slots=True)
class ScheduledPiece:
    """A piece of some inputs of a layer, which this rank sees between others."""

    bounds: tuple[int, int]
    ways: Mapping[int, Redistribution]  # by input


@dataclass(frozen=True, slots=True)
class ScheduledLayer:
    """One layer on this rank."""

    layer: Layer
    edges: tuple[ScheduledEdge, ...]
    work: LayerWork | None  # None: this rank has no part of it
    parameters: tuple[str | None, ...]  # the model's names; None for a tied one, which is an edge
    elsewhere: tuple[str, ...]  # parameters that only other ranks hold, as this rank has no part of the layer
    dtype: torch.dtype | None  # of the floating-point output; None: that of the inputs
    backward: bool  # whether a gradient flows through it
    autocast: torch.dtype | None  # the type that autocast casts to in it; None: autocast is off
    recompute: bool  # whether what its backward pass reads is recomputed
    gathered: bool  # whether its parameters are full only while it computes
    returned: bool  # whether an output depends on it; otherwise it is there for the buffers that training updates
    pieces: tuple[ScheduledPiece, ...]  # of inputs that are read a piece at a time, where nothing is differentiated


class Schedule:
    """One rank's layers for one global batch, in the order that all ranks follow.

    blocks: the layers of blocks with recomputation, by the name of the last layer. groups: ranks whose transfers are
    collectives. statistics: ranks that share a layer's statistics. sinks: each rank's box of each output. within:
    layers whose output this rank saves as a part of what a reader receives.
    """

    def __init__(self, graph: LayerGraph, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        self.graph, self.comm, self.options = options.typed(graph), comm, options
        self.places, self._io, self.bucket_bytes = places(graph, plan), plan.io, plan.bucket_bytes
        self.free, self.boxes = plan.io != "sample", plan.io == "boxes"
        self.groups: set[Group] = set()
        self.statistics: set[Group] = set()
        self.sinks: list[Each] = []
        self._recomputed = self._to_recompute(plan)
        self._gathered = {name for name, config in plan.strategy.items() if config.states == "gathered"}
        self._within = saved_within(self.graph)
        self.layers = tuple(starmap(self._scheduled, enumerate(self.graph.layers)))
        self.unread = self._unread()
        self.within = frozenset(edge.source for layer in self.layers for edge in layer.edges if edge.within)
        self.blocks = self._blocks() if self._recomputed else {}

    def program(self, kind: StepKind) -> Program:
        """Returns the instructions of all ranks, in order, without the gradient sums."""
        edges = [(layer.layer.name, slot, edge) for layer in self.layers for slot, edge in enumerate(layer.edges)]
        facts = StrategyFacts(
            travels={(name, slot) for name, slot, edge in edges if edge.travels},
            recomputed=self._recomputed,
            gathered=[layer.layer.name for layer in self.layers if layer.gathered],
            gradients=(),
        )
        return program(self.graph, self._io, facts, kind)

    def input_boxes(self) -> dict[str, Box]:
        """Returns the box of each input that this rank must be fed; the full input, if it computes nothing from it."""
        inputs = [layer for layer in self.graph.layers if layer.role is Role.INPUT]
        boxes = {layer.name: self.places[layer.name].owned.each[self.comm.rank] for layer in inputs}
        return {layer.name: boxes[layer.name] or Box.full(layer.out.shape) for layer in inputs}

    def _to_recompute(self, plan: Plan) -> frozenset[str]:
        """Returns the layers that the plan recomputes, or all that save memory if activations are checkpointed."""
        names = {name for name, config in plan.strategy.items() if config.recompute and self.graph.has_gradient[name]}
        return frozenset(names) | (recomputable(self.graph) if self.options.recompute else frozenset())

    def _blocks(self) -> dict[str, tuple[str, ...]]:
        members = dict[int, list[str]]()
        for name, number in blocks(self.graph).items():
            members.setdefault(number, []).append(name)
        return {names[-1]: tuple(names) for names in members.values() if not self._recomputed.isdisjoint(names)}

    def _scheduled(self, number: int, layer: Layer) -> ScheduledLayer:
        place, local = self.places[layer.name], self.options.local_batch_norm
        local_work = None
        if layer.role is Role.COMPUTE:
            for rank in range(self.comm.size):
                groups = statistics(layer, place, rank, local_batch_norm=local)
                self.statistics.update(group for group in groups if group)
        edges = [self._edge(layer, slot) for slot in range(len(layer.inputs))]
        if layer.role is Role.COMPUTE:
            local_work = work(layer, number, place, self.comm, local_batch_norm=local)
        if local_work is not None and edges and edges[0].travels and (around := local_work.margins) and edges[0].needs:
            margins = tuple(around.get(dim, (0, 0)) for dim in range(len(layer.specs[0].shape)))
            edges[0] = replace(edges[0], redistribution=replace(edges[0].redistribution, margins=margins))
            local_work = local_work.padded()
        return ScheduledLayer(
            layer=layer,
            edges=tuple(edges),
            work=local_work,
            parameters=tuple(None if i in layer.tied else name for i, name in enumerate(layer.parameters)),
            elsewhere=tuple(name for name, _ in layer.own_parameters() if not place.owned.active[self.comm.rank]),
            dtype=self.type_of(layer),
            backward=self.graph.has_gradient[layer.name],
            autocast=self.options.autocast_within(layer.autocast),
            recompute=layer.name in self._recomputed,
            gathered=layer.name in self._gathered,
            returned=layer.name in self.graph.returned,
            pieces=self._pieces(layer, edges),
        )

    def _pieces(self, layer: Layer, edges: list[ScheduledEdge]) -> tuple[ScheduledPiece, ...]:
        if layer.role is not Role.COMPUTE:
            return ()
        comm, found = self.comm, rounds(layer, self.places[layer.name])
        if not found or not all(edges[slot].travels for slot in found[0].needs):
            return ()
        pieces = []
        for one in found:
            ways = {}
            for slot, needs in one.needs.items():
                part = transfer(self.places[layer.inputs[slot]].owned.each, needs, comm.rank, by_messages=True)
                ways[slot] = Redistribution(part, comm, edges[slot].what)
            pieces.append(ScheduledPiece(one.bounds[comm.rank], ways))
        return tuple(pieces)

    def _edge(self, layer: Layer, slot: int) -> ScheduledEdge:
        source = layer.inputs[slot]
        place, sink = self.places[source], layer.role is Role.SINK
        if sink:
            need = self._sink_need(layer, slot)
        else:
            maps, epilogue = input_maps(layer, slot)
            need = self.places[layer.name].at(epilogue).needs(maps).each
        owned = place.owned.each
        part = transfer(owned, need, self.comm.rank, everywhere=place.everywhere)
        if self.comm.collectives and not place.everywhere:
            self.groups |= groups_of(owned, need)
        own = sink and self.boxes and self._keeps_its_box(layer, slot)
        kind: TrafficKind = "io" if sink and self.free and not own else "transfers"
        redistribution = Redistribution(part, self.comm, f"{source} -> {layer.name}", kind)
        stays = part.pattern == "local" and kind == "transfers" and part.need == part.kept == part.own
        backward = self.graph.flows_back(layer)[slot]
        within = self._within.get(source) == (layer.name, slot) and part.pattern != "local" and _holds_all(part)
        within = within and self._recomputed.isdisjoint((source, layer.name))
        return ScheduledEdge(source, redistribution, backward, stays, within)

    def _sink_need(self, sink: Layer, slot: int) -> Each:
        """Returns each rank's box of an output: its samples; all of it (io free); its own box (io boxes)."""
        if self.boxes and self._keeps_its_box(sink, slot):
            need = self.places[sink.inputs[slot]].owned.each
        else:
            need = self.places[sink.name].computed.needs(sink.space.needs[slot]).each
        self.sinks.append(need)
        return need

    def _keeps_its_box(self, sink: Layer, slot: int) -> bool:
        """Returns whether, with io boxes, a rank gets its own box of an output. A loss or Dice is returned in full."""
        return sink.specs[slot].index("n") is not None and sink.inputs[slot] not in self.graph.losses

    def _unread(self) -> frozenset[str]:
        """Returns layers whose part on this rank nobody reads, though other ranks differentiate theirs."""
        read = {
            edge.source
            for scheduled in self.layers
            for edge in scheduled.edges
            if edge.backward and (edge.redistribution.transfer.kept or edge.redistribution.transfer.sends)
        }
        layers = (scheduled.layer for scheduled in self.layers if scheduled.backward)
        return frozenset(
            layer.name for layer in layers if layer.name not in read and layer.role in (Role.COMPUTE, Role.TIED)
        )

    def type_of(self, layer: Layer) -> torch.dtype | None:
        """Returns the element type in which a layer's output is sent."""
        if not layer.out.differentiable and layer.end:
            return None
        return self.options.element_type(layer.out.dtype, self.graph)


def _holds_all(part: Transfer) -> bool:
    """True if what this rank needs contains all of its own box."""
    return part.own is not None and part.own.volume > 0 and part.kept == part.own
