"""timeline_s: runs the instructions of a step's program, in order, on the clocks of all devices.

The program gives the order; this module adds time. A transfer occupies its devices from when the last of them reaches
it; one that was issued early runs beside computation until it is awaited, and so do gradient sums and parameter
gathers. Transfers follow each other in the order in which they begin, and have priority over sums. Traffic and
computation slow each other down as measured (`stream`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from layerwise.arguments import checked
from layerwise.chrome import Category
from layerwise.cost.collectives import all_gather_s, bucket_s, group_shape, overlap
from layerwise.cost.model import CostModel, NodeCost, Strategy
from layerwise.cost.price import complete
from layerwise.cost.step_facts import GradientSum, gathers, step_facts, transfer_s
from layerwise.cost.terms import COMPUTE, LAYER_TERMS
from layerwise.cost.timeline.stream import Flow, Stream
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.machine.curves import Operation
from layerwise.partition.ahead import EdgeEnd
from layerwise.partition.blocks import AGAIN
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.program import Bucket, Effects, Program, fold, program
from layerwise.program.instructions import (
    AllGather,
    Arrive,
    Begin,
    Compute,
    Direction,
    End,
    Fill,
    Forget,
    Free,
    Keep,
    Move,
    Output,
    Release,
    Update,
)

UPDATE = " (update)"  # how a span of the optimizer ends
SUFFIX: dict[Direction, str] = {"forward": "", "recompute": AGAIN, "backward": " (backward)"}
Record = Callable[["SimulatedSpan"], None]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of a step: the total, and the slowest device's forward, backward and exposed synchronization."""

    total_s: float
    forward_s: float
    backward_s: float
    exposed_sync_s: float


@dataclass(frozen=True, slots=True)
class Pace:
    """Factors by which parts of a step take longer than priced."""

    compute: Mapping[str, float] = field(default_factory=dict)  # by layer; 1 where it is missing
    links: float = 1.0


@dataclass(frozen=True, slots=True, eq=False)
class SimulatedSpan:
    """An action of some devices: (N,) starts, ends and flags. Names are those of the runtime's trace."""

    name: str
    category: Category
    layer: str
    start_s: Floats
    end_s: Floats
    devices: Mask


@checked
def timeline(
    model: CostModel, strategy: Strategy, record: Record | None = None, *, bucket_bytes: float = BUCKET_BYTES
) -> Timeline:
    """Returns the time of one step of a strategy, simulated with overlap.

    Args:
        model: The network on its machine.
        strategy: A configuration of every layer but inputs and sink, by name.
        record: Called with every span.
        bucket_bytes: Size at which a bucket of gradients is full.

    Returns:
        Seconds of the step, and of the slowest device's forward, backward and exposed synchronization.

    Raises:
        LayerwiseError: Layers are missing, unknown, or cannot be split that way.

    Examples:
        >>> import layerwise
        >>> graph = layerwise.fuse(layerwise.load_model("lenet5", 64))
        >>> model = layerwise.CostModel(graph, layerwise.load_profile("p100").device_graph(4))
        >>> step = timeline(model, {layer.name: layerwise.Config.of({"n": 4}) for layer in graph.inner})
        >>> step.forward_s + step.backward_s <= step.total_s
        True
    """
    strategy = complete(model, strategy)
    if record is None:  # named strategies that a search has also found are simulated once
        key = "timeline", bucket_bytes, *strategy.values()
        return model.once(key, lambda: _simulated(model, strategy, None, bucket_bytes))
    return _simulated(model, strategy, record, bucket_bytes)


def step_spans(model: CostModel, strategy: Strategy, bucket_bytes: float = BUCKET_BYTES) -> list[SimulatedSpan]:
    """The actions of all devices in a step of a strategy, in simulation order."""
    spans: list[SimulatedSpan] = []
    timeline(model, strategy, spans.append, bucket_bytes=bucket_bytes)
    return spans


def paced(model: CostModel, strategy: Strategy, bucket_bytes: float, pace: Pace) -> float:
    """Seconds of a step if parts take longer than priced."""
    return _simulated(model, complete(model, strategy), None, bucket_bytes, pace).total_s


def _simulated(
    model: CostModel, strategy: Strategy, record: Record | None, bucket_bytes: float, pace: Pace | None = None
) -> Timeline:
    facts, sums = step_facts(model, strategy, bucket_bytes)
    step = program(model.graph, model.options.io, facts, model.options.kind)
    clocks = _Clocks(model, strategy, step, sums, record, pace or Pace())
    fold(step, clocks.does)
    return Timeline(float(clocks.clock.max()), clocks.forward_s, clocks.backward_s, clocks.exposed_s)


