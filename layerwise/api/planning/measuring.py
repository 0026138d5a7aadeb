"""Measuring: a profile of these ranks, kept in a cache; what a plan needs and the cache lacks is measured."""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from layerwise.api.planning.choose import Planner
from layerwise.api.world import World
from layerwise.cache import folder
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.comm.together import alone
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.files import check_writable
from layerwise.graph.layer import LayerGraph
from layerwise.machine import load as load_profile
from layerwise.machine import save
from layerwise.machine.profile import Profile
from layerwise.measure import links_profile
from layerwise.measure.bench import Mode
from layerwise.measure.conditions import TYPES, conditions, cpu_name, mode_of, modes
from layerwise.measure.job import Job, base_profile
from layerwise.measure.link_times import measure_links
from layerwise.measure.topology import find_topology
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.search.find import search
from layerwise.version import __version__

ENOUGH = 0.95  # of the best plan's t_C measured: then nothing more is measured
LINKS = 0.3  # of the budget is for links, where these are not known yet


def cache_file(world: World) -> Path:
    """Where the profile of ranks like these is kept."""
    shape = [world.nodes, world.gpus_per_node, world.size, "nccl" if world.comm.collectives else "gloo"]
    facts = json.dumps([world.device, cpu_name(), torch.get_num_threads(), torch.__version__, __version__, *shape])
    name = re.sub(r"\W+", "-", world.device.lower()).strip("-")
    digest = hashlib.sha256(facts.encode()).hexdigest()[:12]
    return folder() / f"{name}-{world.nodes}x{world.gpus_per_node}-{digest}.json"


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of these ranks."""

    profile: Profile | None = None
    path: Path | None = None  # the file that keeps it; None: no file does
    notes: tuple[str, ...] = ()  # what went wrong, a line each


def cached(world: World) -> Known:
    """What is known of these ranks already; for rank 0. A file that is no profile counts as not there."""
    path = cache_file(world)
    try:
        return Known(load_profile(path), path) if path.exists() else Known()
    except (LayerwiseError, OSError) as error:
        return Known(notes=(f"the cache's file {path} is of no use, as if it were not there: {error}",))


@contextmanager
def _place(path: Path, known: Profile | None) -> Iterator[tuple[Path, tuple[str, ...]]]:
    """Where rank 0 writes: the cache's file, or a passing one where that cannot be written, and a note that says so."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_writable(path)
        if known is None:
            path.unlink(missing_ok=True)
    except (LayerwiseError, OSError) as error:
        note = f"what is measured is not kept, the cache's file {path} cannot be written: {error}"
    else:
        yield path, ()
        return
    with tempfile.TemporaryDirectory(prefix="layerwise-") as folder:
        passing = Path(folder) / path.name
        if known is not None:
            save(known, passing)
        yield passing, (note,)


def measured(planner: Planner, budget_s: float) -> Known:
    """The profile of these ranks, with what the best plans need. The planner's own profile is where to begin.

    Every rank calls it; nothing on all but rank 0, which plans. LayerwiseError on all ranks where it cannot be.
    """
    world = planner.world
    if world.comm.rank != 0:
        _measure(planner, None, None, budget_s)
        return Known()
    known = cached(world)
    with _place(cache_file(world), known.profile) as (path, notes):
        _measure(planner, known.profile, path, budget_s)
        profile = load_profile(path) if path.exists() else None
    return Known(profile, None if notes else path, (*known.notes, *notes))


def _measure(planner: Planner, known: Profile | None, path: Path | None, budget_s: float) -> None:
    """Links, unless rank 0 has them, then layers; the others (without a path) take part in the first."""
    comm = planner.world.comm
    if comm.broadcast_text(str(known is not None and known.links is not None)) == "False":
        topology = find_topology(comm)
        links = measure_links(comm, topology, LINKS * budget_s)
        if path is not None:
            facts = links_profile.conditions(comm, topology)
            save(links_profile.with_links(known or planner.profile, links, topology, facts), path)
        budget_s *= 1 - LINKS

    def layers() -> None:
        assert path is not None
        _layers(planner, path, budget_s)

    alone(comm, layers)


def _layers(planner: Planner, path: Path, budget_s: float) -> None:
    """Times of layers, into the file, unless it has enough of them."""
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


def measurable(dtype: str, comm: Comm) -> bool:
    """Whether kernels of this type can be run here, and there is something to measure them for."""
    return comm.size > 1 and dtype in TYPES


def strategies(model: CostModel, space: SearchSpace) -> list[Mapping[str, Config]]:
    """The best strategy, the additive optimum and the baselines: whose times matter most."""
    result = search(model, space)
    candidates = [result.best, result.additive, *result.baselines.values()]
    return [{layer.name: c.strategy[layer.name] for layer in model.graph.inner} for c in candidates]


def module(plan: Plan, graph: LayerGraph, mode: Mode) -> nn.Module:
    """The runtime's module of a plan on one device, whose overhead is measured."""
    return load(plan, graph, comm=SoloComm(mode.device), dtype=mode.dtype, autocast=mode.autocast)
