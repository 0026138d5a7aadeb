"""Phases: a strategy priced by the search's cost tables, as phases of an iteration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from layerwise.config import Config
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, EdgeName, Strategy
from layerwise.cost.price import complete
from layerwise.cost.terms import COMPUTE, LAYER_TERMS
from layerwise.oracle.strategies import SPATIAL, Limit


@dataclass(frozen=True, slots=True)
class Phases:
    """Seconds an iteration by phase, on the slowest device, and memory bytes of the fullest one."""

    compute_s: float = 0.0  # forward and backward
    update_s: float = 0.0  # the optimizer, and adding up the gradients of a pipeline's segments
    gather_s: float = 0.0  # a layer's own all-gather of activations and their gradients
    reduce_s: float = 0.0  # a layer's own all-reduce or reduce-scatter of them; batch norm's all-reduces
    halo_s: float = 0.0  # borders of spatial cells
    passing_s: float = 0.0  # activations and gradients from one pipeline stage to the next
    gradient_s: float = 0.0  # all-reduce of the weights' gradients
    memory_bytes: float = 0.0
    statistics_s: float = 0.0  # batch norm over the full batch, which is part of `reduce_s`

    @property
    def communication_s(self) -> float:
        """Seconds of everything that is sent."""
        return self.gather_s + self.reduce_s + self.halo_s + self.passing_s + self.gradient_s

    @property
    def computation_s(self) -> float:
        """Seconds of everything that is computed."""
        return self.compute_s + self.update_s

    @property
    def total_s(self) -> float:
        """Seconds an iteration: the sum of the phases."""
        return self.computation_s + self.communication_s

    def times(self, factor: float) -> Phases:
        """Every time multiplied, for example by the iterations of an epoch. Memory stays."""
        return replace(self, **{name: factor * getattr(self, name) for name in (*PHASES, "statistics_s")})


PHASES: Mapping[str, str] = {  # the times that `total_s` adds up, and their names in reports
    **{f"{name}_s": name for name in ("compute", "update", "gather", "reduce", "halo", "passing")},
    "gradient_s": "gradients",
}


@dataclass(frozen=True, slots=True)
class Projection:
    """The cost of one strategy on a number of devices."""

    strategy: str
    devices: int
    groups: tuple[int, int]  # p1 data-parallel groups of p2 devices each
    segments: int  # in a pipelined batch, else 1
    batch: int  # samples an iteration, of all devices together
    phases: Phases
    limit: Limit  # of the strategy, with this batch


def phases_of(model: CostModel, plan: Strategy) -> Phases:
    """The step time of equation 1 by phase, and the memory."""
    plan = complete(model, plan)
    seconds_of = dict.fromkeys((*PHASES, "statistics_s"), 0.0)
    for layer in model.graph.layers:
        config = plan[layer.name]
        cost = model.node_cost(layer, (config,))
        seconds_of["compute_s"] += float(cost.seconds[COMPUTE.name][0] - cost.compute.update[0])
        seconds_of["update_s"] += float(cost.compute.update[0])
        seconds_of["statistics_s"] += float(cost.seconds["statistics"][0])
        for phase in PHASES:
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
                continue
            adds = times == 2 and is_replicating(model, edge, plan[source], config)
            back_s = seconds / (times + config.recompute) if adds else 0.0
            seconds_of["gather_s"] += seconds - back_s
            seconds_of["reduce_s"] += back_s  # its adjoint adds up what comes back
    return Phases(**seconds_of, memory_bytes=memory_bytes(model, plan))


def memory_bytes(model: CostModel, plan: Strategy) -> float:
    """Bytes of the fullest device, as `layerwise.run` uses memory.

    With io free, inputs and outputs cost no time; memory counts a device's part of the samples, if there is one for
    each.
    """

    def fed() -> CostModel:
        return CostModel(model.original, model.devices, replace(model.options, io="sample"))

    few = model.graph.batch < model.devices.count or model.options.io != "free"
    holding = model if few else model.once("fed", fed)
    return float(peak_bytes(holding, complete(holding, plan)).max())


def is_halo(source: Config, target: Config) -> bool:
    """True if two layers are split alike in space, so that neighbours exchange borders only."""
    cut = [(label, degree) for label, degree in target.degrees if label in SPATIAL]
    return bool(cut) and source.total == target.total and all(source[label] == degree for label, degree in cut)


def is_replicating(model: CostModel, name: EdgeName, source: Config, target: Config) -> bool:
    """True if an edge sends elements to several devices each (an all-gather), so that its adjoint must add up."""
    edge = model.edge(name, (source,), (target,))
    return bool(edge.needed_volume[0] > edge.volume)
