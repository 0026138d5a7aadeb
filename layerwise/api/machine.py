"""Machine: the profile to plan with: what the user names, what was measured on these ranks, or a built-in one."""

from __future__ import annotations

import hashlib
import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn

from layerwise.api.arguments import ParallelOptions
from layerwise.api.planner import Planner, Request
from layerwise.api.world import World
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import alone
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import catalogue, save
from layerwise.machine import load as load_profile
from layerwise.machine.profile import Profile
from layerwise.machine.profiles import folder
from layerwise.measure.bench import Mode
from layerwise.measure.conditions import TYPES, conditions, cpu_name, mode_of, modes
from layerwise.measure.job import Job, base_profile
from layerwise.measure.links import conditions as link_conditions
from layerwise.measure.links import measure_links, with_links
from layerwise.measure.topology import find_topology
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.search.find import search
from layerwise.version import __version__

# Part of the device's name, as CUDA has it -> built-in profile, beside the devices of `layerwise machines`.
KNOWN = {"h100": "h100", "p100": "p100", "v100": "v100", "cpu": "cpu"}
NEAREST = "h100"  # for other GPUs
BETWEEN = "link=400Gb/s"  # assumed of nodes of devices that no built-in profile has
ENOUGH = 0.95  # of the best plan's t_C measured: then nothing more is measured
MEASURED = "what was measured on these ranks ({})"
LINKS = 0.3  # of the budget is for links, where these are not known yet


@dataclass(frozen=True, slots=True)
class Machine:
    """A profile, and what the user should know of it."""

    profile: Profile
    source: str  # where it comes from
    notes: tuple[str, ...] = ()  # what else, a line each


def named_profile(profile: Profile | str | os.PathLike[str]) -> Machine:
    """Returns the profile that the user names; LayerwiseError where there is none."""
    if isinstance(profile, Profile):
        return Machine(profile, f"profile {profile.name}, as given")
    return Machine(load_profile(profile), f"profile {os.fspath(profile)}, as given")


def built_in(world: World) -> Machine:
    """Returns the built-in profile that fits the devices best, without a measurement."""
    name = catalogue.reported(world.device)
    if name is None:
        name = next((profile for part, profile in KNOWN.items() if part in world.device.lower()), None)
    elif world.nodes > 1 and "profile" not in catalogue.devices()[name]:
        name = f"{name},{BETWEEN}"
    if name is not None:
        return Machine(load_profile(name), f"built-in profile {name}; nothing was measured here")
    return Machine(
        load_profile(NEAREST),
        f"built-in profile {NEAREST}, for want of one of {world.device}: ParallelOptions(profile=...) names another",
    )


def cache_file(world: World) -> Path:
    """Returns the file that has the profile of ranks like these."""
    shape = [world.nodes, world.gpus_per_node, world.size, "nccl" if world.comm.collectives else "gloo"]
    if world.group:  # others are measured at the same time
        shape.append(world.group)
    facts = json.dumps([world.device, cpu_name(), torch.get_num_threads(), torch.__version__, __version__, *shape])
    name = re.sub(r"\W+", "-", world.device.lower()).strip("-")
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return folder() / f"{name}-{world.nodes}x{world.gpus_per_node}-{digest}.json"


def machine_of(
    graph: LayerGraph, world: World, request: Request, options: ParallelOptions, *, measure: bool
) -> Machine:
    """Returns what is known of these ranks, or (measure) measured now; any on ranks other than 0, which do not plan."""
    if options.profile is not None:
        return named_profile(options.profile)
    base, comm = built_in(world), world.comm
    planner = Planner(graph, world, base.profile, request)
    measure = measure and options.measure_s > 0 and world.size > 1 and planner.options.dtype in TYPES
    if measure:
        used = [] if comm.device.type == "cpu" else [comm.device]
        with torch.random.fork_rng(used, device_type=comm.device.type):  # the script draws as without this
            return _measured(planner, base, options.measure_s)
    return _cached(base, cache_file(world)) if comm.rank == 0 and world.size > 1 else base


