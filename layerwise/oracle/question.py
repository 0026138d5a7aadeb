"""What the oracle is asked, and its answers: one for each strategy and number of devices."""

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
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.machine import Profile
from layerwise.oracle.formulas.chainermnx import NOT_RUN, not_run
from layerwise.oracle.formulas.facts import Facts, facts_of
from layerwise.oracle.formulas.memory import reuse_factor
from layerwise.oracle.formulas.phases import STRATEGIES, TITLES, Formulas, Phases, Projection
from layerwise.oracle.formulas.pipeline import PipelineStage, pipeline_phases, pipeline_stages, pipelined_s
from layerwise.oracle.formulas.project import case_of, project
from layerwise.oracle.framework import Framework
from layerwise.oracle.limits import Finding, findings
from layerwise.oracle.recall import Recall
from layerwise.oracle.strategies import Limit, Shape, UnreachableError, Wishes, limit, shapes, strategy, weighted
from layerwise.oracle.tables import Groups, Priced, memory_bytes, price_plan
from layerwise.plan import nearest
from layerwise.search.find import search
from layerwise.search.result import SearchResult

NAMES = (*STRATEGIES, "layerwise")
ALIASES = {long: short for short, long in TITLES.items()}  # the names that the tables print
Scaling = Literal["weak", "strong"]
Pricing = Literal["tables", Formulas]


@dataclass(frozen=True, slots=True)
class Question:
    """A model on a machine."""

    graph: LayerGraph  # fused (but for `chainermnx`, which fuses nothing), at any batch
    profile: Profile
    batch: int  # samples a device (weak scaling), or samples a step (strong scaling)
    scaling: Scaling = "weak"  # the batch of a step grows with the devices; strong: it stays
    gpus_per_node: int | None = None
    segments: int | None = None  # of a pipelined batch, at most; None: four a stage, which hides the bubble (GPipe)
    wishes: Wishes = field(default_factory=Wishes)
    options: CostOptions = field(default_factory=lambda: CostOptions(io="free"))
    formulas: Pricing = "tables"
    memory_limit_bytes: float | None = None  # of a device, for plans that are searched; at most what a plan may take
    gamma: float | None = None  # of the memory that closed forms count, the share that is used; None: see `Answer.fits`
    framework: Framework | None = None  # of `chainermnx`
    seconds_per_sample: float | None = None  # that one device was measured to take

    def batch_at(self, devices: int) -> int:
        """Samples a step of all devices together."""
        return self.batch * devices if self.scaling == "weak" else self.batch

    def segments_at(self, devices: int) -> int:
        """Segments of a pipeline of so many stages."""
        wanted = self.segments or (4 * devices if devices > 1 else 1)
        return min(wanted, self.batch_at(devices))


@dataclass(frozen=True, slots=True)
class Answer:
    """What a strategy costs on a number of devices."""

    projection: Projection
    overlapped_s: float  # an iteration, gradients beside the backward pass; the phases' sum where nothing is simulated
    # Within what a plan may take of a device's memory: by the cost tables, as layerwise.run uses it; by a closed form
    # where a gamma is given.
    fits: bool
    shape: Shape | None = None  # how the devices are used, where there is a choice
    gamma: float | None = None  # the memory over what the published formula counts
    priced: Priced | None = None  # where it is a strategy of configurations
    stages: tuple[PipelineStage, ...] = ()
    searched: SearchResult | None = None
    formulas: Pricing = "tables"  # that priced it; times of different formulas are not to be compared

    @property
    def strategy(self) -> Mapping[str, Config] | None:
        """The configuration of every layer."""
        return None if self.priced is None else self.priced.strategy

    @property
    def kind(self) -> str:
        """The strategy, by the name that it has elsewhere: of a search without gain, and of anything on one device."""
        if self.projection.devices == 1:
            return "serial"
        name = self.searched.best.name if self.searched else ""
        return name if name in NAMES else self.projection.strategy

    def epoch_s(self, samples: int) -> float:
        """Seconds an epoch, with overlap."""
        return self.overlapped_s * samples / self.projection.batch


