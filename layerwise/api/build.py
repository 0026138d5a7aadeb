"""Task: a model on ranks that have met becomes a parallel module, by layers or as it is written."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import nn

from layerwise.api.arguments import check_autocast
from layerwise.api.options import ParallelOptions
from layerwise.api.planning import as_written
from layerwise.api.planning.choose import Planner, Request, Strategy
from layerwise.api.planning.machine import Machine, built_in
from layerwise.api.planning.machine import given as given_profile
from layerwise.api.planning.measuring import cached, measurable, measured
from layerwise.api.planning.report import report
from layerwise.api.planning.source import Model, dtype_of, network, network_as_written
from layerwise.api.world import World
from layerwise.comm.together import alone
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import Call
from layerwise.plan import Plan, parse_plan
from layerwise.report.text import text
from layerwise.run.guards.hooks import NotByLayersError, without_hooks
from layerwise.run.load import build_module
from layerwise.run.options import RuntimeOptions, uses_local_batch_norm
from layerwise.run.parallel import ParallelModule


@dataclass(frozen=True, slots=True)
class Built:
    """A parallel module, and what rank 0 shows of it."""

    module: ParallelModule
    shown: tuple[RenderableType, ...]


@dataclass(frozen=True, slots=True)
class Task:
    """What is to be made parallel, and how. Every rank has the same."""

    model: Model
    call: Call  # what one rank calls it with
    batch: int  # samples of all ranks together
    plan: Plan | None  # the user's
    strategy: Strategy | None
    world: World
    request: Request
    runtime: RuntimeOptions
    options: ParallelOptions

    def build(self) -> Built:
        """By layers, or as it is written where it cannot be taken apart into layers."""
        try:
            imported, dtype = self._import()
        except LayerwiseError as why:
            return self._as_written(why)
        try:
            return self._by_layers(imported, dtype)
        except NotByLayersError as error:
            untraced = imported.graph.unseen
            free = self.strategy == "data" or (self.strategy is None and untraced)
            if self.plan is not None or not free:
                raise
            return self._as_written(LayerwiseError(f"the model {untraced[0]}") if untraced else error)

    def _import(self) -> tuple[Network, torch.dtype]:
        if as_written.planned(self.plan):
            raise LayerwiseError("the plan has it so")
        a_module = isinstance(self.model, nn.Module)
        with without_hooks(self.model) if isinstance(self.model, nn.Module) else nullcontext():
            imported = replace(network(self.model, self.call, self.batch), itself=a_module)
        return imported, dtype_of(imported)

    def _by_layers(self, imported: Network, dtype: torch.dtype) -> Built:
        """LayerwiseError where no plan fits, NotByLayersError where the module has what layers would leave out."""
        world, plan = self.world, self.plan
        world.comm.handshake({"model": imported.graph.digest, "element type": str(dtype)})
        graph = fuse(imported.graph) if plan is None else plan.layers(imported.graph)
        check_autocast(self.request.autocast, dtype)
        request = replace(self.request, dtype=dtype)
        machine = self._machine(graph, request)
        planner = Planner(graph, world, machine.profile, request)
        choice = alone(world.comm, lambda: planner.choose(self.strategy) if plan is None else planner.given(plan))
        agreed = parse_plan(world.comm.broadcast_text("" if choice is None else choice.plan.dumps()), "rank 0's plan")
        runtime = replace(self.runtime, dtype=dtype, local_batch_norm=uses_local_batch_norm(agreed))
        module = build_module(agreed, imported, world.comm, runtime)
        if choice is None:
            return Built(module, ())
        notes = [*choice.notes, *machine.notes]
        if imported.unproven is not None and not imported.graph.unseen:
            notes.append(f"the layers were not run beside the model as it was imported: {imported.unproven}")
        noted = replace(choice, notes=tuple(notes))
        return Built(module, (text(report(noted, world, machine.source)),))

    def _as_written(self, why: LayerwiseError) -> Built:
        """Raises `why` where more than splitting samples is asked for."""
        if not isinstance(self.model, nn.Module) or not (self.plan is None or as_written.planned(self.plan)):
            raise why
        as_written.check(self.request, self.strategy, self.world, self.batch, why)
        imported = network_as_written(self.model, self.call, self.batch, why)
        graph, world = imported.graph, self.world
        world.comm.handshake({"model": graph.digest, "what keeps it from being split": str(why)})
        agreed = self.plan or as_written.data_plan(graph, world, self.request)
        dtype, local = getattr(torch, graph.dtype), uses_local_batch_norm(agreed)
        runtime = replace(self.runtime, dtype=dtype, local_batch_norm=local)
        lines = as_written.lines(agreed, world, why)
        return Built(build_module(agreed, imported, world.comm, runtime), tuple(map(Text, lines)))

    def _machine(self, graph: LayerGraph, request: Request) -> Machine:
        """What is known of these ranks, or is measured now. On ranks other than 0, which do not plan, any."""
        world = self.world
        if self.options.profile is not None:
            return given_profile(self.options.profile)
        base = built_in(world)
        planner = Planner(graph, world, base.profile, request)
        chosen = self.plan is not None or isinstance(self.strategy, str)
        if self.options.measure_s > 0 and not chosen and measurable(planner.options.dtype, world.comm):
            used = [] if world.comm.device.type == "cpu" else [world.comm.device]
            with torch.random.fork_rng(used, device_type=world.comm.device.type):  # the script draws as without this
                known = measured(planner, self.options.measure_s)
        elif world.comm.rank == 0 and world.size > 1:
            known = cached(world)
        else:
            return base
        if known.profile is None:
            return replace(base, notes=known.notes)
        return Machine(known.profile, f"what was measured on these ranks ({known.path or 'not kept'})", known.notes)
