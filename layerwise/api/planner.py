"""Planner: what the user asks for (nothing, a named strategy, layers by hand, a plan) becomes a plan, on rank 0."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

import torch

from layerwise.api.arguments import DEFAULT, ParallelOptions
from layerwise.api.world import World
from layerwise.config import Config, SearchSpace, is_legal
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.errors import LayerwiseError, nearest
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph, precision, reserved_bytes
from layerwise.machine.profile import Profile
from layerwise.plan import Plan
from layerwise.quantities import samples, units
from layerwise.report.content import Lines, Part, Report
from layerwise.search.baselines import NAMES, baseline, fixed_layers
from layerwise.search.find import candidate, search
from layerwise.search.make_plan import make_plan
from layerwise.search.priced.variants import OFFERS
from layerwise.search.remedies import remedies
from layerwise.search.report.sentences import nothing_fits, step_range, why_data
from layerwise.search.report.tables import strategy_table
from layerwise.search.result import Candidate, SearchResult
from layerwise.tensorfile import dtype_name

KNOWN = "or give a larger memory_limit= if a device has more"
Strategy = str | Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and what it is to be judged by: its own prediction and data parallelism's, under the same cost model."""

    plan: Plan
    best: Candidate
    data: Candidate  # data parallelism's
    searched: SearchResult | None  # None where the user has said how to split, if only in part
    notes: tuple[str, ...]  # what the user should know, a line each
    space: SearchSpace


@dataclass(frozen=True, slots=True)
class Request:
    """The demands on a plan."""

    name: str  # the model's
    memory_bytes: float  # a device's limit
    options: ParallelOptions = DEFAULT
    dtype: torch.dtype = torch.float32  # the model's
    autocast: torch.dtype | None = None  # mixed precision: the type of the torch.autocast around the model's calls
    inference: bool = False  # for the forward pass alone

    @property
    def precision(self) -> str:
        """Returns the element type that a step computes in."""
        return precision(dtype_name(self.autocast or self.dtype))


