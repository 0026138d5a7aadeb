"""Machine: the profile to plan with: what the user names, what was measured on these ranks, or a built-in one."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from torch import nn

from layerwise.api.planner import Planner, Request
from layerwise.api.world import World
from layerwise.comm.solo import SoloComm
from layerwise.config import Config, SearchSpace, why_illegal
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import catalogue, save
from layerwise.machine import load as load_profile
from layerwise.machine.layer_times import Conditions
from layerwise.machine.profile import Profile
from layerwise.machine.profiles import folder, parse, write
from layerwise.measure.bench import Mode
from layerwise.measure.check import changed_links
from layerwise.measure.conditions import TYPES, conditions, mode_of, modes, on_device
from layerwise.measure.job import Job, KindRanks
from layerwise.measure.links import conditions as link_conditions
from layerwise.measure.links import measure_links, with_links
from layerwise.measure.topology import find_topology
from layerwise.partition.place import data_parallel
from layerwise.plan import Plan
from layerwise.progress import progress_bar
from layerwise.run.load import load
from layerwise.search.find import candidate, search

# Part of the device's name, as CUDA has it -> built-in profile, beside the devices of `layerwise machines`.
KNOWN = {"h100": "h100", "p100": "p100", "v100": "v100", "cpu": "cpu"}
NEAREST = "h100"  # for other GPUs
BETWEEN = "link=400Gb/s"  # assumed of nodes of devices that no built-in profile has
MEASURED = "what was measured on these ranks ({})"
LINKS = 0.3  # of the budget is for links, where these are not known yet
ENOUGH = 0.8  # of a plan's compute time is measured: less is told


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
    known = [_known(kind) for kind in world.kinds or (world.device,)]
    name = known[0]
    if None in known and len(known) > 1:
        without = world.kinds[known.index(None)]
        raise LayerwiseError(
            f"the ranks compute with unlike devices, and there is no profile of {without}: give one of them all with "
            "ParallelOptions(profile=...)"
        )
    row = catalogue.devices().get(str(name), {"profile": ""})
    if world.nodes > 1 and "profile" not in row:
        name = f"{name},{BETWEEN}"
    if world.kinds:
        name = f"{str(name).partition('@')[0]},kinds=" + "+".join(f"{kind}:1" for kind in known)
    if name is not None:
        return Machine(load_profile(name), f"built-in profile {name}; nothing was measured here")
    return Machine(
        load_profile(NEAREST),
        f"built-in profile {NEAREST}, for want of one of {world.device}: ParallelOptions(profile=...) names another",
    )


def _known(device: str) -> str | None:
    """Returns the device of the catalogue, or the built-in profile, that is a device; None where there is none."""
    name, slower, share = device.partition("@")
    found = catalogue.reported(name) or next((known for part, known in KNOWN.items() if part in name.lower()), None)
    return found and found + slower + share


def cache_file(world: World) -> Path:
    """Returns the file that has the profile of ranks like these: what is in it is checked before it is used."""
    devices = " ".join(world.kinds) or world.device
    name = re.sub(r"\W+", "-", f"{devices} {world.group}".lower()).strip("-")
    backend = "nccl" if world.comm.collectives else "gloo"
    return folder() / f"{name}-{world.nodes}x{world.gpus_per_node}-{world.size}-{backend}.json"


def machine_of(graph: LayerGraph, world: World, request: Request, *, measure: bool) -> Machine:
    """Returns what is known of these ranks, checked, and measured now where it is missing or has changed.

    Every rank calls it; on ranks other than 0, which do not plan, the answer counts for nothing. measure: False only
    checks what is known.
    """
    options = request.options
    if options.profile is not None:
        machine = named_profile(options.profile)
        pairs = set(zip(machine.profile.kind_of, world.kinds, strict=False))
        if len(pairs) > max(len(machine.profile.kinds), len(set(world.kinds))):
            raise LayerwiseError(
                f"the profile {machine.profile.name} has its kinds of devices in another order than the ranks, which "
                f"are {', '.join(world.kinds)}: name the kinds in the order of the ranks"
            )
        return machine
    base, comm = built_in(world), world.comm
    if world.size == 1:
        return base
    planner = Planner(graph, world, base.profile, request)
    measure = measure and options.measure_s > 0 and planner.options.dtype in TYPES
    used = [] if comm.device.type == "cpu" else [comm.device]
    with torch.random.fork_rng(used, device_type=comm.device.type):  # the script draws as without this
        return _checked(planner, base, options.measure_s if measure else 0.0)


def _cached(base: Machine, path: Path) -> Machine:
    """Returns what the cache's file says of these ranks; the base where there is none, or it is no profile."""
    try:
        return Machine(load_profile(path), MEASURED.format(path)) if path.exists() else base
    except (LayerwiseError, OSError) as error:
        return replace(base, notes=(f"the cache's file {path} is of no use, as if it were not there: {error}",))


