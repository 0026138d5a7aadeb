"""Sizes: the memory of a layer's stages, its parameters and the sink, on every device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np

from layerwise.config import Config
from layerwise.cost.memory.allocations import AllocationTracker, Devices, Ref, devices_of
from layerwise.cost.memory.parameters import ParameterMemory, parameters_of
from layerwise.cost.model import CostModel, Strategy
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role, Stage
from layerwise.ops.facts import Saved
from layerwise.ops.tensor.pointwise import Cast
from layerwise.partition.ahead import EdgeEnd
from layerwise.partition.blocks import saved_within
from layerwise.partition.moved import Moved, moved, outputs
from layerwise.partition.pieces import largest_pieces, longest_piece, pieces_of
from layerwise.partition.place import Boxes, Place, input_maps, place, read
from layerwise.tensor import ITEM_BYTES

BEFORE = -1  # instead of a slot: the result of the stage before


@dataclass(frozen=True, eq=False)
class StageMemory:
    """One operator of a layer on all N devices; arrays are (N,), in bytes."""

    saved: Saved
    made: Floats  # its result
    extra: Floats  # `extra`, `forward` and `between` are as in Saved, on devices that have a cell
    forward: Floats
    between: Floats
    slots: tuple[int, ...]  # the inputs that it reads; the first stage also reads tied parameters of other layers
    tracked: bool  # whether its result has a gradient
    running: bool  # whether the result of the stage before has a gradient
    view: bool
    copies: dict[int, Floats]  # autocast's copies of inputs, by slot; BEFORE is the result of the stage before
    weights: Floats  # autocast's copies of weights
    padded: Floats  # the part of `extra` and `between` that is a padded copy of the first input; see `given_padded`

    @cached_property
    def reads(self) -> Devices:
        """The devices whose backward pass reads its inputs."""
        inputs = self.saved.inputs
        return devices_of(inputs if isinstance(inputs, np.ndarray) else np.full(len(self.made), inputs))

    @cached_property
    def twice(self) -> Devices:
        """The devices whose backward pass has something between what it reads and what it makes."""
        return devices_of(self.between > 0)

    def given_padded(self) -> StageMemory:
        """The stage if its first input is transferred: it is received with padding, and saved instead of a copy."""
        saved = replace(self.saved, inputs=self.saved.inputs | (self.padded > 0))
        return replace(self, saved=saved, extra=self.extra - self.padded, between=self.between - self.padded)


@dataclass(frozen=True, slots=True, eq=False)
class EdgeMemory:
    """The transfer to one input of a layer on all N devices; arrays are (N,), in bytes."""

    local: bool  # nothing is sent
    need: Floats  # the box that a device needs
    received: Floats
    sent: Floats
    forth: Floats  # the part of what it sends forward that must be made contiguous first
    back: Floats  # the same for what it sends backward
    here: Devices  # the devices that need anything
    inside: Mask  # (N,) whether the needed box includes the box that the device owns of the producer's output
    viewed: Devices  # the devices whose gradient of the needed box is that of the owned box
    rest: Floats  # the owned box on all other devices

    @staticmethod
    def of(edge: Moved, owned: Boxes, item_bytes: int) -> EdgeMemory:
        """owned: the boxes of the producer's output."""
        volume = owned.volume
        alike = edge.owned == volume
        viewed = alike & (edge.local | (edge.sent == 0))
        elements = edge.need, edge.received, edge.sent, edge.forth, edge.back
        need, received, sent, forth, back = (size * item_bytes for size in elements)
        inside, rest = owned.active & alike & (volume > 0), np.where(viewed, 0.0, volume * item_bytes)
        here = devices_of(edge.need > 0)
        return EdgeMemory(edge.local, need, received, sent, forth, back, here, inside, devices_of(viewed), rest)


