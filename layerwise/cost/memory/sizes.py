"""Sizes: what layers make and keep under one strategy, and what arrives where their inputs travel."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from layerwise.cost.memory.footprints import Footprints
from layerwise.cost.memory.kernels import StageMemory
from layerwise.cost.model import CostModel, Strategy
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd
from layerwise.partition.moved import Moved
from layerwise.partition.place import Place, read


@dataclass
class Sizes:
    """Of a strategy with the configurations of inputs and sink. All by the layer's name."""

    model: CostModel
    strategy: Strategy
    footprints: Footprints
    places: dict[str, Place] = field(init=False)  # its boxes
    stages: dict[str, list[StageMemory]] = field(init=False)
    _read: dict[str, Place] = field(default_factory=dict)  # of inputs of which devices read boxes
    _edges: dict[EdgeEnd, Moved] = field(default_factory=dict)  # what travels

    def __post_init__(self) -> None:
        graph, place = self.model.graph, self.footprints.place
        self.places = {layer.name: place(layer, self.strategy[layer.name]) for layer in graph.layers}
        if self.model.options.io == "boxes":  # what is read follows from several layers
            self._read = read(graph, self.places)
            self.places |= self._read
        self.stages = {layer.name: self._stages(layer) for layer in graph.inner}

    def _stages(self, layer: Layer) -> list[StageMemory]:
        packed = tuple(slot for slot in layer.skipping if not self.edge(layer, slot).local)
        first, *rest = self.footprints.stages(layer, self.strategy[layer.name], packed)
        travels = bool(first.padded.any()) and not self.edge(layer, 0).local
        return [first.given_padded() if travels else first, *rest]

    def edge(self, layer: Layer, slot: int) -> Moved:
        """What travels to one of a layer's inputs."""
        key = layer.name, slot
        if key not in self._edges:
            source, here = layer.inputs[slot], self.places[layer.name]
            if source in self._read:
                self._edges[key] = self.footprints.moved_between(layer, slot, self._read[source], here)
            else:
                ends = self.strategy[source], self.strategy[layer.name]
                self._edges[key] = self.footprints.moved(layer, slot, *ends)
        return self._edges[key]

    def given(self, layer: Layer, slot: int) -> Floats:
        """(N,) bytes of what a layer is given of an input where it travels, and of its gradient."""
        edge = self.edge(layer, slot)
        needed = edge.need * self.model.graph[layer.inputs[slot]].out.item_bytes
        if slot or layer.role is Role.SINK or edge.local:
            return needed
        return np.maximum(needed, self.stages[layer.name][0].padded)

    def own(self, name: str) -> Floats:
        """(N,) bytes of a device's box of a layer's output."""
        return self.places[name].owned.volume * self.model.graph[name].out.item_bytes

    def within(self, layer: Layer) -> Mask | None:
        """(N,) where a layer keeps its first input as it was given, for the layer that made it, too; None: nowhere."""
        source = layer.inputs[0] if layer.inputs else ""
        if self.footprints.within.get(source) != (layer.name, 0) or self.edge(layer, 0).local:
            return None
        if self.strategy[source].recompute or self.strategy[layer.name].recompute:
            return None
        own = self.places[source].owned
        held: Mask = own.active & (self.edge(layer, 0).kept == own.volume) & (own.volume > 0)
        return held