@dataclass(frozen=True, slots=True)
class Planner:
    """Plans a network for the ranks at hand. LayerwiseError where nothing fits into memory."""

    graph: LayerGraph  # at its batch; fused, unless a given plan is not
    world: World
    profile: Profile
    request: Request

    @property
    def options(self) -> CostOptions:
        """Returns the cost model's options: each rank feeds its own samples where there are enough.

        Else its boxes, where the model returns its loss; whole samples of an output are what a loop takes its loss of.
        """
        dtype, graph, asked = self.request.precision, self.graph, self.request.options
        kinds = self.profile.kinds or (self.profile.processor,)
        few = graph.batch < self.world.size
        rows = any(x not in graph.losses and graph[x].out.index("n") is not None for x in graph.layers[-1].inputs)
        return CostOptions(
            io=asked.io or ("free" if few and rows else "auto"),
            optimizer=asked.optimizer,
            dtype=dtype if all(dtype in kind.peak_flops for kind in kinds) else "float32",
            local_batch_norm=asked.local_batch_norm,
            kind="inference" if self.request.inference else "training",
        )

    @property
    def space(self) -> SearchSpace:
        """Returns the configurations that are searched."""
        return SearchSpace(self.world.size, spread=self.world.nodes > 1, replicas=self.world.replicas)

    @property
    def devices(self) -> DeviceGraph:
        """Returns the device graph of these ranks, with the memory that they really have."""
        return self._device_graph(self.world.size)

    def _device_graph(self, count: int) -> DeviceGraph:
        devices = self.profile.device_graph(count, min(self.world.gpus_per_node, count))
        limit = int(min(self.request.memory_bytes, 2.0**62))
        kinds = tuple(replace(kind, usable_bytes=self._usable(i, limit)) for i, kind in enumerate(devices.kinds))
        memory = int(kinds[0].usable_bytes) if kinds else limit
        return replace(devices, processor=replace(devices.processor, memory_bytes=memory), kinds=kinds)

    def _usable(self, kind: int, limit: float) -> float:
        """Returns the bytes that a plan may take of all devices of a kind. limit: the first device's."""
        each = zip(self.profile.kind_of, self.world.memories, strict=False)
        have = min((memory for k, memory in each if k == kind), default=0)
        if not have:
            return limit
        usable, first = (b - reserved_bytes(b, self.world.comm.device.type) for b in (have, self.world.memories[0]))
        return limit * usable / first

    def choose(self, strategy: Strategy | None, beside: Plan | None = None) -> Choice:
        """Returns the best plan; named layers keep what `strategy` says. LayerwiseError for one that cannot be.

        beside: a plan of the same model called otherwise, whose boxes of parameters are kept.
        """
        options, space, dtype, notes = self.options, self.space, self.request.precision, list[str]()
        if options.dtype != dtype:
            notes.append(f"profile {self.profile.name} has no rate for {dtype}: planned with float32's")
        if strategy is None and self.graph.unseen:
            strategy = "data"
            notes.append(f"the model {self.graph.unseen[0]}: it is run as it is written, and samples alone are split")
        model = CostModel(self.graph, self.devices, options)
        model.check_measured()
        if model.options.io != "sample":
            takes = ", and takes its boxes of it: its loss is in the model" if model.feeding.why else ""
            given = "whole batch" if options.io != "boxes" else "boxes of it that its layers need"
            few = f"{samples(self.graph.batch)} for {self.world.size} ranks"
            notes.append(f"{few}: every rank is to be given the {given} (io {model.options.io}){takes}")
        fixed = _fixed(model, strategy, space.replicas) if beside is None else _beside(model.graph, beside)
        space = replace(space, fixed=tuple(fixed.items()))
        result = search(model, space, effort=self.request.options.effort)
        plan = make_plan(self.request.name, self.profile.name, model, space, result, fused=True)
        plan = replace(plan, device_order=self.world.device_order)
        searched = result if strategy is None else None
        if not result.best.fits:
            raise _over_memory(model, result.best) if searched is None else self._nothing_fits(model, result)
        best = replace(result.best, name=strategy) if isinstance(strategy, str) else result.best
        return Choice(plan, best, result.baselines["data"], searched, (*notes, *_unproven(result)), space)

    def priced(self, plan: Plan) -> Choice:
        """Returns a plan of the user's, priced on this machine."""
        size = self.world.size
        if plan.gpus != size and self.world.group:
            raise LayerwiseError(
                f"the plan is for {plan.gpus} ranks, and {self.world.group} has {size}: give it a plan for as many, or "
                "leave strategy= out to search for one"
            )
        if plan.gpus != size:
            raise LayerwiseError(
                f"the plan is for {plan.gpus} ranks, there {'is' if size == 1 else 'are'} {size}: start the "
                f"script with torchrun --nproc-per-node {plan.gpus}, or leave strategy= out to search for {size}"
            )
        plan.check(self.graph, size)
        model = CostModel(self.graph, self.devices, replace(self.options, io=plan.io), plan.shares)
        for layer in model.graph.inner:
            self.space.check(plan.strategy[layer.name], layer.space.dims, layer.name)
        strategy = complete(model, plan.strategy)
        best = candidate(model, "the given plan", strategy, bucket_bytes=plan.bucket_bytes)
        if not best.fits:
            raise _over_memory(model, best)
        data = candidate(model, "data", baseline(model, "data", self.space.replicas))
        return Choice(plan, best, data, None, (), self.space)

    def _nothing_fits(self, model: CostModel, result: SearchResult) -> LayerwiseError:
        """Returns the error for a search that found no plan that fits."""
        try:
            more = self._device_graph(2 * self.world.size)
        except LayerwiseError:  # the machine cannot have so many
            more = None
        tried = remedies(model, self.space, result.memory_bytes, offer=OFFERS, more_devices=more)
        return LayerwiseError(f"{nothing_fits(result, tried)}: use more ranks or a smaller batch, {KNOWN}")


