"""Schedule: what a rank does of a plan, layer by layer: its edges, its work, and the types that travel."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from layerwise.comm.base import Comm, Group
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.base import Role
from layerwise.partition.boxes import Each
from layerwise.partition.groups import statistics
from layerwise.partition.place import input_maps, of_all_classes
from layerwise.partition.transfer import Transfer, groups_of, transfer
from layerwise.plan import Plan
from layerwise.run.place import places
from layerwise.run.work import Work, work


@dataclass(frozen=True, slots=True)
class Edge:
    """One input of a layer: where it comes from, how it travels, and whether a gradient comes back."""

    source: str
    transfer: Transfer
    backward: bool
    what: str


@dataclass(frozen=True, slots=True)
class Step:
    """A layer on this rank. parameters: the model's names, or None for a tied one, which is an edge."""

    layer: Layer
    edges: tuple[Edge, ...]
    work: Work | None
    parameters: tuple[str | None, ...]
    dtype: torch.dtype | None  # of the floating-point output; None: as it comes
    backward: bool
    returned: bool  # whether an output depends on it; else it is there for what training leaves in its buffers


class Schedule:
    """One rank's steps for one global batch.

    groups: of ranks whose transfers are collectives; statistics: of ranks that share a layer's. sinks: the boxes that
    the ranks get of each output.
    """

    def __init__(
        self,
        graph: LayerGraph,
        plan: Plan,
        comm: Comm,
        *,
        dtype: torch.dtype,
        autocast: torch.dtype | None,
        whole_classes: bool,
        local_batch_norm: bool,
    ) -> None:
        self.graph, self.comm, self.dtype, self.autocast = graph, comm, dtype, autocast
        self.places = places(graph, plan)
        self.free, self.whole_classes = plan.io == "free", whole_classes
        self.groups: set[Group] = set()
        self.statistics: set[Group] = set()
        self.sinks: list[Each] = []
        self.steps = tuple(self._step(i, layer, local_batch_norm) for i, layer in enumerate(graph.layers))
        self.last_use = {edge.source: i for i, step in enumerate(self.steps) for edge in step.edges}

    def _step(self, number: int, layer: Layer, local_batch_norm: bool) -> Step:
        place, rank, returned = self.places[layer.name], self.comm.rank, layer.name in self.graph.returned
        flows = self.graph.has_gradient[layer.name]
        edges = []
        back = self.graph.flows_back(layer)
        for slot, source in enumerate(layer.inputs):
            at = self.places[source]
            if layer.role is Role.SINK:
                need = self._sink_need(layer, slot)
            else:
                maps, late = input_maps(layer, slot)
                need = place.at(late).needs(maps).each
            part = transfer(at.owned.each, need, rank, everywhere=at.everywhere)
            if self.comm.collectives and not at.everywhere:
                self.groups |= groups_of(at.owned.each, need)
            edges.append(Edge(source, part, back[slot], f"{source} -> {layer.name}"))
        own: tuple[str | None, ...] = tuple(
            None if i in layer.tied else name for i, name in enumerate(layer.parameters)
        )
        if layer.role is not Role.COMPUTE:
            return Step(layer, tuple(edges), None, own, self.type_of(layer), flows, returned)
        for r in range(self.comm.size):
            groups = statistics(layer, place, r, local_batch_norm=local_batch_norm)
            self.statistics.update(group for group in groups if group)
        mine = work(layer, number, place, rank, local_batch_norm=local_batch_norm)
        return Step(layer, tuple(edges), mine, own, self.type_of(layer), flows, returned)

    def _sink_need(self, sink: Layer, slot: int) -> Each:
        """What each rank gets of an output: its samples; all of it (io free); or, with a loss, a box of all classes."""
        spec = sink.specs[slot]
        if self.free and self.whole_classes and len(sink.inputs) == 1 and len(spec.shape) > 1:
            found = of_all_classes(self.places[sink.inputs[slot]].owned, spec).each
        else:
            found = self.places[sink.name].cells.needs(sink.space.needs[slot]).each
        self.sinks.append(found)
        return found

    def type_of(self, layer: Layer) -> torch.dtype | None:
        """The element type that a layer's output has on the wire."""
        if not layer.out.differentiable and layer.end:
            return None
        return self.real(layer.out.dtype, autocast=layer.main.autocast)

    def real(self, dtype: str, *, autocast: bool = False) -> torch.dtype:
        """What an element type of the graph is in this run; autocast: made by an operator that has `Op.autocast`."""
        if autocast and self.autocast is not None and dtype == self.graph.dtype:
            return self.autocast
        return real(dtype, self.graph, self.dtype)


def real(dtype: str, graph: LayerGraph, wanted: torch.dtype) -> torch.dtype:
    """What an element type of a graph is where the model is run in `wanted`: others than the model's own stay."""
    found: torch.dtype = wanted if dtype == graph.dtype else getattr(torch, dtype)
    return found
