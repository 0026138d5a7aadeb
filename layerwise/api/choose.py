"""Choose: what the user asks for (nothing, a named strategy, layers by hand, a plan) becomes a plan, on rank 0."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from layerwise.api.world import World
from layerwise.config import Config, SearchSpace, parse
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import complete
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import LayerGraph
from layerwise.machine import DeviceGraph
from layerwise.machine.profile import Profile
from layerwise.plan import Plan, nearest
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.find import Candidate, SearchResult, candidate, search
from layerwise.search.make_plan import make_plan
from layerwise.search.report.text import over_memory, units
from layerwise.tensorfile import dtype_name

Strategy = str | Mapping[str, Mapping[str, object]]


@dataclass(frozen=True, slots=True)
class Choice:
    """A plan, and what it is to be judged by: its own prediction and data parallelism's, under the same cost model.

    searched: what the search found, where the user has not said how to split, not even in part.
    """

    plan: Plan
    model: CostModel
    best: Candidate
    data: Candidate
    searched: SearchResult | None
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Request:
    """What to plan for. dtype: the model's; memory_bytes: a device's limit; optimizer: for the memory of its state."""

    name: str
    dtype: torch.dtype
    memory_bytes: float
    optimizer: str = "sgd"
    local_batch_norm: bool = False


def options_for(graph: LayerGraph, world: World, profile: Profile, request: Request) -> CostOptions:
    """What the cost model assumes: each rank feeds its own samples where there are enough."""
    dtype = dtype_name(request.dtype)
    return CostOptions(
        io="sample" if graph.batch >= world.size else "free",
        optimizer=request.optimizer,
        dtype=dtype if dtype in profile.processor.peak_flops else "float32",
        local_batch_norm=request.local_batch_norm,
    )


def space_for(world: World) -> SearchSpace:
    """All that is searched."""
    return SearchSpace(world.size, spread=world.nodes > 1)


def choose(graph: LayerGraph, world: World, profile: Profile, request: Request, strategy: Strategy | None) -> Choice:
    """The best plan for the fused `graph` at its batch; named layers keep what `strategy` says.

    LayerwiseError for a strategy that cannot be, and where nothing fits into memory.
    """
    devices, notes = _devices(world, profile, request), list[str]()
    options = options_for(graph, world, profile, request)
    if options.dtype != dtype_name(request.dtype):
        notes.append(f"profile {profile.name} has no rate for {dtype_name(request.dtype)}: planned with float32's")
    if options.io == "free":
        notes.append(f"{graph.batch} samples for {world.size} ranks: every rank is to be given the whole batch")
    model, space = CostModel(graph, devices, options), space_for(world)
    result = search(model, space, fixed=fixed_layers(model, strategy))
    plan = make_plan(request.name, profile.name, model, space, result, fused=True)
    plan = replace(plan, device_order=world.device_order)
    if not result.best.fits:
        raise _over_memory(model, result.best, result if strategy is None else None)
    best = replace(result.best, name=strategy) if isinstance(strategy, str) else result.best
    searched = result if strategy is None else None
    return Choice(plan, model, best, result.baselines["data"], searched, (*notes, *_unproven(result)))


def given(graph: LayerGraph, world: World, profile: Profile, request: Request, plan: Plan) -> Choice:
    """A plan of the user's, priced on this machine. graph: fused as the plan says."""
    if plan.gpus != world.size:
        raise LayerwiseError(
            f"the plan is for {plan.gpus} ranks, there {'is' if world.size == 1 else 'are'} {world.size}: start the "
            f"script with torchrun --nproc-per-node {plan.gpus}, or leave plan= out to search for {world.size}"
        )
    plan.check(graph, world.size)
    devices = _devices(world, profile, request)
    options = options_for(graph, world, profile, request)
    model = CostModel(graph, devices, replace(options, io="sample" if plan.io == "sample" else "free"))
    best = candidate(model, "the given plan", complete(model, plan.strategy))
    if not best.fits:
        raise _over_memory(model, best, None)
    return Choice(plan, model, best, candidate(model, "data", baseline(model, "data")), None, ())


def fixed_layers(model: CostModel, strategy: Strategy | None) -> dict[str, Config]:
    """The layers that `strategy` gives a configuration: none, all of a named one, or some by hand."""
    if strategy is None:
        return {}
    if isinstance(strategy, str):
        if strategy not in NAMES:
            raise LayerwiseError(
                f"unknown strategy {strategy!r}{nearest(strategy, NAMES)}: there are {', '.join(NAMES)}, and "
                "{layer: {dimension: degree}} for layers by hand"
            )
        return baseline(model, strategy)
    if not isinstance(strategy, Mapping):
        raise LayerwiseError(f"strategy is a name or {{layer: {{'c': 4}}}}, not {strategy!r}")
    layers = {layer.name: layer for layer in model.graph.inner}
    found = {}
    for name, degrees in strategy.items():
        if name not in layers:
            hint = nearest(str(name), layers) or f" (it has {', '.join(list(layers)[:8])}{' …' * (len(layers) > 8)})"
            raise LayerwiseError(
                f"the strategy names layer {name!r}, which the model does not have{hint}; element-wise layers go with "
                "the layer before them"
            )
        try:
            found[name] = parse(degrees, layers[name].space.dims, model.devices.count, name)
        except LayerwiseError as error:
            alone = model.devices.count == 1 and "devices" in str(error)
            raise LayerwiseError(f"{error}: start the script with torchrun" if alone else str(error)) from None
    return found


def _devices(world: World, profile: Profile, request: Request) -> DeviceGraph:
    """The device graph of these ranks, with the memory that they really have."""
    devices = profile.device_graph(world.size, min(world.gpus_per_node, world.size))
    processor = replace(devices.processor, memory_bytes=int(min(request.memory_bytes, 2.0**62)))
    return replace(devices, processor=processor)


def _over_memory(model: CostModel, best: Candidate, searched: SearchResult | None) -> LayerwiseError:
    """For a plan that does not fit; searched: where it is the search's own choice."""
    known = "or give memory_limit= in bytes if you know better"
    if model.devices.count == 1:
        instead = "use more ranks or a smaller batch"
    else:
        instead = "name another with strategy= or plan="
    if searched is not None:
        return LayerwiseError(f"{over_memory(searched)}: {instead}, {known}")
    need, have = units(best.price.memory_bytes, "B"), units(model.devices.processor.memory_bytes, "B")
    return LayerwiseError(
        f"the strategy needs {need} on one of the {model.devices.count} devices, which have {have}: {instead}, {known}"
    )


def _unproven(result: SearchResult) -> list[str]:
    if result.optimum.proven:
        return []
    bound = result.optimum.lower_bound_s
    return [f"not proven optimal: no strategy takes less than {bound:.3g} s without overlap, this one may take more"]