class Oracle:
    """Answers questions about one model on one machine; models and prices are made once for each p."""

    def __init__(self, question: Question, answers: Answers | None = None) -> None:
        """answers: of earlier runs, which are used and kept (`layerwise.cache`)."""
        self.question, self._answers, self._recall = question, answers, Recall(answers, question.graph)
        self._models: dict[int, CostModel] = {}
        self._facts: dict[int, Facts] = {}
        self._groups = Groups()
        self._plans: dict[tuple[int, tuple[tuple[str, Config], ...]], Priced] = {}
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
        """Devices a node."""
        return self.question.gpus_per_node or self.question.profile.gpus_per_node

    @cached_property
    def usable_bytes(self) -> float:
        """What a plan may take of a device's memory, as `layerwise search` has it."""
        return self.model(1).devices.usable_bytes

    def limit(self, name: str, devices: int) -> Limit:
        """The most devices that a strategy can use, with the batch that `devices` have."""
        return limit(self.model(devices).graph, name, self.node, self.question.wishes)

    def shapes(self, name: str, devices: int) -> list[Shape]:
        """How a strategy can use so many devices. Raises UnreachableError."""
        return shapes(self.model(devices).graph, name, devices, self.node, self.question.wishes)

    @property
    def facts(self) -> Facts:
        """What the closed forms know, at the batch of one device."""
        return self._facts_at(self.question.batch)

    def _facts_at(self, batch: int) -> Facts:
        if batch not in self._facts:
            q = self.question
            self._facts[batch] = facts_of(
                q.graph.rebatch(batch), q.profile, options=q.options, seconds_per_sample=q.seconds_per_sample
            )
        return self._facts[batch]

    def answer(self, name: str, devices: int, progress: Progress | None = None) -> Answer:
        """What the question's formulas say; of a searched plan, always the cost tables.

        Raises UnreachableError where the strategy cannot use so many devices.
        """
        model, q = self.model(devices), self.question
        if q.formulas == "chainermnx" and name in NOT_RUN:
            raise not_run(name)
        if name == "layerwise":
            # With statistics, gradients and memory as every other strategy has them.
            space = SearchSpace(devices, spread=model.devices.nodes > 1)
            limit_bytes = min(q.memory_limit_bytes or self.usable_bytes, self.usable_bytes)
            result = search(model, space, memory_limit_bytes=limit_bytes, progress=progress, answers=self._answers)
            inner = {layer.name: result.best.strategy[layer.name] for layer in model.graph.inner}
            return self._answer(name, self._priced(model, Shape(1, devices), inner, result.best.timeline), result)
        if q.formulas != "tables":
            return self._closed(name, devices, q.formulas)
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
        if q.formulas != "tables":
            return
        wanted = [name for name in names if name not in ("pipeline", "layerwise")]
        facts = wanted, q.wishes, self.node
        for name, known in self._recall.priced(model, facts, lambda: self._learned(wanted, devices)).items():
            self._known[name, devices] = known
            self._plans.setdefault((devices, tuple(known.strategy.items())), known)

    def _learned(self, names: Sequence[str], devices: int) -> dict[str, Priced]:
        model, plans = self.model(devices), dict[str, tuple[Shape, dict[str, Config]]]()
        for name in names:
            with suppress(UnreachableError):
                plans[name] = self._plan(name, devices)
        model.learn([complete(model, plan) for _, plan in plans.values()])
        return {name: self._priced(model, *plan) for name, plan in plans.items()}

    def _plan(self, name: str, devices: int) -> tuple[Shape, dict[str, Config]]:
        """Of the tables: the best shape, and every layer's configuration."""
        model = self.model(devices)
        shape = self._groups.best(model, name, self.shapes(name, devices))
        return shape, strategy(model.graph, name, shape)

    def gamma(self, answer: Answer, peak_bytes: float) -> float | None:
        """A measured peak of a device's memory over what the published formula counts; None for a searched plan."""
        name = answer.projection.strategy
        return None if answer.shape is None or name == "layerwise" else self._gamma(name, answer.shape, peak_bytes)

    def findings(self, answer: Answer) -> list[Finding]:
        """The limits and bottlenecks of an answer, the costliest first; none of a searched plan."""
        p = answer.projection
        if p.strategy == "layerwise":
            return []
        exposed_s = None if answer.priced is None else answer.priced.exposed_s
        return findings(p, self.facts, self.model(p.devices).devices, answer.stages, exposed_s)

    def _projection(self, name: str, devices: int, shape: Shape, phases: Phases, segments: int = 1) -> Projection:
        batch, most = self.question.batch_at(devices), self.limit(name, devices)
        return Projection(name, devices, (shape.groups, shape.inside), segments, batch, phases, most)

    def _priced(
        self, model: CostModel, shape: Shape, plan: Mapping[str, Config], step: Timeline | None = None
    ) -> Priced:
        """A plan's price; several strategies may be the same plan, as all are on one device."""
        key = model.devices.count, tuple(plan.items())
        if key not in self._plans:
            self._plans[key] = price_plan(model, shape, plan, step)
        return replace(self._plans[key], shape=shape)

    def _answer(self, name: str, result: Priced, searched: SearchResult | None) -> Answer:
        shape, memory = result.shape, result.phases.memory_bytes
        projection = self._projection(name, shape.devices, shape, result.phases)
        gamma = None if searched else self._gamma(name, shape, memory)
        return Answer(projection, result.overlapped_s, self._fits(memory), shape, gamma, result, (), searched)

    def _pipeline(self, devices: int) -> Answer:
        model, segments = self.model(devices), self.question.segments_at(devices)
        (shape,) = self.shapes("pipeline", devices)
        staged = pipeline_stages(model, devices, segments)
        phases = pipeline_phases(staged, segments, model.devices)
        projection = self._projection("pipeline", devices, shape, phases, segments)
        gamma = self._gamma("pipeline", shape, phases.memory_bytes)
        overlapped_s = pipelined_s(staged, segments, model.devices)
        return Answer(projection, overlapped_s, self._fits(phases.memory_bytes), shape, gamma, None, staged)

    def _closed(self, name: str, devices: int, formulas: Formulas) -> Answer:
        """The cheapest of the strategy's shapes."""
        q = self.question
        possible = self.shapes(name, devices)
        if formulas == "chainermnx":  # which cuts space in one dimension
            possible = [min(possible, key=lambda s: len(s.grid))]
        projected = [(shape, self._project(name, devices, shape, formulas, q.gamma or 1.0)) for shape in possible]
        shape, best = min(projected, key=lambda pair: pair[1].phases.total_s)
        staged = pipeline_stages(self.model(devices), devices, best.segments) if name == "pipeline" else ()
        if q.gamma is None:  # the forms count every tensor at once, and memory is used again
            if staged:
                memory = max(stage.memory_bytes for stage in staged)
            else:
                memory = memory_bytes(self.model(devices), strategy(self.model(devices).graph, name, shape))
            best = replace(best, phases=replace(best.phases, memory_bytes=memory))
        memory = best.phases.memory_bytes
        return Answer(
            best,
            best.phases.total_s,
            self._fits(memory),
            shape,
            self._gamma(name, shape, memory),
            stages=staged if formulas == "as-run" else (),  # whose stages are those of the cost tables
            formulas=formulas,
        )

    def _project(self, name: str, devices: int, shape: Shape, formulas: Formulas, gamma: float) -> Projection:
        q, batch = self.question, self.question.batch_at(devices)
        segments = q.segments_at(devices) if name == "pipeline" else None
        # A framework's time of one device is spread over the layers as they are at the batch of a group.
        facts = self._facts_at(max(1, batch // shape.groups)) if formulas == "chainermnx" else self.facts
        case = case_of(
            name, facts, devices, batch, segments=segments, wishes=q.wishes, shape=shape, gpus_per_node=q.gpus_per_node
        )
        return project(case, formulas, gamma=gamma, framework=q.framework)

    def _gamma(self, name: str, shape: Shape, memory: float) -> float:
        """A device's memory over what the published formula counts."""
        naive = self._project(name, shape.devices, shape, "published", 1.0)
        return reuse_factor(memory, naive.phases.memory_bytes)

    def _fits(self, memory: float) -> bool:
        return memory <= self.usable_bytes


def applicable(graph: LayerGraph, node: int, formulas: Pricing = "tables") -> tuple[str, ...]:
    """The strategies that mean anything for a model: no spatial ones for one without positions."""
    without: set[str] = set(NOT_RUN) if formulas == "chainermnx" else set()
    if limit(graph, "spatial", node).devices == 1:
        without |= {"spatial", "ds"}
    if len(weighted(graph)) < 2:
        without |= {"filter", "channel", "df"}
    return tuple(name for name in NAMES if name not in without)


def unknown(name: str) -> LayerwiseError:
    """For a strategy that is none."""
    return LayerwiseError(f"unknown strategy {name!r}{nearest(name, NAMES)}; there are {', '.join(NAMES)}")


def canonical(name: str) -> str:
    """A strategy by its short name: `data+filter` is `df`."""
    return ALIASES.get(name, name)
