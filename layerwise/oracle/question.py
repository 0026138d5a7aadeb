"""Questions to the oracle, and its answers: one for each strategy and number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import cached_property
from math import ceil
from typing import Any, Literal

from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import Profile
from layerwise.oracle.limits import Finding, Sizes, findings, sizes_of
from layerwise.oracle.names import NAMES
from layerwise.oracle.phases import Phases, Projection, phases_of
from layerwise.oracle.pipeline import PipelineStage, pipeline_phases, pipeline_stages, pipelined_s
from layerwise.oracle.strategies import Limit, Shape, UnreachableError, Wishes, limit, shapes, strategy
from layerwise.search.find import best_cap, candidate, search
from layerwise.search.result import Candidate, SearchResult

Scaling = Literal["weak", "strong"]


@dataclass(frozen=True, slots=True)
class Question:
    """A model on a machine."""

    graph: LayerGraph  # fused, at any batch
    profile: Profile
    batch: int | Fraction  # samples a device (weak scaling; may be below 1), or a step (strong scaling)
    scaling: Scaling = "weak"  # weak: the batch of a step grows with the devices; strong: it is fixed
    gpus_per_node: int | None = None
    segments: int | None = None  # maximum in a pipelined batch; None: four a stage, which hides the bubble (GPipe)
    wishes: Wishes = field(default_factory=Wishes)
    options: CostOptions = field(default_factory=CostOptions)
    memory_limit_bytes: float | None = None  # of a device, for searched plans; at most what a plan may use

    def batch_at(self, devices: int) -> int:
        """Samples in a step of all devices together, at least one."""
        return ceil(self.batch * devices if self.scaling == "weak" else self.batch)

    def check_batch(self, devices: int) -> None:
        """Raises UnreachableError if this many devices would not have an integer number of samples."""
        if self.scaling == "weak" and (self.batch * devices) % 1:
            few = (
                f"{float(self.batch):g} samples a GPU on {devices} of them are {float(self.batch * devices):g} samples"
            )
            raise UnreachableError(f"{few}, which is not an integer")

    def segments_at(self, devices: int) -> int:
        """Segments of a pipeline with this many stages."""
        wanted = self.segments or (4 * devices if devices > 1 else 1)
        return min(wanted, self.batch_at(devices))


def batch_of(question: Question) -> str:
    """`32 samples a GPU`: the fixed batch, independent of the number of devices."""
    return f"{float(question.batch):,g} samples {'a GPU' if question.scaling == 'weak' else 'a step'}"


@dataclass(frozen=True, slots=True)
class Answer:
    """The cost of a strategy on a number of devices."""

    projection: Projection
    overlapped_s: float  # an iteration, gradients beside the backward pass; the phases' sum if it was not simulated
    fits: bool  # whether it fits into what a plan may use of a device's memory, as layerwise.run uses it
    shape: Shape | None = None  # how the devices are used, if there is a choice
    priced: Candidate | None = None  # if it is a strategy of configurations
    stages: tuple[PipelineStage, ...] = ()
    searched: SearchResult | None = None

    @property
    def strategy(self) -> Mapping[str, Config] | None:
        """The configuration of every layer but inputs and sink, or None."""
        if self.priced is None:
            return None
        return {layer.name: self.priced.strategy[layer.name] for layer in self.priced.model.graph.inner}

    @property
    def kind(self) -> str:
        """The usual name of the same strategy: one device is serial, and a search may find a named strategy."""
        if self.projection.devices == 1:
            return "serial"
        if self.projection.strategy == "grid" and self.projection.groups[1] == 1:
            return "data"
        name = self.searched.best.name if self.searched else ""
        return name if name in NAMES else self.projection.strategy

    def epoch_s(self, samples: int) -> float:
        """Seconds an epoch, with overlap."""
        return self.overlapped_s * samples / self.projection.batch


class Oracle:
    """Answers questions about one model on one machine; models and prices are computed once for each p."""

    def __init__(self, question: Question) -> None:
        self.question = question
        self._models: dict[int, CostModel] = {}
        self._groups: dict[tuple[int, int], CostModel] = {}  # for single groups, by their devices and batch
        self._plans: dict[tuple[str, int], tuple[Shape, dict[str, Config]]] = {}

    def model(self, devices: int) -> CostModel:
        """The cost model for this many devices at their batch."""
        if devices not in self._models:
            q, options = self.question, self.question.options
            graph = q.graph.rebatch(q.batch_at(devices))
            if options.io == "auto" and graph.batch >= devices:  # feeding and returning samples costs no time
                options = replace(options, io="free")
            self._models[devices] = CostModel(graph, q.profile.device_graph(devices, q.gpus_per_node), options)
        return self._models[devices]

    @cached_property
    def node(self) -> int:
        """The number of devices of a node."""
        return self.question.gpus_per_node or self.question.profile.gpus_per_node

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes that a plan may use of a device's memory, as in `layerwise search`."""
        return self.model(1).devices.usable_bytes

    @cached_property
    def sizes(self) -> Sizes:
        """The network on one device, at that device's batch."""
        return sizes_of(self.model(1).graph, self.answer("serial", 1).projection.phases.compute_s)

    def limit(self, name: str, devices: int) -> Limit:
        """The most devices that a strategy can use, with the batch of `devices`."""
        return limit(self.model(devices).graph, name, self.node, self.question.wishes)

    def shapes(self, name: str, devices: int) -> list[Shape]:
        """The ways in which a strategy can use this many devices. Raises UnreachableError."""
        return shapes(self.model(devices).graph, name, devices, self.node, self.question.wishes)

    def answer(self, name: str, devices: int) -> Answer:
        """The answer of the cost tables; for a pipeline, that of a simulation of stages that they price.

        Raises UnreachableError if the strategy cannot use this many devices.
        """
        model, q = self.model(devices), self.question
        if name != "serial":  # its time of a sample is the basis of speed-ups
            q.check_batch(devices)
        if name == "pipeline":
            (shape,), segments = self.shapes(name, devices), q.segments_at(devices)
            stages = pipeline_stages(model, devices, segments)
            phases = pipeline_phases(stages, segments, model.devices)
            step_s = pipelined_s(stages, segments, model.devices)
            return self._answer(name, shape, phases, step_s, segments, stages=stages)
        found: SearchResult | None = None
        if name == "layerwise":
            # with statistics, gradients and memory like every other strategy
            space = SearchSpace(devices, spread=model.devices.nodes > 1)
            limit_bytes = min(q.memory_limit_bytes or self.usable_bytes, self.usable_bytes)
            found = search(model, space, memory_limit_bytes=limit_bytes)
            shape, priced = Shape(1, devices), found.best
        else:
            shape, plan = self._plan(name, devices)
            priced = candidate(model, name, plan, self.usable_bytes, best_cap(model, complete(model, plan)))
        phases = phases_of(model, priced.strategy)
        return self._answer(name, shape, phases, priced.timeline.total_s, priced=priced, searched=found)

    def _answer(
        self, name: str, shape: Shape, phases: Phases, overlapped_s: float, segments: int = 1, **origin: Any
    ) -> Answer:
        devices, groups = shape.devices, (shape.groups, shape.inside)
        batch, most = self.question.batch_at(devices), self.limit(name, devices)
        projection = Projection(name, devices, groups, segments, batch, phases, most)
        return Answer(projection, overlapped_s, phases.memory_bytes <= self.usable_bytes, shape, **origin)

    def learn(self, names: Sequence[str], devices: int) -> None:
        """Prices these strategies together, which is faster than one after the other in `answer`.

        Only those that the tables price, and that can use this many devices.
        """
        plans = list[dict[str, Config]]()
        for name in names:
            if name not in ("pipeline", "layerwise"):
                with suppress(UnreachableError):
                    plans.append(self._plan(name, devices)[1])
        _learn(self.model(devices), plans)

    def _plan(self, name: str, devices: int) -> tuple[Shape, dict[str, Config]]:
        """The cheapest of a strategy's shapes by the tables, with every layer's configuration.

        The exchange between groups is the same for all their grids, so a single group is priced if it is in a node;
        process grids differ in everything.
        """
        if (name, devices) not in self._plans:
            model, found = self.model(devices), self.shapes(name, devices)
            best, groups, inside = found[0], found[0].groups, found[0].inside
            if len(found) > 1:
                priced, shapes = model, found
                if name != "grid" and groups > 1 and model.devices.levels[0].devices % inside == 0:
                    priced, shapes = self._group(model, groups, inside), [replace(shape, groups=1) for shape in found]
                seconds = _learn(priced, [strategy(priced.graph, name, shape) for shape in shapes])
                best = found[seconds.index(min(seconds))]
            self._plans[name, devices] = best, strategy(model.graph, name, best)
        return self._plans[name, devices]

    def _group(self, model: CostModel, groups: int, inside: int) -> CostModel:
        """Returns the cost model of a single group in a node, shared by groups on any number of devices."""
        batch = max(1, model.graph.batch // groups)
        if (inside, batch) not in self._groups:
            level = replace(model.devices.levels[0], devices=inside, devices_per_port=1)
            alone = replace(model.devices, count=inside, levels=(level,))
            self._groups[inside, batch] = CostModel(model.original.rebatch(batch), alone, model.options)
        return self._groups[inside, batch]

    def findings(self, answer: Answer) -> list[Finding]:
        """The limits and bottlenecks of an answer, most costly first; none for a searched plan."""
        p = answer.projection
        if p.strategy == "layerwise":
            return []
        exposed_s = None if answer.priced is None else answer.priced.timeline.exposed_sync_s
        return findings(p, self.sizes, self.model(p.devices).devices, answer.stages, exposed_s)


def _learn(model: CostModel, plans: Sequence[Mapping[str, Config]]) -> list[float]:
    """The seconds of equation 1 of plans, which are priced together."""
    every = [complete(model, plan) for plan in plans]
    model.learn(every)
    return [model.step_s(plan) for plan in every]