def stages_of(layer: Layer, place: Place, flows: Sequence[bool], split: bool) -> list[StageMemory]:
    """A layer's stages on all devices. flows: whether its inputs have gradients; split: whether its
    reduction is split.
    """
    rows: list[StageMemory] = []
    running = False
    for stage, gradients in zip(layer.stages, layer.gradients(flows), strict=True):
        space, boxes = stage.space, place.at(stage.epilogue)
        dims, rank = len(space.dims), len(space.out.shape)
        saved = stage.op.saved(stage.specs, boxes.lo[:, :dims], boxes.hi[:, :dims])
        made = place.owned.volume * space.out.item_bytes
        around = 0.0 if stage.epilogue or (stage.views and stage.views[0]) else saved.padded
        extra, forward, between, padded = (
            np.where(boxes.active, size, 0.0) for size in (saved.extra, saved.forward, saved.between, around)
        )
        if split and not stage.epilogue:
            # Forward: partial sums, and what is sent and received of them. Backward: those of all devices.
            extents = (boxes.hi - boxes.lo)[:, :rank].astype(np.float64)
            partial = np.where(boxes.active, extents.prod(1), 0.0) * space.out.item_bytes
            forward, between = forward + 3 * partial, between + 2 * partial
        slots = tuple(range(stage.inputs.stop)[stage.inputs])
        copies, weights = _copies(layer, stage, place, slots)
        rows.append(
            StageMemory(
                saved=saved,
                made=made,
                extra=extra,
                forward=forward,
                between=between,
                slots=slots if rows else (*slots, *range(len(layer.specs), len(layer.inputs))),
                tracked=gradients.result,
                running=running,
                view=stage.view,
                copies=copies,
                weights=weights,
                padded=padded,
            )
        )
        running = gradients.result
    return rows


def remembered(layer: Layer, place: Place) -> list[tuple[str, Floats]]:
    """The running statistics that training updates, on the devices that compute them."""
    rows = ((name, place.at(p.epilogue).needs(p.maps).volume * ITEM_BYTES[d]) for name, p, d in layer.remembered)
    return [(name, np.where(place.computed.active, size, 0.0)) for name, size in rows]


def _copies(layer: Layer, stage: Stage, place: Place, slots: Sequence[int]) -> tuple[dict[int, Floats], Floats]:
    """The copies that autocast casts to the type of a stage's result: bytes by slot, and bytes of weights.

    Matrix products cast everything that they read; so do operators that autocast runs in float32.
    """
    out, none = stage.space.out, np.zeros(len(place.owned.volume))
    if layer.types is None or not out.differentiable:
        return {}, none
    product = bool(stage.op.gemms(stage.specs, np.ones((1, len(stage.space.dims)), np.int64)))
    types = [spec.dtype for spec in stage.specs if spec.differentiable]
    if isinstance(stage.op, Cast) or not (product or (types and out.dtype not in types)):
        return {}, none
    boxes = place.at(stage.epilogue)
    sources = list(slots) if stage.slot is None else [*slots[: stage.slot], BEFORE, *slots[stage.slot :]]
    copies = {
        slot: boxes.needs(maps).volume * out.item_bytes
        for slot, maps, spec in zip(sources, stage.space.needs, stage.specs, strict=True)
        if spec.differentiable and spec.dtype != out.dtype
    }
    number = next(i for i, one in enumerate(layer.stages) if one is stage)
    if not product or layer.types.parameters[number] == out.dtype:
        return copies, none
    weights = [place.at(p.epilogue).needs(p.maps).volume for p in layer.space.parameters[stage.parameters]]
    return copies, sum(weights, none) * out.item_bytes


TARGET_BYTES = 8  # a class is an int64


