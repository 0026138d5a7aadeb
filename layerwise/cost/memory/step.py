"""The memory of a step: runs the instructions of its program, in order, on the storages of all devices.

The program gives the order; this module knows PyTorch: what a kernel returns and saves for backward (`Op.saved`), what
autograd adds up and where, and who holds a storage. So the peak is that of an instant, not a sum of maxima. A library's
own memory (a convolution's workspace) and allocator losses are not counted.
"""

from __future__ import annotations

from typing import TypeVar

import numpy as np

from layerwise.cost.memory.allocations import (
    NOBODY,
    AllocationTracker,
    Devices,
    Ref,
    SizeTable,
    devices_of,
    part,
)
from layerwise.cost.memory.parameters import ParameterStorages
from layerwise.cost.memory.sizes import BEFORE, EdgeMemory, TensorSizes, differentiated, remembered
from layerwise.cost.model import CostModel, Strategy
from layerwise.cost.step_facts import step_facts
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd
from layerwise.program import Effects, Program, fold, program
from layerwise.program.instructions import Begin, Compute, End, Forget, Free, Keep, Move, Output

Tracker = TypeVar("Tracker", bound=AllocationTracker)


def peak_bytes(model: CostModel, strategy: Strategy) -> Floats:
    """(N,) each device's peak in a step. strategy: includes the configurations of inputs and sink."""
    count = model.devices.count

    def simulated() -> Floats:
        sizes = model.once("sizes of storages", lambda: SizeTable(count))
        return tracked(model, strategy, AllocationTracker(count, sizes)).peak

    return model.once(("peak", *strategy.items()), simulated)


def fullest_bytes(model: CostModel, strategy: Strategy) -> float:
    """The peak of the fullest device, scaled to the first device's memory, to which a limit applies."""
    return float((peak_bytes(model, strategy) * model.devices.memory_scale).max())


def tracked(model: CostModel, strategy: Strategy, tracker: Tracker, *observers: Effects) -> Tracker:
    """The tracker after a full step. Observers see each instruction once it is done, as in `fold`."""
    facts, sums = step_facts(model, strategy)
    step = program(model.graph, model.options.io, facts, model.options.kind)
    parameters = ParameterStorages(model, tracker, model.options.kind == "training")
    storages = _Storages(model, strategy, tracker, step, parameters)
    parameters.bucket(step, facts, sums)
    fold(step, {**storages.does, **parameters.does}, *observers)
    return tracker