def _checked(planner: Planner, base: Machine, budget_s: float) -> Machine:
    """Returns what was measured on these ranks, after a check and with what the best plans need beside it.

    budget_s: about how long measuring takes, searches included; 0 measures nothing. Every rank calls it.
    """
    comm, began = planner.world.comm, time.monotonic()
    file = cache_file(planner.world)
    cached = _cached(base, file) if comm.rank == 0 else base
    known = comm.broadcast_text(write(cached.profile) if cached.profile is not base.profile else "")
    if not known and not budget_s:
        return cached
    profile, notes = parse(known, "rank 0's") if known else base.profile, list(cached.notes)
    topology = find_topology(comm)
    changed = changed_links(comm, profile.links, topology) if known and profile.links else None
    if changed and not budget_s:
        return replace(base, notes=(*notes, f"{changed}; nothing is measured now"))
    if budget_s and (changed or not known or profile.links is None):
        notes += [f"{changed}; measuring the links again"] if changed else []
        with progress_bar("measuring links", quiet=comm.rank > 0) as progress:
            links = measure_links(comm, topology, LINKS * budget_s, progress)
        profile = with_links(profile, links, topology, link_conditions(comm, topology))
    if not budget_s:
        return Machine(profile, MEASURED.format(file), tuple(notes))
    profile, told = _layers(planner, profile, began + budget_s - time.monotonic())
    notes += told
    kept = str(file)
    if comm.rank == 0:
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            save(profile, file)
        except (LayerwiseError, OSError) as error:
            kept = "not kept"
            notes.append(f"what is measured is not kept, the cache's file {file} cannot be written: {error}")
    return Machine(profile, MEASURED.format(kept), tuple(notes))


def _layers(planner: Planner, profile: Profile, budget_s: float) -> tuple[Profile, list[str]]:
    """Returns the profile with times of the layers that matter, and what the user should know of them, a line each."""
    world, graph, options, space = planner.world, planner.graph, planner.options, planner.space
    device = world.comm.device
    mode = mode_of(device, options.dtype, channels_last=False)
    benchmark = torch.backends.cudnn.benchmark
    with modes(options.dtype, None, benchmark) as tf32:
        where = conditions(mode, options.dtype, tf32, benchmark)
        base = profile if profile.kinds else on_device(profile, device, where)
        everyone = [Conditions(**row) for row in world.comm.all_gather_object(asdict(where))] if base.kinds else [where]
        kinds = [KindRanks(where)]
        if base.kinds:
            kinds = []
            for number, kind in enumerate(base.kinds):
                ranks = tuple(r for r, k in zip(world.device_order, base.kind_of, strict=True) if k == number)
                kinds.append(KindRanks(replace(everyone[ranks[0]], device=kind.name), number, ranks))
        devices = base.device_graph(world.size, min(world.gpus_per_node, world.size))
        job = Job(base, kinds, None, mode, graph, devices, options, space, budget_s, world.comm)
        summary = job.run(strategies, module, quiet=world.comm.rank > 0, every=False)
    told = [summary.changed] if summary.changed else []
    if summary.best_share < ENOUGH:
        told.append(
            f"only {summary.best_share:.0%} of the time of the plan's layers is measured, the rest is a fit or a "
            "roofline: a longer ParallelOptions(measure_s=...) measures more"
        )
    return job.profile, told


def strategies(model: CostModel, space: SearchSpace) -> list[Mapping[str, Config]]:
    """Returns the best strategy, the additive optimum and the baselines: whose times matter most.

    Of unequal devices also those by which weights are chosen: each kind alone, and equal parts of the samples. And the
    fastest that cuts every layer along one dimension by weights: a fit to other pieces says little of such parts.
    """
    result, inner = search(model, space), model.graph.inner
    candidates = [result.best, result.additive, *result.baselines.values()]
    found: list[Mapping[str, Config]] = [{x.name: c.strategy[x.name] for x in inner} for c in candidates]
    if kinds := model.devices.kind_of:
        alone = [Config().weighted(tuple(int(i == kinds.index(k)) for i in range(len(kinds)))) for k in set(kinds)]
        found += [dict.fromkeys((layer.name for layer in inner), one) for one in alone]
        found.append({layer.name: data_parallel(layer, min(len(kinds), model.graph.batch)) for layer in inner})
        cuts = [_cut(model, label, model.weights[0]) for label in ("n", "d", "h", "w", "l", "s")]
        cuts = [cut for cut in cuts if any(config.total > 1 for config in cut.values())]
        found += sorted(cuts, key=lambda cut: candidate(model, "", cut).timeline.total_s)[:1]
    return found


def _cut(model: CostModel, label: str, weights: tuple[int, ...]) -> Mapping[str, Config]:
    """Returns every layer cut along one dimension by weights; a layer that cannot be is on the fastest device."""
    cut = Config.of({label: len(weights)}).weighted(weights)
    one = Config().weighted(tuple(int(i == weights.index(max(weights))) for i in range(len(weights))))
    inner = model.graph.inner
    return {layer.name: one if why_illegal(cut, layer.space.dims) else cut for layer in inner}


def module(plan: Plan, graph: LayerGraph, mode: Mode) -> nn.Module:
    """Returns the runtime's module of a plan on one device, whose overhead is measured."""
    return load(plan, graph, comm=SoloComm(mode.device), dtype=mode.dtype, autocast=mode.autocast)