def differentiated(
    tracker: AllocationTracker, model: CostModel, sink: Layer, sizes: Sequence[Floats], received: Sequence[Ref]
) -> list[Ref]:
    """Returns the gradients of outputs, which are returned as copies of what is received.

    An output that is not a loss gets a cross entropy, as in `layerwise run`. It has targets, and saves logarithms,
    whose gradient is computed before that of the output.
    """
    free, batch = model.options.io == "free", model.graph.batch
    uneven = not free and bool(batch % min(model.devices.count, batch))
    copies = [tracker.new(size) for size in sizes]
    tracker.drop(*received)
    scored: list[Floats] = []
    for size, name, spec in zip(sizes, sink.inputs, sink.specs, strict=True):
        ends = not spec.differentiable or len(spec.shape) < 2 or name in model.graph.losses
        scored.append(0 * size if ends else size)
        if not ends:
            elements = np.full_like(size, spec.volume) if free else size / spec.item_bytes
            tracker.new(elements / spec.shape[1] * TARGET_BYTES)
    # The cross entropy of outputs of 16 bits is computed in float32.
    wide = [spec.item_bytes == 2 for spec in sink.specs]
    scored = [score * (1 + twice) for score, twice in zip(scored, wide, strict=True)]
    widened = [tracker.new(score * twice) for score, twice in zip(scored, wide, strict=True)]
    logs = [tracker.new(score) for score in scored]
    tracker.drop(*copies, *widened)
    gradients = list[Ref]()
    for size, score, log, twice, source in zip(sizes, scored, logs, wide, sink.inputs, strict=True):
        flows = model.has_gradient[source]
        first, gradient = tracker.new(score), tracker.new(np.where(twice, score, size) * flows)
        tracker.drop(first, log)
        for copied in (twice, uneven):  # cast to 16 bits; scaled to the mean over all samples
            if copied:
                made = tracker.new(size * flows)
                tracker.drop(gradient)
                gradient = made
        gradients.append(gradient)
    return gradients


def place_of(model: CostModel, layer: Layer, config: Config) -> Place:
    """A layer's boxes under a configuration."""

    def made() -> Place:
        unfed = layer.name in model.graph.unfed
        return place(layer, config, model.devices.count, model.options.io, unfed=unfed)

    return model.once(("place", model.kind(layer), config.cells), made)


def moved_between(model: CostModel, layer: Layer, slot: int, owner: Place, target: Place) -> Moved:
    """The transfer to one of a layer's inputs. owner, target: the places of its producer and of the layer."""
    io, graph = model.options.io, model.graph
    if layer.role is Role.SINK and io != "sample":
        loss = layer.inputs[slot] in graph.losses
        return outputs(owner, layer.specs[slot], io, loss=loss)
    maps, epilogue = input_maps(layer, slot)
    return moved(owner, maps, target.at(epilogue))


