"""The third column: a strategy priced by the cost tables that search uses, as phases of an iteration."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import cached_property
from typing import Any

from layerwise.cache import restored
from layerwise.config import Config
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, EdgeName, Strategy
from layerwise.cost.price import Price, complete, model_error, price
from layerwise.cost.terms import COMPUTE, LAYER_TERMS
from layerwise.cost.timeline.simulate import Timeline, timeline
from layerwise.oracle.strategies import SPATIAL, Limit, Shape, strategy

STRATEGIES = ("serial", "data", "spatial", "filter", "channel", "pipeline", "df", "ds")
PHASES: Mapping[str, str] = {  # what people call them
    "compute_s": "compute",
    "update_s": "update",
    "gather_s": "gather",
    "reduce_s": "reduce",  # batch norm's all-reduces included
    "halo_s": "halo",
    "passing_s": "passing",
    "gradient_s": "gradients",
}
TITLES: Mapping[str, str] = {"df": "data+filter", "ds": "data+spatial"}  # names that are longer in text


def title(name: str) -> str:
    """`data+filter` for `df`."""
    return TITLES.get(name, name)


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds an iteration by phase, of the slowest device, and bytes of memory of the fullest one."""

    compute_s: float = 0.0  # forward and backward
    update_s: float = 0.0  # the optimizer, and adding up the gradients of a pipeline's segments
    gather_s: float = 0.0  # a layer's own all-gather of activations and their gradients
    reduce_s: float = 0.0  # and its all-reduce or reduce-scatter of them
    halo_s: float = 0.0  # borders of spatial cells
    passing_s: float = 0.0  # activations and gradients from one pipeline stage to the next
    gradient_s: float = 0.0  # all-reduce of the weights' gradients
    memory_bytes: float = 0.0

    @property
    def communication_s(self) -> float:
        """All that is sent, in s."""
        return self.gather_s + self.reduce_s + self.halo_s + self.passing_s + self.gradient_s

    @property
    def computation_s(self) -> float:
        """All that is computed, in s."""
        return self.compute_s + self.update_s

    @property
    def total_s(self) -> float:
        """Seconds an iteration: the phases one after the other."""
        return self.computation_s + self.communication_s

    def times(self, factor: float) -> Phases:
        """Every time multiplied: by the iterations of an epoch, it is the times of an epoch. Memory stays."""
        times = {f.name: factor * getattr(self, f.name) for f in fields(self) if f.name.endswith("_s")}
        return replace(self, **times)


@dataclass(frozen=True, slots=True)
class Projection:
    """The cost of one strategy on a number of devices."""

    strategy: str
    devices: int
    groups: tuple[int, int]  # p1 data-parallel groups of p2 devices each
    segments: int  # of a pipelined batch, else 1
    batch: int  # samples an iteration, of all devices together
    phases: Phases
    limit: Limit  # of the strategy, with this batch


TIMES = ("overlapped_s", "exposed_s", "statistics_s")


@dataclass(frozen=True)
class Priced:
    """A strategy by the tables."""

    model: CostModel
    shape: Shape
    strategy: Mapping[str, Config]
    phases: Phases
    overlapped_s: float  # an iteration with gradients travelling beside the backward pass
    exposed_s: float  # of the gradient exchange, what is left after the backward pass
    statistics_s: float  # batch norm over the whole batch, which is part of the phases' `reduce_s`

    @cached_property
    def price(self) -> Price:
        """The price by layer and with its bytes, which phases do not have: made where it is asked for."""
        return price(self.model, self.strategy, memory_bytes=self.phases.memory_bytes)

    @cached_property
    def error(self) -> float:
        """The model's, of its step's time (`cost.price.model_error`)."""
        return model_error(self.model, complete(self.model, self.strategy))


def priced_as_json(found: Mapping[str, Priced]) -> object:
    """Strategies by name, for `read_priced`."""
    return {
        name: {"shape": asdict(p.shape), "phases": asdict(p.phases), **{time: getattr(p, time) for time in TIMES}}
        for name, p in found.items()
    }


def read_priced(model: CostModel, cached: Any) -> dict[str, Priced]:
    """The prices of an earlier run."""
    found = dict[str, Priced]()
    for name, one in cached.items():
        shape, phases = restored(Shape, one["shape"]), restored(Phases, one["phases"])
        times = (restored(float, one[time]) for time in TIMES)
        found[name] = Priced(model, shape, strategy(model.graph, name, shape), phases, *times)
    return found