def _cached(base: Machine, path: Path) -> Machine:
    """Returns what the cache's file says of these ranks; the base where there is none, or it is no profile."""
    try:
        return Machine(load_profile(path), MEASURED.format(path)) if path.exists() else base
    except (LayerwiseError, OSError) as error:
        return replace(base, notes=(f"the cache's file {path} is of no use, as if it were not there: {error}",))


def _measured(planner: Planner, base: Machine, budget_s: float) -> Machine:
    """Returns what is known of these ranks, with what the best plans need. `base` is where to begin.

    Every rank calls it; the base on all but rank 0, which plans. LayerwiseError on all ranks where it cannot be.
    """
    if planner.world.comm.rank != 0:
        _measure(planner, None, None, budget_s)
        return base
    file = cache_file(planner.world)
    cached = _cached(base, file)
    notes, profile = cached.notes, None if cached.profile is base.profile else cached.profile
    with tempfile.TemporaryDirectory(prefix="layerwise-") as passing:
        path = Path(passing) / file.name
        if profile is not None:
            save(profile, path)
        _measure(planner, profile, path, budget_s)
        if not path.exists():
            return replace(base, notes=notes)
        measured, kept = load_profile(path), str(file)
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        save(measured, file)
    except (LayerwiseError, OSError) as error:
        note = f"what is measured is not kept, the cache's file {file} cannot be written: {error}"
        kept, notes = "not kept", (*notes, note)
    return Machine(measured, MEASURED.format(kept), notes)


def _measure(planner: Planner, profile: Profile | None, path: Path | None, budget_s: float) -> None:
    """Measures links, unless rank 0 has them, then layers; the others (without a path) take part in the first."""
    comm = planner.world.comm
    if comm.broadcast_text(str(profile is not None and profile.links is not None)) == "False":
        topology = find_topology(comm)
        links = measure_links(comm, topology, LINKS * budget_s)
        if path is not None:
            facts = link_conditions(comm, topology)
            save(with_links(profile or planner.profile, links, topology, facts), path)
        budget_s *= 1 - LINKS

    def layers() -> None:
        assert path is not None
        _layers(planner, path, budget_s)

    alone(comm, layers)


def _layers(planner: Planner, path: Path, budget_s: float) -> None:
    """Measures times of layers, into the file, unless it has enough of them."""
    world, graph, options, space = planner.world, planner.graph, planner.options, planner.space
    device = world.comm.device
    mode = mode_of(device, options.dtype, channels_last=False)
    benchmark = torch.backends.cudnn.benchmark
    with modes(options.dtype, None, benchmark) as tf32:
        where = conditions(mode, options.dtype, tf32, benchmark)
        base = base_profile(str(path), None, where, device)
        devices = base.device_graph(world.size, min(world.gpus_per_node, world.size))
        if any(times.conditions == where for times in base.layers):
            model = CostModel(graph, devices, options)
            best = search(model, space).best.strategy
            costs = [model.node_cost(layer, (best[layer.name],)).compute for layer in model.graph.inner]
            if sum(float(c.measured[0]) for c in costs) >= ENOUGH * sum(float(c.total[0]) for c in costs):
                return
        Job(base, where, str(path), mode, graph, devices, options, space, budget_s).run(strategies, module, quiet=True)


def strategies(model: CostModel, space: SearchSpace) -> list[Mapping[str, Config]]:
    """Returns the best strategy, the additive optimum and the baselines: whose times matter most."""
    result = search(model, space)
    candidates = [result.best, result.additive, *result.baselines.values()]
    return [{layer.name: c.strategy[layer.name] for layer in model.graph.inner} for c in candidates]


def module(plan: Plan, graph: LayerGraph, mode: Mode) -> nn.Module:
    """Returns the runtime's module of a plan on one device, whose overhead is measured."""
    return load(plan, graph, comm=SoloComm(mode.device), dtype=mode.dtype, autocast=mode.autocast)