@dataclass
class TensorSizes:
    """The sizes of a strategy (with inputs and sink), all by layer name."""

    model: CostModel
    strategy: Strategy
    places: dict[str, Place] = field(init=False)  # its boxes
    stages: dict[str, list[StageMemory]] = field(init=False)
    _read: dict[str, Place] = field(init=False)  # places of inputs and constants, which depend on several layers
    _edges: dict[EdgeEnd, EdgeMemory] = field(default_factory=dict)  # by reader
    _pieces: dict[str, dict[int, Floats]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.places = {layer.name: place_of(self.model, layer, self.strategy[layer.name]) for layer in graph.layers}
        self._read = read(graph, self.places, self.model.options.io)
        self.places |= self._read
        self.stages = {layer.name: self._stages(layer) for layer in graph.inner}
        self._within = self.model.once("saved within", lambda: saved_within(graph))

    def _stages(self, layer: Layer) -> list[StageMemory]:
        model, config = self.model, self.strategy[layer.name]

        def made() -> list[StageMemory]:
            flows, place = model.graph.flows_back(layer), place_of(model, layer, config)
            return stages_of(layer, place, flows, config["k"] > 1)

        first, *rest = model.once(("stages", model.kind(layer), config.cells), made)
        travels = bool(first.padded.any()) and not self.edge(layer, 0).local
        return [first.given_padded() if travels else first, *rest]

    def parameters(self, layer: Layer) -> list[ParameterMemory]:
        """The memory of a layer's parameters."""
        # A sharded parameter has a place in a bucket, so layers cannot share it.
        model, config = self.model, self.strategy[layer.name]
        key = "parameters", model.kind(layer) if config.states == "replicated" else layer.name, config
        return model.once(key, lambda: parameters_of(model, layer, config, place_of(model, layer, config)))

    def edge(self, layer: Layer, slot: int) -> EdgeMemory:
        """The transfer to one of a layer's inputs.

        One that comes a piece at a time has three pieces: the one that is read, and the next one, as it is received and
        as it is put together.
        """
        pieces = self.pieces(layer)
        if slot not in pieces:
            return self._edge(layer, slot)
        none = np.zeros_like(pieces[slot])
        return replace(self._edge(layer, slot), need=3 * pieces[slot], received=none, forth=none)

    def pieces(self, layer: Layer) -> dict[int, Floats]:
        """(N,) bytes of each device's largest piece, by input; {} if the layer receives its inputs in full."""
        if self.model.options.kind != "inference" or layer.role is not Role.COMPUTE:
            return {}
        if layer.name not in self._pieces:
            found = self.model.once(("pieces", self.model.kind(layer)), lambda: pieces_of(layer))
            travel = found is not None and not any(self._edge(layer, slot).local for slot in found.maps)
            sizes = largest_pieces(layer, found, self.places[layer.name]) if found is not None and travel else {}
            self._pieces[layer.name] = {
                i: n * self.model.graph[layer.inputs[i]].out.item_bytes for i, n in sizes.items()
            }
        return self._pieces[layer.name]

    def in_pieces(self, layer: Layer) -> Floats | float:
        """(N,) temporary bytes of a kernel that reads pieces, with what is sent meanwhile; 0.0 for others."""
        if not (pieces := self.pieces(layer)):
            return 0.0
        place, found = self.places[layer.name], pieces_of(layer)
        assert found is not None
        boxes = place.computed
        sent = sum(2 * np.minimum(self._edge(layer, slot).forth, self.own(layer.inputs[slot])) for slot in pieces)
        return sent + np.where(boxes.active, found.temporary(boxes.hi - boxes.lo, longest_piece(found, place)), 0.0)

    def _edge(self, layer: Layer, slot: int) -> EdgeMemory:
        end = layer.name, slot
        if end not in self._edges:
            model, name, target = self.model, layer.inputs[slot], self.strategy[layer.name]
            producer, source = model.graph[name], self.strategy[name]

            def made() -> EdgeMemory:
                edge = moved_between(model, layer, slot, self.places[name], self.places[layer.name])
                return EdgeMemory.of(edge, self.places[name].owned, producer.out.item_bytes)

            key = "moved", model.kind(producer), model.kind(layer), slot, source.cells, target.cells
            self._edges[end] = made() if name in self._read else model.once(key, made)
        return self._edges[end]

    def received(self, layer: Layer, slot: int) -> Floats:
        """(N,) bytes that a layer receives of an input that is transferred; its gradient has as many."""
        edge = self.edge(layer, slot)
        if slot or layer.role is Role.SINK or edge.local:
            return edge.need
        return np.maximum(edge.need, self.stages[layer.name][0].padded)

    def own(self, name: str) -> Floats:
        """(N,) bytes of a device's box of a layer's output."""
        return self.places[name].owned.volume * self.model.graph[name].out.item_bytes

    def within(self, layer: Layer) -> Mask | None:
        """(N,) True where a layer saves its first input as received, with the producer's box in it; None: nowhere."""
        source = layer.inputs[0] if layer.inputs else ""
        if self._within.get(source) != (layer.name, 0) or self.edge(layer, 0).local:
            return None
        if self.strategy[source].recompute or self.strategy[layer.name].recompute:
            return None
        return self.edge(layer, 0).inside
