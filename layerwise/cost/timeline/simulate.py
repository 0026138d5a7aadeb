"""timeline_s: a step simulated device by device, with the overlap that the runtime has.

Layers run forward in plan order, then backward in reverse. A transfer holds its devices from when the last of them has
come to it; one that runs ahead (`layerwise.partition.ahead`) travels beside their computation, till it is needed. So
does the gradient of a convolution's input, beside that of its weights.
Transfers follow each other in the order in which they begin. Gradients are all-reduced in buckets beside the backward
pass, each as soon as its last gradient is there; a transfer in between takes the port from them. What travels beside
computation costs it, and computation that, what was measured (`stream`). Recomputed layers are made again when the
backward pass comes to their block. The optimizer steps when all is done.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from layerwise.config import Config
from layerwise.cost.collectives import bucket_s, group_shape, overlap, reduce_scatter_s
from layerwise.cost.compute.roofline import rooflines
from layerwise.cost.model import CostModel, EdgeName, Strategy
from layerwise.cost.price import complete
from layerwise.cost.terms import COMPUTE, LAYER_TERMS
from layerwise.cost.timeline.buckets import Bucket, buckets
from layerwise.cost.timeline.gathers import Gathers
from layerwise.cost.timeline.stream import Stream, Traffic
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.partition.ahead import EdgeEnd, begun_before, weights_late
from layerwise.partition.blocks import AGAIN, made_again

UPDATE = " (update)"  # how a span of the optimizer ends
Record = Callable[["Span"], None]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of a step: all of it, and of the slowest device's forward, backward and exposed synchronisation."""

    total_s: float
    forward_s: float
    backward_s: float
    exposed_sync_s: float


@dataclass(frozen=True, slots=True, eq=False)
class Span:
    """What some devices do when: (N,) starts and ends, and which devices. Names are those of the runtime's trace."""

    name: str
    category: str
    layer: str
    start_s: Floats
    end_s: Floats
    devices: Mask


