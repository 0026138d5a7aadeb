"""The memory of a step: what is alive on each device, through the forward pass, the backward pass and the update.

The executor (layerwise.run) and PyTorch's autograd are followed storage by storage. Forward, what the backward passes
of a layer's kernels read again is kept (`Op.kept`). Backward, gradients of parameters come while activations go. So the
peak is that of an instant, and no sum of maxima. What a library takes for itself (a convolution's workspace) is not
counted, nor what an allocator loses.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from layerwise.cost.memory.allocations import NOBODY, AllocationTracker, Devices, Flight, Ref, devices_of, part
from layerwise.cost.memory.footprints import Footprints
from layerwise.cost.memory.kernels import BEFORE, remembered
from layerwise.cost.memory.outputs import leave
from layerwise.cost.memory.parameters import Parameters
from layerwise.cost.memory.sizes import Sizes
from layerwise.cost.model import CostModel, Strategy
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd, weights_late
from layerwise.partition.blocks import made_again
from layerwise.partition.moved import Moved


def peak_bytes(model: CostModel, strategy: Strategy, footprints: Footprints | None = None) -> Floats:
    """(N,) the most that is alive on each device in a step. strategy: with the configurations of inputs and sink.

    footprints: of the model, where the memory of more strategies is asked for, or of this one again.
    """
    known, key = {} if footprints is None else footprints.peaks, tuple(strategy.items())
    if key not in known:
        known[key] = followed(model, strategy, AllocationTracker(model.devices.count), footprints).peak
    return known[key]


def followed(
    model: CostModel, strategy: Strategy, tracker: AllocationTracker, footprints: Footprints | None = None
) -> AllocationTracker:
    """The tracker, after all of a step."""
    step = _Step(model, strategy, tracker, Footprints(model) if footprints is None else footprints)
    layers = model.graph.layers
    step.parameters.begin()
    last = {source: i for i, layer in enumerate(layers) for source in layer.inputs}
    for i, layer in enumerate(layers):
        step.forward(layer)
        for source in dict.fromkeys(layer.inputs):
            if last[source] == i:
                step.tracker.drop(step.values.pop(source))
    for layer in reversed(layers):
        step.make_again(layer)
        step.backward(layer)
    step.parameters.finish()
    return step.tracker


@dataclass
class _Step:
    """A step that is followed. All by the layer's name."""

    model: CostModel
    strategy: Strategy
    tracker: AllocationTracker
    footprints: Footprints
    values: dict[str, Ref] = field(default_factory=dict)  # its output, until the last layer that needs it
    saved: dict[str, list[Ref]] = field(default_factory=dict)  # for each stage, what its backward pass reads
    gradients: dict[str, Ref] = field(default_factory=dict)  # of its output, as far as it is added up
    flights: dict[EdgeEnd, Flight] = field(default_factory=dict)  # what runs ahead to each of its inputs, or back
    kept: dict[str, dict[str, Ref]] = field(default_factory=dict)  # by block, what it is made again of
    late: list[Ref] = field(default_factory=list)  # what the gradient of weights is made of, while it is yet to be made

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.flows, self.begun = self.model.has_gradient, self.footprints.begun
        self.ahead = {end for begun in self.begun.values() for end in begun}
        recomputed = {name for name, config in self.strategy.items() if config.recompute}
        self.blocks = made_again(graph, recomputed)
        self.block_of = {layer.name: last for last, layers in self.blocks.items() for layer in layers}
        self.parameters = Parameters(self.model, self.tracker)
        for layer in graph.layers:
            self.parameters.hold(layer, self.footprints.held(layer, self.strategy[layer.name]))
        self.sizes = Sizes(self.model, self.strategy, self.footprints)
        self.places, self.stages = self.sizes.places, self.sizes.stages

    # ---- forward ----

    def forward(self, layer: Layer) -> None:
        """A layer's inputs arrive, its stages run, and what is read again is kept."""
        tracker = self.tracker
        if layer.role is Role.TIED:  # the parameter itself
            self.parameters.enter(layer, forward=True)
            self.values[layer.name] = NOBODY
        elif layer.role in (Role.INPUT, Role.CONSTANT):
            fed = tracker.new(self.places[layer.name].owned.volume * layer.out.item_bytes)
            self.values[layer.name] = tracker.hold(fed)  # whoever feeds it keeps it
        else:
            self.parameters.enter(layer, forward=True)
            slots = self._ahead_first(layer)
            came = {slot: self._received(layer, slot) for slot in slots}
            received = [came[slot] for slot in range(len(slots))]
            for user, slot in self.begun.get(layer.name, ()):
                self._send_ahead(self.model.graph[user], slot)
            if layer.role is Role.SINK:
                sizes = [self.sizes.edge(layer, slot).need * spec.item_bytes for slot, spec in enumerate(layer.specs)]
                for slot, gradient in leave(tracker, self.model, layer, sizes, received):
                    self._return(layer, slot, gradient)
            elif layer.name in self.block_of:
                self._keep(layer)
                self._compute(layer, received, saves=False)
            else:
                self._compute(layer, received)
            self.parameters.leave(layer)

    def _ahead_first(self, layer: Layer) -> list[int]:
        """A layer's inputs in the order in which the executor goes through them."""
        return sorted(range(len(layer.inputs)), key=lambda slot: not self._runs_ahead(layer, slot))

    def _runs_ahead(self, layer: Layer, slot: int) -> bool:
        return (layer.name, slot) in self.ahead and not self.sizes.edge(layer, slot).local

    def _send_ahead(self, layer: Layer, slot: int) -> None:
        """What arrives has its memory from now on, and what is sent from a copy keeps that."""
        if self._runs_ahead(layer, slot):
            edge, item_bytes = self.sizes.edge(layer, slot), self.model.graph[layer.inputs[slot]].out.item_bytes
            arrived = self.tracker.new(edge.received * item_bytes, "gathered")
            self.flights[layer.name, slot] = Flight(arrived, self.tracker.new(edge.forth * item_bytes, "workspace"))

    def _received(self, layer: Layer, slot: int, *, again: bool = False) -> Ref:
        source = layer.inputs[slot]
        edge, item_bytes = self.sizes.edge(layer, slot), self.model.graph[source].out.item_bytes
        if edge.local:
            return self.tracker.hold(self.values[source], devices_of(edge.need > 0))
        if self._runs_ahead(layer, slot) and not again:
            flight = self.flights.pop((layer.name, slot))
            arrived = flight.arrived
            self.tracker.drop(flight.copies)
        else:
            arrived = self.tracker.new(edge.received * item_bytes, "gathered")
            self.tracker.spike(edge.forth * item_bytes)
        leaf = self.tracker.new(self.sizes.given(layer, slot), "gathered")
        self.tracker.drop(arrived)
        return leaf

    def _compute(self, layer: Layer, given: list[Ref], *, saves: bool = True) -> None:
        """saves: whether what its backward pass reads is kept."""
        tracker = self.tracker
        saved: list[Ref] = []
        out = NOBODY
        for number, stage in enumerate(self.stages[layer.name]):
            before, mine, weights, keeps = out, NOBODY, NOBODY, saves and stage.tracked
            copies = dict[int, Ref]()
            if stage.view:
                out = tracker.hold(before if number else given[0])
            else:
                mine = tracker.new(stage.extra) if keeps else NOBODY
                copies = {slot: tracker.new(size) for slot, size in stage.copies.items()}
                weights = tracker.new(stage.weights)
                out = tracker.new(stage.made)
            tracker.spike(stage.forward if keeps else stage.forward + stage.extra)
            if keeps:
                inputs = stage.kept.inputs
                where = devices_of(inputs) if isinstance(inputs, np.ndarray) else tracker.everyone * inputs
                read = {BEFORE: before} | {slot: given[slot] for slot in self._slots(layer, number)} | copies
                for ref in read.values():
                    mine += tracker.hold(ref, where)
                mine += tracker.hold(weights)
                mine += tracker.hold(out) if stage.kept.output else NOBODY
            saved.append(mine)
            self._drop([before, weights, *copies.values()])
            if keeps and number == 0 and (within := self.sizes.within(layer)) is not None:
                self._keep_within(layer, given[0], devices_of(within) & where)
        self.values[layer.name] = out
        if self.flows[layer.name] and saves:
            self.saved[layer.name] = saved
        else:
            self._drop(saved)
        self._drop(given)

    def _keep_within(self, layer: Layer, given: Ref, where: Devices) -> None:
        """What an input's maker has kept of it is kept in what this layer was given, on the devices `where`."""
        source = layer.inputs[0]
        out, rest = self.values[source], self.saved[source]
        made = {id(storage) for storage, _ in out}
        rest[-1] = tuple((s, devices & ~where if id(s) in made else devices) for s, devices in rest[-1])
        rest[-1] += self.tracker.hold(given, where)
        self.tracker.drop(part(out, where))

    def _slots(self, layer: Layer, number: int) -> tuple[int, ...]:
        """The layer's inputs that a stage reads; the first one also the parameters that other layers use, too."""
        slots = self.stages[layer.name][number].slots
        return slots if number else slots + tuple(range(len(layer.specs), len(layer.inputs)))

    def _keep(self, layer: Layer) -> None:
        """What a recomputed layer is made of, as far as it is not made again with it; running statistics of before."""
        block = self.block_of[layer.name]
        kept = self.kept.setdefault(block, {})
        for source in layer.inputs:
            if self.block_of.get(source) != block and source not in kept:
                kept[source] = self.tracker.hold(self.values[source])
        kept |= {name: self.tracker.new(size) for name, size in remembered(layer, self.places[layer.name])}

    # ---- backward ----

    def make_again(self, last: Layer) -> None:
        """The recomputed layers of a block, before its last layer is differentiated."""
        layers, kept = self.blocks.get(last.name, ()), self.kept.pop(last.name, {})
        uses = Counter(source for layer in layers for source in layer.inputs if source not in kept)
        self.values |= kept
        for layer in layers:
            received = [self._received(layer, slot, again=True) for slot in range(len(layer.inputs))]
            self.parameters.enter_again(layer)
            moved_again = [self.tracker.new(size) for _, size in remembered(layer, self.places[layer.name])]
            self._compute(layer, received)
            self._drop(moved_again)
            self.parameters.leave(layer)
            uses.subtract(source for source in layer.inputs if source not in kept)
            for name in {layer.name, *layer.inputs} - kept.keys():
                if not uses[name]:
                    self.tracker.drop(self.values.pop(name))
        for name in kept:
            self.tracker.drop(self.values.pop(name))

    def backward(self, layer: Layer) -> None:
        """Gradients of a layer's parameters and inputs, and the way of these to where the inputs came from."""
        name = layer.name
        if layer.role is Role.TIED:
            self.parameters.fill_rows(layer)
            self._drop([self.gradients.pop(name, NOBODY)])
            self.parameters.hand_out(layer)
        elif layer.role is not Role.SINK:
            inward = list[Ref]()
            if self.flows[name]:
                self.parameters.enter(layer, forward=False)
                inward = self._differentiate(layer)
            for user, slot in reversed(self.begun.get(name, ())):
                self._land(self.model.graph[user], slot)
            slots = sorted(self._ahead_first(layer), key=lambda slot: slot > 0 or not self.late)
            for slot in reversed(slots) if inward else ():
                self._return(layer, slot, inward[slot])
            if self.late:
                self._make_weights(layer)
                if not self._runs_ahead(layer, 0):
                    self._land(layer, 0)

    def _differentiate(self, layer: Layer) -> list[Ref]:
        tracker, stages, saved = self.tracker, self.stages[layer.name], self.saved.pop(layer.name)
        running, inward = self.gradients.pop(layer.name, NOBODY), [NOBODY] * len(layer.inputs)
        tracked = [number for number, stage in enumerate(stages) if stage.tracked]
        for number in reversed(tracked):
            stage, before, slots, weights = stages[number], NOBODY, stages[number].slots, NOBODY
            parameters = list[Ref]()
            late = number == 0 and self._weights_late(layer)
            if number == tracked[0]:
                slots = self._slots(layer, 0) if number == 0 else slots
            if number == tracked[0] and not late:
                weights = tracker.new(stage.weights)  # the gradients of copies come first
                parameters = [] if weights else self.parameters.gradients(layer)
            cast = [size for slot, size in stage.copies.items() if slot == BEFORE or self.flows[layer.inputs[slot]]]
            between = tracker.new(sum(cast, stage.between), "workspace")  # what it was made of is gone when it is used
            read, two = running + saved[number], devices_of(stage.between > 0)
            if late:
                self.late, read = [read], NOBODY
            tracker.drop(part(read, two))
            for slot in slots:
                if self.flows[layer.inputs[slot]]:
                    inward[slot] = self._gradient(layer, slot, running if stage.kept.through else None)
            if stage.running:
                before = (
                    tracker.hold(running) if stage.kept.through else tracker.new(stages[number - 1].made, "gradients")
                )
            self._drop([between, part(read, ~two)])
            if weights:
                parameters = self.parameters.gradients(layer)
            tracker.drop(weights)
            if number == tracked[0] and not late:
                self.parameters.put(layer, parameters)
            running = before
        tracker.drop(running)
        if not self.late:
            self.parameters.hand_out(layer)
        return inward

    def _weights_late(self, layer: Layer) -> bool:
        """Whether the gradient of its input travels while that of its weights is made."""
        flows = any(self.model.graph.flows_back(layer)[:1])
        return weights_late(layer, flows, self.model.devices.device_type) and not self.sizes.edge(layer, 0).local

    def _make_weights(self, layer: Layer) -> None:
        copies = self.tracker.new(self.stages[layer.name][0].weights)
        made = self.parameters.gradients(layer)
        self._drop([copies, *self.late])
        self.parameters.put(layer, made)
        self.late = []
        self.parameters.hand_out(layer)

    def _gradient(self, layer: Layer, slot: int, through: Ref | None) -> Ref:
        """That of an input: a view of the output's, or made."""
        if through is not None:
            return self.tracker.hold(through)
        return self.tracker.new(self.sizes.given(layer, slot), "gradients")

    def _return(self, layer: Layer, slot: int, gradient: Ref) -> None:
        """The gradient of a layer's input goes back to who owns it: at once, or ahead (see `_land`)."""
        tracker, source = self.tracker, layer.inputs[slot]
        if not self.flows[source]:
            return
        edge, item_bytes = self.sizes.edge(layer, slot), self.model.graph[source].out.item_bytes
        arrived = tracker.new(edge.sent * item_bytes, "gradients")  # what it sent forward
        if self._runs_ahead(layer, slot) or (slot == 0 and self.late):
            self.flights[layer.name, slot] = Flight(arrived, tracker.new(edge.back * item_bytes, "workspace"), gradient)
        else:
            tracker.spike(edge.back * item_bytes)
            self._add(source, edge, gradient, arrived)

    def _land(self, layer: Layer, slot: int) -> None:
        """The end of a gradient's way back, where there is one."""
        flight = self.flights.pop((layer.name, slot), None)
        if flight is not None:
            self.tracker.drop(flight.copies)
            self._add(layer.inputs[slot], self.sizes.edge(layer, slot), flight.gradient, flight.arrived)

    def _add(self, source: str, edge: Moved, gradient: Ref, arrived: Ref) -> None:
        """A gradient that came back is added to those that came before."""
        tracker = self.tracker
        back = self._adjoint(edge, source, gradient)
        self._drop([arrived, gradient])
        before = self.gradients.get(source)
        if before is not None:  # autograd adds in place where nobody else has what it adds to
            mine = tracker.unshared(before)
            other = tracker.unshared(back) & ~mine
            total = tracker.new(np.where(tracker.mask(mine | other), 0.0, self.sizes.own(source)), "gradients")
            self._drop([part(before, ~mine), part(back, ~other)])
            back = part(before, mine) + part(back, other) + total
        self.gradients[source] = back

    def _adjoint(self, edge: Moved, source: str, gradient: Ref) -> Ref:
        """A view of the gradient where that is all there is to it, else a new tensor."""
        item_bytes, own = self.model.graph[source].out.item_bytes, self.sizes.own(source)
        alike = (edge.kept * item_bytes == own) & (edge.local | (edge.sent == 0))
        return self.tracker.hold(gradient, devices_of(alike)) + self.tracker.new(np.where(alike, 0.0, own), "gradients")

    def _drop(self, refs: Sequence[Ref]) -> None:
        for ref in refs:
            self.tracker.drop(ref)