def _fixed(model: CostModel, strategy: Strategy | None, replicas: int = 1) -> dict[str, Config]:
    """Returns the layers that `strategy` gives a configuration: none, all of a named one, or some by hand."""
    if strategy is None:
        return {}
    if isinstance(strategy, str):
        if strategy not in NAMES:
            raise LayerwiseError(
                f"unknown strategy {strategy!r}{nearest(strategy, NAMES)}: there are {', '.join(NAMES)}, "
                "{layer: {dimension: degree}} for layers by hand, and the .json file of a plan"
            )
        return baseline(model, strategy, replicas)
    if not isinstance(strategy, Mapping):
        raise LayerwiseError(f"strategy is a name or {{layer: {{'c': 4}}}}, not {strategy!r}")
    try:
        return fixed_layers(model.graph, model.devices.count, strategy)
    except LayerwiseError as error:
        alone = model.devices.count == 1 and "devices" in str(error)
        raise LayerwiseError(f"{error}: start the script with torchrun" if alone else str(error)) from None


def _beside(graph: LayerGraph, plan: Plan) -> dict[str, Config]:
    """Returns the configurations of layers with parameters, of which every device has the box that it has in a plan.

    Where frames that a plan splits are not there, positions are split instead, which takes no other parameters.
    """
    fixed = dict[str, Config]()
    for layer in graph.inner:
        config = plan.strategy.get(layer.name)
        if config is not None and [*layer.own_parameters()]:
            positions = "hwdl" if config["c"] == config["k"] == 1 else ""
            others = (Config.of({label: config.total}) for label in positions)
            fixed[layer.name] = next(c for c in (config, *others, Config()) if is_legal(c, layer.space.dims))
    return fixed


def _over_memory(model: CostModel, best: Candidate) -> LayerwiseError:
    """Returns the error for a strategy of the user's that does not fit."""
    need, have = units(best.price.memory_bytes, "B"), units(model.devices.processor.memory_bytes, "B")
    instead = "use more ranks or a smaller batch" if model.devices.count == 1 else "name another strategy="
    return LayerwiseError(
        f"the strategy needs {need} on one of the {model.devices.count} devices, which have {have}: {instead}, {KNOWN}"
    )


def _unproven(result: SearchResult) -> list[str]:
    if result.optimum.proven:
        return []
    bound = result.optimum.lower_bound_s
    return [f"not proven optimal: no strategy takes less than {bound:.3g} s without overlap, this one may take more"]


def report(choice: Choice, world: World, machine: str) -> Report:
    """Returns the report of a choice: one table, and the lines below it."""
    nodes = f" on {world.nodes} nodes" if world.nodes > 1 else ""
    about = f" on {world}{nodes}, {samples(choice.plan.batch)} a step"
    parts: list[Part] = [strategy_table(choice.best), Lines(list(lines(choice, world, machine)))]
    return Report(f"layerwise: {choice.plan.model}", about, parts)


def lines(choice: Choice, world: World, machine: str) -> Iterator[str]:
    """Yields what a plan gains over data parallelism, and what that rests on."""
    best, data = choice.best, choice.data
    time, other = best.timeline.total_s, data.timeline.total_s
    if world.size == 1:
        yield f"one rank, nothing to split: {step_range(best)} a step predicted"
    elif best.strategy == data.strategy:
        why = "as asked for" if choice.searched is None else why_data(choice.searched)
        yield f"data parallelism, {why}; {step_range(best)} a step, {units(best.price.bytes_moved, 'B')} sent"
    else:
        ratio = f"{other / time:.2f}× as fast as data parallelism" + " (SLOWER)" * (time > other)
        ratio += "" if data.fits else ", which does not fit into memory"
        yield (
            f"{best.name}: {step_range(best)} a step predicted, {ratio}: {units(other, 's')}; "
            f"{units(best.price.bytes_moved, 'B')} sent a step instead of {units(data.price.bytes_moved, 'B')}"
        )
    yield f"predictions rest on {machine}"
    yield from choice.notes