@dataclass
class _Step:
    """The state of the simulation."""

    model: CostModel
    strategy: Strategy
    record: Record | None
    clock: Floats = field(init=False)  # (N,) until when each device is busy
    stream: Stream = field(init=False)

    def __post_init__(self) -> None:
        self.clock = np.zeros(self.model.devices.count)
        self.stream = Stream(self.model.devices.count)
        self.begun = begun_before(self.model.graph, self.model.options.io)
        self.ahead = {end for begun in self.begun.values() for end in begun}
        self.flights = dict[EdgeEnd, Traffic]()
        self.last_sum: Traffic | None = None  # of a gathered layer's gradients
        self.late = {layer.name for layer in self.model.graph.inner if self._weights_late(layer)}

    def active(self, layer: Layer) -> Mask:
        mask: Mask = self.model.layout(layer, (self.strategy[layer.name],)).computed.active[0]
        return mask

    def _weights_late(self, layer: Layer) -> bool:
        flows = any(self.model.graph.flows_back(layer)[:1])
        return (
            weights_late(layer, flows, self.model.devices.device_type) and self._transfer_s(layer, 0, forward=False) > 0
        )

    def compute(self, layer: Layer, *, forward: bool) -> None:
        """Backward: all but what `weights` does."""
        cost = self.model.node_cost(layer, (self.strategy[layer.name],))
        active, suffix = self.active(layer), "" if forward else " (backward)"
        self._beside(layer, float(cost.compute.forward[0]) if forward else self._backward_s(layer)[0], suffix)
        for term in LAYER_TERMS:
            both = float(cost.seconds[term.name][0])
            if term.span and both:  # the cells of the layer wait for each other; each direction has half
                self._together(f"{layer.name}{suffix}", term.span, layer.name, active, both / 2)

    def again(self, layer: Layer, gathers: Gathers) -> None:
        """What a recomputed layer does once more, when the backward pass comes to its block."""
        model, config = self.model, self.strategy[layer.name]
        for slot, source in enumerate(layer.inputs):
            ends = (self.strategy[source],), (replace(config, recompute=True), config)
            twice, once = model.edge_cost((source, layer.name, slot), *ends)[0].tolist()
            if twice > once:
                name, devices = self._edge_name(layer, slot, forward=True) + AGAIN, self._involved(layer, slot)
                self._together(name, "transfers", layer.name, devices, twice - once, in_order=True)
        self.clock = gathers.awaited_alone(layer.name, self.clock)
        seconds = {name: float(one[0]) for name, one in model.again(layer, (config,)).items()}
        self._beside(layer, seconds[COMPUTE.name], AGAIN)
        for term in LAYER_TERMS:
            if term.span and seconds.get(term.name):
                self._together(layer.name + AGAIN, term.span, layer.name, self.active(layer), seconds[term.name])

    def weights(self, layer: Layer) -> None:
        """Backward: the gradient of weights that is made while that of the layer's input travels."""
        self._beside(layer, self._backward_s(layer)[1], " (backward)")

    def _backward_s(self, layer: Layer) -> tuple[float, float]:
        """Seconds of a layer's backward pass, and of that what comes late: by its share of the analytic time."""
        model, configs = self.model, (self.strategy[layer.name],)
        total = float(model.node_cost(layer, configs).compute.backward[0])
        if layer.name not in self.late:
            return total, 0.0
        share = model.once(("late", model.kind(layer), configs), lambda: self._late_share(layer, configs))
        return total - total * share, total * share

    def _late_share(self, layer: Layer, configs: tuple[Config, ...]) -> float:
        model = self.model
        wanted, device = model.graph.flows_back(layer), model.devices.processor
        _, work = rooflines(layer, model.layout(layer, configs), wanted, device, model.options.dtype)
        return float(work.weights_s[0] / work.seconds[0])

    def _beside(self, layer: Layer, time: float, suffix: str) -> None:
        """A layer computes."""
        active, start = self.active(layer), self.clock.copy()
        self.clock = self.stream.beside(self.clock, np.where(active, time, 0.0))
        if time:
            self._note(f"{layer.name}{suffix}", "compute", layer.name, start, active)

    def receive(self, layer: Layer, *, forward: bool) -> None:
        """Transfers of a layer's inputs, one after the other as the runtime does them; what runs ahead is awaited.

        Backward: of their gradients; what runs ahead begins, and last what travels beside `weights`.
        """
        late = not forward and layer.name in self.late
        slots = sorted(
            range(len(layer.inputs)), key=lambda slot: (slot > 0 or not late, (layer.name, slot) not in self.ahead)
        )
        for slot in slots if forward else reversed(slots):
            if (layer.name, slot) not in self.ahead and not (late and slot == 0):
                time = self._transfer_s(layer, slot, forward=forward)
                if time:
                    name, devices = self._edge_name(layer, slot, forward=forward), self._involved(layer, slot)
                    self._together(name, "transfers", layer.name, devices, time, in_order=True)
            elif forward:
                self._land(layer, slot, forward=True)
            else:
                self._send_ahead(layer, slot, forward=False)

    def begin(self, layer: Layer) -> None:
        """What runs ahead from here on."""
        for user, slot in self.begun.get(layer.name, ()):
            self._send_ahead(self.model.graph[user], slot, forward=True)

    def end(self, layer: Layer) -> None:
        """Backward: of what ran ahead from here on the gradients are awaited."""
        for user, slot in reversed(self.begun.get(layer.name, ())):
            self._land(self.model.graph[user], slot, forward=False)

    def end_late(self, layer: Layer) -> None:
        """Backward: the gradient beside which that of the weights was made is awaited, unless it runs further ahead."""
        if (layer.name, 0) not in self.ahead:
            self._land(layer, 0, forward=False)

    def _send_ahead(self, layer: Layer, slot: int, *, forward: bool) -> None:
        time = self._transfer_s(layer, slot, forward=forward)
        if time:
            row = np.where(self._involved(layer, slot), 0, -1)
            rates = overlap(group_shape(row, self.model.devices), self.model.devices)
            name = self._edge_name(layer, slot, forward=forward)
            flight = self.flights[layer.name, slot] = Traffic(name, row, time, rates.compute, rates.sync)
            self.stream.send_ahead(flight, self.clock)

    def _land(self, layer: Layer, slot: int, *, forward: bool) -> None:
        flight = self.flights.pop((layer.name, slot), None)
        if flight is not None:
            self.clock = self.stream.awaited(flight, self.clock)
            if self.record is not None:
                devices = flight.row >= 0
                self.record(Span(flight.name, "transfers", layer.name, flight.started, flight.ended, devices))

    def _transfer_s(self, layer: Layer, slot: int, *, forward: bool) -> float:
        """One way; 0 where nothing goes this way."""
        source = layer.inputs[slot]
        edge_name: EdgeName = (source, layer.name, slot)
        times = self.model.directions(edge_name)
        if times < (1 if forward else 2):
            return 0.0
        ends = ((self.strategy[source],), (self.strategy[layer.name],))
        return float(self.model.edge_cost(edge_name, *ends)[0, 0]) / times

    def _involved(self, layer: Layer, slot: int) -> Mask:
        return self.active(self.model.graph[layer.inputs[slot]]) | self.active(layer)

    def _edge_name(self, layer: Layer, slot: int, *, forward: bool) -> str:
        return f"{layer.inputs[slot]} -> {layer.name}{'' if forward else ' (backward)'}"

    def _together(
        self, name: str, category: str, layer: str, devices: Mask, time: float, *, in_order: bool = False
    ) -> None:
        """All wait for the last; then the port is theirs: gradients on the wire wait.

        in_order: after the transfers that are under way, else these wait, too.
        """
        start = self.clock.copy()
        clock = self.stream.through(self.clock, devices) if in_order else self.clock
        begin = np.where(devices, clock[devices].max(), clock)
        self.stream.until(clock, begin)
        self.clock = begin + np.where(devices, time, 0.0)
        self._note(name, category, layer, start, devices)

    def send(self, bucket: Bucket) -> None:
        """Sums a bucket when all its members have come to it; a gathered layer's after the one before has come."""
        model, group = self.model, bucket.group
        rates = overlap(group, model.devices)
        if bucket.states == "replicated":
            seconds = bucket_s(bucket.bytes, group, model.devices, model.options.sync)
        else:
            seconds = reduce_scatter_s(bucket.bytes, group, model.devices)
        name = f"gradients of {bucket.name}"
        sum_ = Traffic(name, bucket.row, seconds, rates.compute, rates.sync)
        if bucket.states == "gathered":
            if self.last_sum is not None:
                self.clock = self.stream.awaited_sum(self.last_sum, self.clock)
            self.last_sum = sum_
        self.stream.add(sum_, self.clock)

    def _note(self, name: str, category: str, layer: str, start: Floats, devices: Mask) -> None:
        if self.record is not None:
            self.record(Span(name, category, layer, start, self.clock.copy(), devices))


