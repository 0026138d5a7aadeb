"""Footprints: what the memory of a step is made of, under single configurations of layers and of both ends of edges.

Each is made once for all layers of a kind: a search asks for the memory of many strategies that differ in few layers.
"""

from __future__ import annotations

from functools import cached_property

from layerwise.config import Config
from layerwise.cost.memory.kernels import StageMemory, stages_of
from layerwise.cost.memory.parameters import Held, held
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd, begun_before
from layerwise.partition.blocks import saved_within
from layerwise.partition.moved import Moved, moved, outputs
from layerwise.partition.place import Place, input_maps, lattices_of, place

Layered = tuple[int | str, Config]


class Footprints:
    """Of a model's layers and edges."""

    def __init__(self, model: CostModel) -> None:
        self.model = model
        self.peaks: dict[object, Floats] = {}  # by strategy, (N,) bytes
        self._places: dict[Layered, Place] = {}
        self._stages: dict[tuple[Layered, tuple[int, ...]], list[StageMemory]] = {}
        self._held: dict[Layered, list[Held]] = {}
        self._moved: dict[tuple[int, int, int, Config, Config], Moved] = {}

    @cached_property
    def begun(self) -> dict[str, tuple[EdgeEnd, ...]]:
        """The edges that run ahead, by the layer before whose computation they begin."""
        return begun_before(self.model.graph, self.model.options.io)

    @cached_property
    def within(self) -> dict[str, EdgeEnd]:
        """By layer, the reader that may keep its output for it."""
        return saved_within(self.model.graph)

    def place(self, layer: Layer, config: Config) -> Place:
        """A layer's boxes."""
        key = self.model.kind(layer), config.cells
        if key not in self._places:
            graph, devices = self.model.graph, self.model.devices.count
            unfed = layer.name in graph.unfed
            self._places[key] = place(layer, config, devices, self.model.options.io, unfed=unfed)
        return self._places[key]

    def stages(self, layer: Layer, config: Config, packed: tuple[int, ...]) -> list[StageMemory]:
        """What its kernels make and keep. packed: inputs of which only what is read at all is there."""
        key = (self.model.kind(layer), config.cells), packed
        if key not in self._stages:
            flows, given = self.model.graph.flows_back(layer), layer.packed(packed)
            self._stages[key] = stages_of(given, self.place(layer, config), flows, config["k"] > 1)
        return self._stages[key]

    def held(self, layer: Layer, config: Config) -> list[Held]:
        """Its parameters."""
        # What is shared out has its place in buckets, and so is each layer's own.
        key = self.model.kind(layer) if config.states == "replicated" else layer.name, config
        if key not in self._held:
            self._held[key] = held(self.model, layer, config, self.place(layer, config))
        return self._held[key]

    def moved(self, layer: Layer, slot: int, source: Config, target: Config) -> Moved:
        """What travels to one of its inputs. source: the configuration of the layer that makes it."""
        producer, kind = self.model.graph[layer.inputs[slot]], self.model.kind
        key = kind(producer), kind(layer), slot, source.cells, target.cells
        if key not in self._moved:
            owner = self.place(producer, source)
            self._moved[key] = self.moved_between(layer, slot, owner, self.place(layer, target))
        return self._moved[key]

    def moved_between(self, layer: Layer, slot: int, owner: Place, target: Place) -> Moved:
        """What travels to one of a layer's inputs, of the place of the layer that makes it and its own."""
        io, graph = self.model.options.io, self.model.graph
        if layer.role is Role.SINK and io != "sample":
            loss = layer.inputs[slot] in graph.losses
            return outputs(owner, layer.specs[slot], io, alone=len(layer.specs) == 1, loss=loss)
        maps, epilogue = input_maps(layer, slot)
        return moved(owner, maps, target.at(epilogue), lattices_of(layer, slot))
