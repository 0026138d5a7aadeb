"""Questions to the oracle, and its answers: one for each strategy and number of devices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from layerwise.cache import Answers
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions, Progress
from layerwise.cost.price import complete
from layerwise.cost.timeline.simulate import Timeline
from layerwise.errors import LayerwiseError, nearest
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import Profile
from layerwise.oracle.limits import Finding, Sizes, findings, sizes_of
from layerwise.oracle.pipeline import PipelineStage, pipeline_phases, pipeline_stages, pipelined_s
from layerwise.oracle.strategies import (
    Limit,
    Shape,
    UnreachableError,
    Wishes,
    is_mlp,
    limit,
    shapes,
    strategy,
    weighted,
)
from layerwise.oracle.tables import (
    STRATEGIES,
    TITLES,
    LayerGroups,
    Phases,
    Priced,
    Projection,
    price_plan,
    priced_as_json,
    read_priced,
)
from layerwise.search.find import search
from layerwise.search.recall import Recall
from layerwise.search.result import SearchResult

NAMES = (*STRATEGIES, "grid", "layerwise")
ALIASES = {long: short for short, long in TITLES.items()}  # the names that the tables print
Scaling = Literal["weak", "strong"]


@dataclass(frozen=True, slots=True)
class Question:
    """A model on a machine."""

    graph: LayerGraph  # fused, at any batch
    profile: Profile
    batch: int  # samples a device (weak scaling), or samples a step (strong scaling)
    scaling: Scaling = "weak"  # the batch of a step grows with the devices; strong: it stays
    gpus_per_node: int | None = None
    segments: int | None = None  # of a pipelined batch, at most; None: four a stage, which hides the bubble (GPipe)
    wishes: Wishes = field(default_factory=Wishes)
    options: CostOptions = field(default_factory=lambda: CostOptions(io="free"))
    memory_limit_bytes: float | None = None  # of a device, for plans that are searched; at most what a plan may take

    def batch_at(self, devices: int) -> int:
        """Samples a step of all devices together."""
        return self.batch * devices if self.scaling == "weak" else self.batch

    def segments_at(self, devices: int) -> int:
        """Segments of a pipeline of so many stages."""
        wanted = self.segments or (4 * devices if devices > 1 else 1)
        return min(wanted, self.batch_at(devices))


@dataclass(frozen=True, slots=True)
class Answer:
    """The cost of a strategy on a number of devices."""

    projection: Projection
    overlapped_s: float  # an iteration, gradients beside the backward pass; the phases' sum where nothing is simulated
    fits: bool  # within what a plan may take of a device's memory, as layerwise.run uses it
    shape: Shape | None = None  # how the devices are used, where there is a choice
    priced: Priced | None = None  # where it is a strategy of configurations
    stages: tuple[PipelineStage, ...] = ()
    searched: SearchResult | None = None

    @property
    def strategy(self) -> Mapping[str, Config] | None:
        """The configuration of every layer."""
        return None if self.priced is None else self.priced.strategy

    @property
    def kind(self) -> str:
        """The strategy, by the name that it has elsewhere: of a search without gain, of a grid of samples only, and of
        anything on one device.
        """
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
    """Answers questions about one model on one machine; models and prices are made once for each p."""

    def __init__(self, question: Question, answers: Answers | None = None) -> None:
        """answers: of earlier runs, which are used and kept (`layerwise.cache`)."""
        self.question, self._answers = question, answers
        self._models: dict[int, CostModel] = {}
        self._groups = LayerGroups()
        self._plans: dict[tuple[int, tuple[tuple[str, Config], ...], Timeline | None], Priced] = {}
        self._known: dict[tuple[str, int], Priced] = {}  # of the tables

    def model(self, devices: int) -> CostModel:
        """The cost model of so many devices at their batch."""
        if devices not in self._models:
            q = self.question
            graph = q.graph.rebatch(q.batch_at(devices))
            self._models[devices] = CostModel(graph, q.profile.device_graph(devices, q.gpus_per_node), q.options)
        return self._models[devices]

    @cached_property
    def node(self) -> int:
        """The number of devices of a node."""
        return self.question.gpus_per_node or self.question.profile.gpus_per_node

    @cached_property
    def usable_bytes(self) -> float:
        """Bytes that a plan may take of a device's memory, as `layerwise search` has it."""
        return self.model(1).devices.usable_bytes

    def limit(self, name: str, devices: int) -> Limit:
        """The most devices that a strategy can use, with the batch that `devices` have."""
        return limit(self.model(devices).graph, name, self.node, self.question.wishes)

    def shapes(self, name: str, devices: int) -> list[Shape]:
        """The ways in which a strategy can use so many devices. Raises UnreachableError."""
        return shapes(self.model(devices).graph, name, devices, self.node, self.question.wishes)

    @cached_property
    def sizes(self) -> Sizes:
        """The network on one device, at that device's batch."""
        return sizes_of(self.model(1).graph, self.answer("serial", 1).projection.phases.compute_s)

    def answer(self, name: str, devices: int, progress: Progress | None = None) -> Answer:
        """The answer of the cost tables; of a pipeline, that of a simulation of stages that they price.

        Raises UnreachableError where the strategy cannot use so many devices.
        """
        model, q = self.model(devices), self.question
        if name == "layerwise":
            # With statistics, gradients and memory as every other strategy has them.
            space = SearchSpace(devices, spread=model.devices.nodes > 1)
            limit_bytes = min(q.memory_limit_bytes or self.usable_bytes, self.usable_bytes)
            result = search(model, space, memory_limit_bytes=limit_bytes, progress=progress, answers=self._answers)
            inner = {layer.name: result.best.strategy[layer.name] for layer in model.graph.inner}
            return self._answer(name, self._priced(model, Shape(1, devices), inner, result.best.timeline), result)
        if name == "pipeline":
            return self._pipeline(devices)
        if (name, devices) not in self._known:
            self._known[name, devices] = self._priced(model, *self._plan(name, devices))
        return self._answer(name, self._known[name, devices], None)

    def learn(self, names: Sequence[str], devices: int) -> None:
        """Prices these strategies together, before `answer` is asked for each: that is faster. Or an earlier run did.

        Only those that the tables price, and that can use so many devices.
        """
        q, model = self.question, self.model(devices)
        wanted = [name for name in names if name not in ("pipeline", "layerwise")]
        priced = Recall(self._answers, model).recalled(
            (wanted, q.wishes, self.node),
            lambda: self._learned(wanted, devices),
            priced_as_json,
            lambda cached: read_priced(model, cached),
        )
        for name, known in priced.items():
            self._known[name, devices] = known
            self._plans.setdefault((devices, tuple(known.strategy.items()), None), known)

    def _learned(self, names: Sequence[str], devices: int) -> dict[str, Priced]:
        model, plans = self.model(devices), dict[str, tuple[Shape, dict[str, Config]]]()
        for name in names:
            with suppress(UnreachableError):
                plans[name] = self._plan(name, devices)
        model.learn([complete(model, plan) for _, plan in plans.values()])
        return {name: self._priced(model, *plan) for name, plan in plans.items()}

    def _plan(self, name: str, devices: int) -> tuple[Shape, dict[str, Config]]:
        """The best shape by the tables, and every layer's configuration."""
        model = self.model(devices)
        shape = self._groups.best(model, name, self.shapes(name, devices))
        return shape, strategy(model.graph, name, shape)

    def findings(self, answer: Answer) -> list[Finding]:
        """The limits and bottlenecks of an answer, the costliest first; none of a searched plan."""
        p = answer.projection
        if p.strategy == "layerwise":
            return []
        exposed_s = None if answer.priced is None else answer.priced.exposed_s
        return findings(p, self.sizes, self.model(p.devices).devices, answer.stages, exposed_s)

    def _projection(self, name: str, devices: int, shape: Shape, phases: Phases, segments: int = 1) -> Projection:
        batch, most = self.question.batch_at(devices), self.limit(name, devices)
        return Projection(name, devices, (shape.groups, shape.inside), segments, batch, phases, most)

    def _priced(
        self, model: CostModel, shape: Shape, plan: Mapping[str, Config], step: Timeline | None = None
    ) -> Priced:
        """A plan's price; several strategies may be the same plan, as all are on one device."""
        key = model.devices.count, tuple(plan.items()), step
        if key not in self._plans:
            self._plans[key] = price_plan(model, shape, plan, step)
        return replace(self._plans[key], shape=shape)

    def _answer(self, name: str, result: Priced, searched: SearchResult | None) -> Answer:
        shape, memory = result.shape, result.phases.memory_bytes
        projection = self._projection(name, shape.devices, shape, result.phases)
        return Answer(projection, result.overlapped_s, memory <= self.usable_bytes, shape, result, (), searched)

    def _pipeline(self, devices: int) -> Answer:
        model, segments = self.model(devices), self.question.segments_at(devices)
        (shape,) = self.shapes("pipeline", devices)
        staged = pipeline_stages(model, devices, segments)
        phases = pipeline_phases(staged, segments, model.devices)
        projection = self._projection("pipeline", devices, shape, phases, segments)
        overlapped_s = pipelined_s(staged, segments, model.devices)
        return Answer(projection, overlapped_s, phases.memory_bytes <= self.usable_bytes, shape, None, staged)


def applicable(graph: LayerGraph, node: int) -> tuple[str, ...]:
    """The strategies that mean anything for a model: no spatial ones for one without positions."""
    without = set[str]() if is_mlp(graph) else {"grid"}
    if limit(graph, "spatial", node).devices == 1:
        without |= {"spatial", "ds"}
    if len(weighted(graph)) < 2:
        without |= {"filter", "channel", "df"}
    return tuple(name for name in NAMES if name not in without)


def unknown(name: str) -> LayerwiseError:
    """The error for the name of a strategy that is none."""
    return LayerwiseError(f"unknown strategy {name!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}")


def canonical(name: str) -> str:
    """A strategy by its short name: `data+filter` is `df`."""
    return ALIASES.get(name, name)