def timeline(model: CostModel, strategy: Strategy, record: Record | None = None) -> Timeline:
    """Simulates one training step of a strategy; `record` is called with every span of it."""
    strategy = complete(model, strategy)
    if record is None:  # strategies of a name that a search found, too, are simulated once
        return model.once(("timeline", *strategy.values()), lambda: _simulated(model, strategy, None))
    return _simulated(model, strategy, record)


def _simulated(model: CostModel, strategy: Strategy, record: Record | None) -> Timeline:
    recomputed = made_again(model.graph, {name for name, config in strategy.items() if config.recompute})
    strategy = {name: replace(config, recompute=False) for name, config in strategy.items()}  # `again` does the rest
    step = _Step(model, strategy, record)
    layers, leaving = model.graph.layers, buckets(model, strategy)
    gathers = Gathers(model, strategy, leaving, step.stream)
    gathers.begin(step.clock)
    for layer in layers:
        step.clock = gathers.awaited(layer.name, step.clock, forward=True)
        step.receive(layer, forward=True)
        step.begin(layer)
        step.compute(layer, forward=True)
    forward_s = float(step.clock.max())
    for layer in reversed(layers):
        late = layer.name in step.late
        for one in recomputed.get(layer.name, ()):
            step.again(one, gathers)
        if model.has_gradient[layer.name]:
            step.clock = gathers.awaited(layer.name, step.clock, forward=False)
        step.compute(layer, forward=False)
        if late:
            step.end(layer)
            step.receive(layer, forward=False)
            step.weights(layer)
        for bucket in leaving.get(layer.name, ()):
            step.send(bucket)
        if late:
            step.end_late(layer)
        else:
            step.end(layer)
            step.receive(layer, forward=False)
    backward_s = float(step.clock.max()) - forward_s
    computed = step.clock
    end = step.stream.finish(computed)
    exposed = float((end - computed).max())
    if record is not None:
        for s in step.stream.sums:
            record(Span(s.name, "sync", s.name.rpartition(" ")[2], s.started, s.ended, s.row >= 0))
    for layer in layers:
        update = float(model.node_cost(layer, (strategy[layer.name],)).compute.update[0])
        if update:
            start, everyone = end.copy(), np.ones(len(end), np.bool_)  # whoever computes nothing has a copy
            end = end + update
            if record is not None:
                record(Span(f"{layer.name}{UPDATE}", "compute", layer.name, start, end, everyone))
    return Timeline(float(end.max()), forward_s, backward_s, exposed)