class _Storages:
    """The storages of a step, by layer name, and how each instruction changes them."""

    def __init__(
        self,
        model: CostModel,
        strategy: Strategy,
        tracker: AllocationTracker,
        step: Program,
        parameters: ParameterStorages,
    ) -> None:
        self.model, self.strategy, self.tracker = model, strategy, tracker
        self.training = model.options.kind == "training"
        self.block_of = {one.layer: one.block for one in step.instructions if type(one) is Keep}
        self.sizes, self.parameters = TensorSizes(model, strategy), parameters
        for layer in model.graph.layers:
            parameters.add(layer, self.sizes.parameters(layer))
        self.flows, self.places, self.stages = model.has_gradient, self.sizes.places, self.sizes.stages
        self.values: dict[str, Ref] = {}  # outputs, until their last reader
        self.received: dict[str, dict[int, Ref]] = {}  # inputs, by slot
        self.inward: dict[str, list[Ref]] = {}  # gradients of inputs
        self.saved: dict[str, list[Ref]] = {}  # by stage, what the backward pass reads
        self.gradients: dict[str, Ref] = {}  # gradients of outputs, as far as they are added up
        # Transfers that are under way: what arrives, copies of what is sent, and backward the gradient that is sent.
        self.in_flight: dict[EdgeEnd, tuple[Ref, Ref, Ref]] = {}
        self.sources: dict[str, dict[str, Ref]] = {}  # by block and layer, what the block is recomputed from
        self.fed = set[int]()  # ids of the storages of inputs and constants
        self.returned = frozenset(() if self.training else model.graph.layers[-1].inputs)
        self.does: Effects = {
            Begin: self.begin, End: self.end, Move: self.move, Keep: self.keep, Compute: self.compute,
            Output: self.output, Free: self.free, Forget: self.forget,
        }  # fmt: skip

    # ---- transfers ----

    def begin(self, instruction: Begin) -> None:
        """Allocates what is received, and the copy that is sent, which lives until the transfer ends."""
        layer, slot, tracker = self.model.graph[instruction.layer], instruction.slot, self.tracker
        edge = self.sizes.edge(layer, slot)
        if instruction.way == "forward":
            flight = tracker.new(edge.received, "gathered"), tracker.new(edge.forth, "workspace"), NOBODY
        else:  # what it sent forward arrives
            flight = (
                tracker.new(edge.sent, "gradients"),
                tracker.new(edge.back, "workspace"),
                self.inward[layer.name][slot],
            )
        self.in_flight[layer.name, slot] = flight

    def end(self, instruction: End) -> None:
        """Frees the copies that were sent."""
        layer, slot = self.model.graph[instruction.layer], instruction.slot
        arrived, copies, gradient = self.in_flight.pop((layer.name, slot))
        self.tracker.drop(copies)
        if instruction.way == "forward":
            self._receive(layer, slot, arrived)
        else:
            self._add(layer.inputs[slot], self.sizes.edge(layer, slot), gradient, arrived)

    def move(self, instruction: Move) -> None:
        """Passes a tensor on: if nothing is sent, the layer reads its source's own storage."""
        layer, slot, tracker = self.model.graph[instruction.layer], instruction.slot, self.tracker
        edge = self.sizes.edge(layer, slot)
        if instruction.way == "backward":
            arrived = tracker.new(edge.sent, "gradients")  # what it sent forward
            tracker.spike(edge.back)
            self._add(layer.inputs[slot], edge, self.inward[layer.name][slot], arrived)
        elif edge.local:
            here = tracker.hold(self._value(layer, slot), edge.here)
            self.received.setdefault(layer.name, {})[slot] = here
        else:
            arrived = tracker.new(edge.received, "gathered")
            tracker.spike(edge.forth)
            self._receive(layer, slot, arrived)

    def _receive(self, layer: Layer, slot: int, arrived: Ref) -> None:
        self.received.setdefault(layer.name, {})[slot] = self.tracker.new(self.sizes.received(layer, slot), "gathered")
        self.tracker.drop(arrived)

    def _inputs(self, layer: Layer) -> list[Ref]:
        received = self.received.pop(layer.name, {})
        return [received[slot] for slot in range(len(received))]

    def _value(self, layer: Layer, slot: int) -> Ref:
        source = layer.inputs[slot]
        return self.values[source] if source in self.values else self.sources[self.block_of[layer.name]][source]

    # ---- computation ----

    def compute(self, instruction: Compute) -> None:
        """Kernels allocate their outputs, and hold what they save."""
        layer, tracker = self.model.graph[instruction.layer], self.tracker
        if instruction.part == "backward":
            self._backward(layer)
        elif layer.role is Role.TIED:  # the parameter itself
            self.values[layer.name] = NOBODY
        elif layer.role in (Role.INPUT, Role.CONSTANT):
            fed = tracker.new(self.places[layer.name].owned.volume * layer.out.item_bytes)
            self.values[layer.name] = tracker.hold(fed)  # whoever feeds it keeps it
            self.fed.update(id(storage) for storage, _ in fed)
        else:
            rewritten = instruction.part == "recompute"  # running statistics, which are put back afterwards
            copies = [tracker.new(n) for _, n in remembered(layer, self.places[layer.name])] if rewritten else []
            self._compute(layer, self._inputs(layer), saves=instruction.saves)
            tracker.drop(*copies)

    def output(self, instruction: Output) -> None:
        """Outputs leave; in training the gradients of their losses are allocated.

        In inference they are what is received, but for what is fed, which is copied.
        """
        sink = self.model.graph[instruction.layer]
        sizes = [self.sizes.edge(sink, slot).need for slot in range(len(sink.specs))]

        if self.training:
            self.inward[sink.name] = differentiated(self.tracker, self.model, sink, sizes, self._inputs(sink))
        else:
            for size, received in zip(sizes, self._inputs(sink), strict=True):
                fed = sum(devices for storage, devices in received if id(storage) in self.fed)  # disjoint sets
                self._copied(received, size, fed)

    def free(self, instruction: Free) -> None:
        """Drops the layer's output, which lives on only if it was saved."""
        self.tracker.drop(self.values.pop(instruction.value))

    def keep(self, instruction: Keep) -> None:
        """Holds a block's inputs, except those that it recomputes, and copies of running statistics."""
        layer, block = self.model.graph[instruction.layer], instruction.block
        sources = self.sources.setdefault(block, {})
        for source in layer.inputs:
            if self.block_of.get(source) != block and source not in sources:
                sources[source] = self.tracker.hold(self.values[source])
        sources |= {name: self.tracker.new(size) for name, size in remembered(layer, self.places[layer.name])}

    def forget(self, instruction: Forget) -> None:
        """Frees what was held to recompute a block."""
        self.tracker.drop(*self.sources.pop(instruction.block).values())

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
            within = stage.forward if number else stage.forward + self.sizes.in_pieces(layer)
            tracker.spike(within if keeps else within + stage.extra)
            if keeps:
                where = stage.reads
                read = {BEFORE: before} | {slot: given[slot] for slot in stage.slots} | copies
                for ref in read.values():
                    mine += tracker.hold(ref, where)
                mine += tracker.hold(weights)
                mine += tracker.hold(out) if stage.saved.output else NOBODY
            saved.append(mine)
            tracker.drop(before, weights, *copies.values())
            if keeps and number == 0 and (inside := self.sizes.within(layer)) is not None:
                self._keep_within(layer, given[0], devices_of(inside) & where)
        if layer.name in self.returned:  # a view of more would keep all of it
            own, behind = self.sizes.own(layer.name), np.zeros(tracker.count)
            for storage, devices in out:
                behind += np.where(tracker.mask(devices), storage.size, 0.0)
            out = self._copied(out, own, devices_of(behind > own))
        self.values[layer.name] = out
        if self.flows[layer.name] and saves:
            self.saved[layer.name] = saved
        else:
            tracker.drop(*saved)
        tracker.drop(*given)

    def _copied(self, ref: Ref, size: Floats, where: Devices) -> Ref:
        """Returns a tensor that is copied on the devices `where`."""
        copy = self.tracker.new(np.where(self.tracker.mask(where), size, 0.0))
        self.tracker.drop(part(ref, where))
        return part(ref, ~where) + copy

    def _keep_within(self, layer: Layer, given: Ref, where: Devices) -> None:
        """On the devices `where`, saves what this layer received in place of the maker's box, which is a part of it."""
        source = layer.inputs[0]
        out, rest = self.values[source], self.saved[source]
        made = {id(storage) for storage, _ in out}
        rest[-1] = tuple((s, devices & ~where if id(s) in made else devices) for s, devices in rest[-1])
        rest[-1] += self.tracker.hold(given, where)
        self.tracker.drop(part(out, where))

    # ---- backward ----

    def _backward(self, layer: Layer) -> None:
        """Allocates the gradients of a layer's parameters and inputs."""
        if layer.role is Role.TIED:
            self.parameters.put_tied(layer)
            self.tracker.drop(self.gradients.pop(layer.name, NOBODY))
            self.parameters.hand_out(layer)
        else:
            self.inward[layer.name] = self._differentiate(layer)

    def _differentiate(self, layer: Layer) -> list[Ref]:
        tracker, stages, saved = self.tracker, self.stages[layer.name], self.saved.pop(layer.name)
        running, inward = self.gradients.pop(layer.name, NOBODY), [NOBODY] * len(layer.inputs)
        tracked = [number for number, stage in enumerate(stages) if stage.tracked]
        for number in reversed(tracked):
            stage, before, weights = stages[number], NOBODY, NOBODY
            parameters = list[Ref]()
            if number == tracked[0]:
                weights = tracker.new(stage.weights)  # gradients of the copies of weights come before those of weights
                parameters = [] if weights else self.parameters.gradients(layer)
            cast = [size for slot, size in stage.copies.items() if slot == BEFORE or self.flows[layer.inputs[slot]]]
            between = tracker.new(sum(cast, stage.between), "workspace")  # its sources are freed before it is read
            read, two = running + saved[number], stage.twice
            tracker.drop(part(read, two))
            for slot in stage.slots:
                if self.flows[layer.inputs[slot]]:  # a view of the output's gradient, or made
                    size = self.sizes.received(layer, slot)
                    inward[slot] = tracker.hold(running) if stage.saved.through else tracker.new(size, "gradients")
            if stage.running:
                before = (
                    tracker.hold(running) if stage.saved.through else tracker.new(stages[number - 1].made, "gradients")
                )
            tracker.drop(between, part(read, ~two))
            if weights:
                parameters = self.parameters.gradients(layer)
            tracker.drop(weights)
            if number == tracked[0]:
                self.parameters.put(layer, parameters)
            running = before
        tracker.drop(running)
        self.parameters.hand_out(layer)
        return inward

    def _add(self, source: str, edge: EdgeMemory, gradient: Ref, arrived: Ref) -> None:
        """Adds a gradient to the earlier ones."""
        tracker = self.tracker
        # The gradient of the source's own box is a view of `gradient` if nothing else contributes, else a new tensor.
        back = tracker.hold(gradient, edge.viewed) + tracker.new(edge.rest, "gradients")
        tracker.drop(arrived, gradient)
        before = self.gradients.get(source)
        if before is not None:  # autograd adds in place if nobody else holds the sum
            mine = tracker.unshared(before)
            other = tracker.unshared(back) & ~mine
            total = tracker.new(np.where(tracker.mask(mine | other), 0.0, self.sizes.own(source)), "gradients")
            tracker.drop(part(before, ~mine), part(back, ~other))
            back = part(before, mine) + part(back, other) + total
        self.gradients[source] = back