class LayerGroups:
    """The best grid of a group of devices. Groups of any number of devices have it in common, at their batch."""

    def __init__(self) -> None:
        self._models: dict[tuple[int, int], CostModel] = {}  # of one group alone, by its devices and batch
        self._best: dict[tuple[int, int, int, str, tuple[Shape, ...]], int] = {}

    def best(self, model: CostModel, name: str, shapes: Sequence[Shape]) -> Shape:
        """The cheapest of a strategy's shapes, which differ in the grid inside a group; process grids in all."""
        if len(shapes) == 1:
            return shapes[0]
        if name == "grid":
            return shapes[_cheapest(model, [strategy(model.graph, name, shape) for shape in shapes])]
        groups, inside = shapes[0].groups, shapes[0].inside
        alone = model if groups == 1 or model.devices.levels[0].devices % inside else self._alone(model, groups, inside)
        if alone is not model:  # what groups exchange is the same for all their grids
            groups = 1
        key = (inside, alone.graph.batch, groups, name, tuple(shapes))
        if key not in self._best:
            plans = [strategy(alone.graph, name, replace(shape, groups=groups)) for shape in shapes]
            self._best[key] = _cheapest(alone, plans)
        return shapes[self._best[key]]

    def _alone(self, model: CostModel, groups: int, inside: int) -> CostModel:
        """One group by itself, in a node."""
        batch = max(1, model.graph.batch // groups)
        if (inside, batch) not in self._models:
            level = replace(model.devices.levels[0], devices=inside, devices_per_port=1)
            alone = replace(model.devices, count=inside, levels=(level,))
            self._models[inside, batch] = CostModel(model.original.rebatch(batch), alone, model.options)
        return self._models[inside, batch]


def _cheapest(model: CostModel, plans: Sequence[Strategy]) -> int:
    """The first of the plans with the least step time of equation 1."""
    model.learn([complete(model, plan) for plan in plans])
    seconds = [phases_of(model, plan, 0.0)[0].total_s for plan in plans]
    return seconds.index(min(seconds))


def price_plan(model: CostModel, shape: Shape, plan: Strategy, step: Timeline | None = None) -> Priced:
    """Any strategy, a searched one too. step: its simulated step, where that is known."""
    phases, statistics_s = phases_of(model, plan, memory_bytes(model, plan))
    step = step or timeline(model, plan)
    return Priced(model, shape, dict(plan), phases, step.total_s, step.exposed_sync_s, statistics_s)


def memory_bytes(model: CostModel, plan: Strategy) -> float:
    """Bytes of the fullest device, as `layerwise.run` uses memory.

    Input and output cost no time with io free; memory has a device's share of the samples, where there is one for each:
    nobody would hold the batch of a thousand devices on every one.
    """
    fed = model.once("fed", lambda: _fed(model))
    return float(peak_bytes(fed, complete(fed, plan)).max())


def _fed(model: CostModel) -> CostModel:
    if model.graph.batch < model.devices.count:
        return model
    return CostModel(model.original, model.devices, replace(model.options, io="sample"))


def phases_of(model: CostModel, plan: Strategy, memory_bytes: float) -> tuple[Phases, float]:
    """The step time of equation 1 by phase, and the seconds of batch norm statistics in it."""
    plan = complete(model, plan)
    seconds_of = dict.fromkeys(("compute_s", "update_s", "gather_s", "reduce_s", "halo_s", "gradient_s"), 0.0)
    statistics_s = 0.0
    for layer in model.graph.layers:
        config = plan[layer.name]
        cost = model.node_cost(layer, (config,))
        seconds_of["compute_s"] += float(cost.seconds[COMPUTE.name][0] - cost.compute.update[0])
        seconds_of["update_s"] += float(cost.compute.update[0])
        statistics_s += float(cost.seconds["statistics"][0])
        for phase in seconds_of:
            shares = [(term.phases[phase], cost.seconds[term.name]) for term in LAYER_TERMS if phase in term.phases]
            seconds_of[phase] += sum(share * float(seconds[0]) for share, seconds in shares)
        for slot, source in enumerate(layer.inputs):
            edge, ends = (source, layer.name, slot), ((plan[source],), (config,))
            times = model.directions(edge)
            if times == 0:
                continue
            seconds = float(model.edge_cost(edge, *ends)[0, 0])
            if is_halo(plan[source], config):
                seconds_of["halo_s"] += seconds
            elif times == 2 and is_replicating(model, edge, plan[source], config):
                back_s = seconds / (times + config.recompute)
                seconds_of["gather_s"] += seconds - back_s
                seconds_of["reduce_s"] += back_s  # its adjoint adds what came back
            else:
                seconds_of["gather_s"] += seconds
    return Phases(memory_bytes=memory_bytes, **seconds_of), statistics_s


def is_halo(source: Config, target: Config) -> bool:
    """True if two layers are cut alike in space: then neighbours exchange borders only."""
    cut = [(label, degree) for label, degree in target.degrees if label in SPATIAL]
    return bool(cut) and source.total == target.total and all(source[label] == degree for label, degree in cut)


def is_replicating(model: CostModel, name: EdgeName, source: Config, target: Config) -> bool:
    """True if an edge takes elements to several devices each (an all-gather), so that its adjoint has to add."""
    edge = model.edge(name, (source,), (target,))
    return bool(edge.needed_volume[0] > edge.volume)