class _Clocks:
    """The state of the simulation: how each instruction changes the devices' clocks."""

    def __init__(
        self,
        model: CostModel,
        strategy: Strategy,
        step: Program,
        sums: list[GradientSum],
        record: Record | None,
        pace: Pace,
    ) -> None:
        self.model, self.sums, self.record, self.pace = model, sums, record, pace
        # Recomputation has its own instructions.
        self.strategy = {name: c.saving(recompute=False, states=c.states) for name, c in strategy.items()}
        self.clock = np.zeros(model.devices.count)  # (N,) until when each device is busy
        self.stream = Stream(model.devices.count)
        self.forward_s = self.backward_s = self.exposed_s = 0.0
        self.buckets = step.buckets
        self.in_flight: dict[EdgeEnd, Flow] = {}
        self.gathering: dict[str | int, list[Flow]] = {}
        self.last_gathered: Flow | None = None  # the sum of a gathered layer's gradients
        self.does: Effects = {
            AllGather: self.gather, Arrive: self.arrive, Begin: self.begin, End: self.end, Move: self.move,
            Compute: self.compute, Output: self.output, Fill: self.fill, Update: self.update,
            **dict.fromkeys((Release, Keep, Free, Forget)),  # freeing memory takes no time
        }  # fmt: skip

    # ---- parameters and their gradients ----

    def gather(self, instruction: AllGather) -> None:
        """Starts a gather beside computation, like gradient sums."""
        what = instruction.what
        if isinstance(what, int):
            bucket = self.buckets[what]
            name, sizes = bucket.layer, [(self._row(bucket), self._size_bytes(bucket))]
        else:
            name, sizes = what, self._gathered(self.model.graph[what])
        self.gathering[what] = [self._gathering(name, row, size_bytes) for row, size_bytes in sizes]

    def _gathered(self, layer: Layer) -> list[tuple[Ints, float]]:
        """The gathers of a layer that is gathered alone, by group."""
        by_group: dict[bytes, tuple[Ints, float]] = {}
        for one in gathers(self.model, layer, self.strategy[layer.name]):
            before = by_group.get(one.row.tobytes(), (one.row, 0.0))[1]
            by_group[one.row.tobytes()] = one.row, one.size_bytes + before
        return list(by_group.values())

    def _gathering(self, name: str, row: Ints, size_bytes: float) -> Flow:
        devices = self.model.devices
        group = group_shape(row, devices)
        rates = overlap(group, devices, "all_gather")
        seconds = all_gather_s(size_bytes, group, devices) * self.pace.links
        one = Flow(f"gather of {name}", row, seconds, rates.compute, rates.sync)
        self.stream.add(one, self.clock, is_sum=True)
        return one

    def arrive(self, instruction: Arrive) -> None:
        """Its devices wait."""
        for one in self.gathering.pop(instruction.what):
            self.clock = self.stream.awaited(one, self.clock, is_sum=True)

    def fill(self, instruction: Fill) -> None:
        """Sums begin when all members have arrived; a gathered layer's after the previous one has ended."""
        model = self.model
        for bucket in (self.buckets[number] for number in instruction.buckets):
            group, size_bytes = self.sums[bucket.gradients[0]].group, self._size_bytes(bucket)
            operation: Operation = "all_reduce" if bucket.states == "replicated" else "reduce_scatter"
            rates = overlap(group, model.devices, operation)
            seconds = bucket_s(size_bytes, group, model.devices, model.options.sync_method, operation)
            seconds *= self.pace.links
            sum_ = Flow(f"gradients of {bucket.layer}", self._row(bucket), seconds, rates.compute, rates.sync)
            if bucket.states == "gathered":
                if self.last_gathered is not None:
                    self.clock = self.stream.awaited(self.last_gathered, self.clock, is_sum=True)
                self.last_gathered = sum_
            self.stream.add(sum_, self.clock, is_sum=True)

    def _row(self, bucket: Bucket) -> Ints:
        return self.sums[bucket.gradients[0]].row

    def _size_bytes(self, bucket: Bucket) -> float:
        return sum(self.sums[i].size_bytes for i in bucket.gradients)

    def update(self, _: Update) -> None:
        """Sums end, then every device that has some of a layer's parameters runs the optimizer."""
        computed = self.clock
        self.backward_s = float(computed.max()) - self.forward_s
        end = self.stream.finish(computed)
        self.exposed_s = float((end - computed).max())
        if self.record is not None:
            for s in self.stream.sums:
                self.record(SimulatedSpan(s.name, "sync", s.name.rpartition(" ")[2], s.started, s.ended, s.row >= 0))
        self.clock = end
        for layer in self.model.graph.layers:
            update_s = self._of_devices(self.model.node_cost(layer, (self.strategy[layer.name],)), "update")
            update_s *= self.pace.compute.get(layer.name, 1.0)
            if np.any(update_s):
                start, active = self.clock, self._active(layer)
                self.clock = start + np.where(active, update_s, 0.0)
                self._note(f"{layer.name}{UPDATE}", "compute", layer.name, start, active)

    # ---- transfers ----

    def move(self, instruction: Move) -> None:
        """Its devices wait for each other, and then for the network."""
        layer, seconds = self.model.graph[instruction.layer], self._transfer_s(instruction)
        if seconds:
            devices = self._ends(layer, instruction.slot)
            self._together(self._name(instruction), "transfers", layer.name, devices, seconds, in_order=True)

    def begin(self, instruction: Begin) -> None:
        """The transfer runs from now on, as far as earlier ones let it."""
        layer = self.model.graph[instruction.layer]
        row = np.where(self._ends(layer, instruction.slot), 0, -1)
        rates = overlap(group_shape(row, self.model.devices), self.model.devices, "exchange")
        one = Flow(self._name(instruction), row, self._transfer_s(instruction), rates.compute, rates.sync)
        self.in_flight[layer.name, instruction.slot] = one
        self.stream.add(one, self.clock)

    def end(self, instruction: End) -> None:
        """Its devices wait."""
        one = self.in_flight.pop((instruction.layer, instruction.slot))
        self.clock = self.stream.awaited(one, self.clock)
        if self.record is not None:
            self.record(SimulatedSpan(one.name, "transfers", instruction.layer, one.started, one.ended, one.row >= 0))

    def _transfer_s(self, instruction: Move | Begin) -> float:
        layer, slot, way = self.model.graph[instruction.layer], instruction.slot, instruction.way
        if way == "recompute" and self.model.directions((layer.inputs[slot], layer.name, slot)) == 0:
            return 0.0
        return transfer_s(self.model, self.strategy, layer, slot, forward=way != "backward") * self.pace.links

    def _name(self, instruction: Move | Begin) -> str:
        layer = self.model.graph[instruction.layer]
        return f"{layer.inputs[instruction.slot]} -> {layer.name}{SUFFIX[instruction.way]}"

    def _ends(self, layer: Layer, slot: int) -> Mask:
        return self._active(self.model.graph[layer.inputs[slot]]) | self._active(layer)

    # ---- computation ----

    def compute(self, instruction: Compute) -> None:
        """A layer's devices are busy, and wait for each other if its cells communicate."""
        layer, suffix = self.model.graph[instruction.layer], SUFFIX[instruction.part]
        seconds, collectives = self._seconds(layer, instruction.part)
        if np.any(seconds):
            active, start = self._active(layer), self.clock
            took = np.where(active, seconds * self.pace.compute.get(layer.name, 1.0), 0.0)
            self.clock = self.stream.beside(start, took)
            self._note(f"{layer.name}{suffix}", "compute", layer.name, start, active)
        for span, time in collectives:
            self._together(f"{layer.name}{suffix}", span, layer.name, self._active(layer), time * self.pace.links)

    def output(self, instruction: Output) -> None:
        """The sink has the step's time beside its layers, if it was measured."""
        self.compute(Compute(instruction.layer, "forward"))
        self.forward_s = float(self.clock.max())
        self.compute(Compute(instruction.layer, "backward"))

    def _active(self, layer: Layer) -> Mask:
        mask: Mask = self.model.layout(layer, (self.strategy[layer.name],)).computed.active[0]
        return mask

    def _seconds(self, layer: Layer, part: Direction) -> tuple[float | Floats, list[tuple[Category, float]]]:
        """Seconds of a part of a layer's work, and of the collectives inside it by category."""
        model, configs = self.model, (self.strategy[layer.name],)
        if part == "recompute":
            key = "recomputation", model.kind(layer), configs
            recomputed = model.once(key, lambda: model.recomputation(layer, configs))
            spans = [(t.span, float(recomputed[t.name][0])) for t in LAYER_TERMS if t.span and t.name in recomputed]
            return float(recomputed[COMPUTE.name][0]), [one for one in spans if one[1]]
        cost = model.node_cost(layer, configs)
        # Each direction has half of what the layer's cells send each other.
        both = [(term.span, float(cost.seconds[term.name][0])) for term in LAYER_TERMS if term.span]
        collectives = [(span, seconds / 2) for span, seconds in both if seconds]
        return self._of_devices(cost, part), collectives

    def _of_devices(self, cost: NodeCost, part: str) -> float | Floats:
        """Seconds of a part of a layer's computation; (N,) if devices differ."""
        if not cost.kinds:
            return float(getattr(cost.compute, part)[0])
        each: Floats = np.array([getattr(kind, part)[0] for kind in cost.kinds])[list(self.model.devices.kind_of)]
        return each

    # ---- clocks ----

    def _together(
        self, name: str, category: Category, layer: str, devices: Mask, seconds: float, *, in_order: bool = False
    ) -> None:
        """All devices wait for the last; then the transfer has the port, and gradients on the wire wait.

        in_order: after the transfers that are under way; otherwise these wait, too.
        """
        start = self.clock
        clock = self.stream.through(start, devices) if in_order else start
        begin = np.where(devices, clock[devices].max(), clock)
        self.stream.until(clock, begin)
        self.clock = begin + np.where(devices, seconds, 0.0)
        self._note(name, category, layer, start, devices)

    def _note(self, name: str, category: Category, layer: str, start: Floats, devices: Mask) -> None:
        if self.record is not None:
            self.record(SimulatedSpan(name, category, layer, start, self.clock.copy(), devices))
