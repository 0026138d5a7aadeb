"""Sizes: what layers make and save under one strategy, and what arrives where their inputs travel.

What follows from single configurations of layers and edges is kept by the model: strategies differ in few layers.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from layerwise.config import Config
from layerwise.cost.memory.kernels import StageMemory, stages_of
from layerwise.cost.memory.parameters import ParameterMemory, parameters_of
from layerwise.cost.model import CostModel, Strategy
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd
from layerwise.partition.blocks import saved_within
from layerwise.partition.moved import Moved, moved, outputs
from layerwise.partition.place import Place, input_maps, lattices_of, place, read


def place_of(model: CostModel, layer: Layer, config: Config) -> Place:
    """A layer's boxes."""

    def made() -> Place:
        unfed = layer.name in model.graph.unfed
        return place(layer, config, model.devices.count, model.options.io, unfed=unfed)

    return model.once(("place", model.kind(layer), config.cells), made)


def moved_between(model: CostModel, layer: Layer, slot: int, owner: Place, target: Place) -> Moved:
    """The transfer to one of a layer's inputs, by the place of the layer that makes it and its own."""
    io, graph = model.options.io, model.graph
    if layer.role is Role.SINK and io != "sample":
        loss = layer.inputs[slot] in graph.losses
        return outputs(owner, layer.specs[slot], io, alone=len(layer.specs) == 1, loss=loss)
    maps, epilogue = input_maps(layer, slot)
    return moved(owner, maps, target.at(epilogue), lattices_of(layer, slot))


@dataclass
class TensorSizes:
    """The sizes of a strategy with the configurations of inputs and sink. All by the layer's name."""

    model: CostModel
    strategy: Strategy
    places: dict[str, Place] = field(init=False)  # its boxes
    stages: dict[str, list[StageMemory]] = field(init=False)
    _read: dict[str, Place] = field(default_factory=dict)  # of inputs of which devices read boxes
    _edges: dict[EdgeEnd, Moved] = field(default_factory=dict)  # what travels

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.places = {layer.name: place_of(self.model, layer, self.strategy[layer.name]) for layer in graph.layers}
        if self.model.options.io == "boxes":  # what is read follows from several layers
            self._read = read(graph, self.places)
            self.places |= self._read
        self.stages = {layer.name: self._stages(layer) for layer in graph.inner}
        self._within = self.model.once("saved within", lambda: saved_within(graph))

    def _stages(self, layer: Layer) -> list[StageMemory]:
        model, config = self.model, self.strategy[layer.name]
        packed = tuple(slot for slot in layer.skipping if not self.edge(layer, slot).local)

        def made() -> list[StageMemory]:
            flows, place = model.graph.flows_back(layer), place_of(model, layer, config)
            return stages_of(layer.packed(packed), place, flows, config["k"] > 1)

        first, *rest = model.once(("stages", model.kind(layer), config.cells, packed), made)
        travels = bool(first.padded.any()) and not self.edge(layer, 0).local
        return [first.given_padded() if travels else first, *rest]

    def parameters(self, layer: Layer) -> list[ParameterMemory]:
        """The memory of a layer's parameters."""
        # What is sharded has its place in buckets, and so is each layer's own.
        model, config = self.model, self.strategy[layer.name]
        key = "parameters", model.kind(layer) if config.states == "replicated" else layer.name, config
        return model.once(key, lambda: parameters_of(model, layer, config, place_of(model, layer, config)))

    def edge(self, layer: Layer, slot: int) -> Moved:
        """The transfer to one of a layer's inputs."""
        end = layer.name, slot
        if end not in self._edges:
            model, name, target = self.model, layer.inputs[slot], self.strategy[layer.name]
            producer, source = model.graph[name], self.strategy[name]

            def made() -> Moved:
                return moved_between(model, layer, slot, self.places[name], self.places[layer.name])

            key = "moved", model.kind(producer), model.kind(layer), slot, source.cells, target.cells
            self._edges[end] = made() if name in self._read else model.once(key, made)
        return self._edges[end]

    def received(self, layer: Layer, slot: int) -> Floats:
        """(N,) bytes that a layer receives of an input where it travels, and of its gradient."""
        edge = self.edge(layer, slot)
        needed = edge.need * self.model.graph[layer.inputs[slot]].out.item_bytes
        if slot or layer.role is Role.SINK or edge.local:
            return needed
        return np.maximum(needed, self.stages[layer.name][0].padded)

    def own(self, name: str) -> Floats:
        """(N,) bytes of a device's box of a layer's output."""
        return self.places[name].owned.volume * self.model.graph[name].out.item_bytes

    def within(self, layer: Layer) -> Mask | None:
        """(N,) where a layer saves its first input as received, for the layer that made it, too; None: nowhere."""
        source = layer.inputs[0] if layer.inputs else ""
        if self._within.get(source) != (layer.name, 0) or self.edge(layer, 0).local:
            return None
        if self.strategy[source].recompute or self.strategy[layer.name].recompute:
            return None
        own = self.places[source].owned
        inside: Mask = own.active & (self.edge(layer, 0).owned == own.volume) & (own.volume > 0)
        return inside
