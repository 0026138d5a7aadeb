"""Task: a model on ranks that have met becomes a parallel module, by layers or as it is written."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from rich.console import RenderableType
from rich.text import Text
from torch import nn

from layerwise.api.arguments import ParallelOptions, check_autocast
from layerwise.api.machine import machine_of
from layerwise.api.planner import Choice, Planner, Request, Strategy, report
from layerwise.api.race import agreed_plans, contenders, kept, line, race
from layerwise.api.source import Model, Unbatched, dtype_of, network, network_as_written
from layerwise.api.world import World
from layerwise.comm.together import agree, alone
from layerwise.config import Config
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.as_written import LAYER
from layerwise.importers.load import Network, whole_of
from layerwise.importers.torch.read.arguments import Call
from layerwise.plan import Plan, parse_plan
from layerwise.quantities import samples
from layerwise.report.text import text
from layerwise.run.guards.hooks import NotByLayersError, without_hooks
from layerwise.run.load import build_module
from layerwise.run.options import RuntimeOptions, uses_local_batch_norm
from layerwise.run.parallel import ParallelModule
from layerwise.version import __version__

Built = tuple[ParallelModule, tuple[RenderableType, ...]]  # and what rank 0 shows of it


@dataclass(frozen=True, slots=True)
class Task:
    """A model that is to be made parallel, and the way to. Every rank has the same."""

    model: Model
    call: Call  # what one rank calls it with
    batch: int  # samples of all ranks together
    plan: Plan | None  # the user's
    strategy: Strategy | None
    world: World
    request: Request
    runtime: RuntimeOptions
    options: ParallelOptions
    whole: tuple[str, ...] = ()  # modules of the model that are not to be taken apart
    lists: Unbatched | None = None  # where no dimension of a tensor is the samples

    def build(self) -> Built:
        """Returns the module by layers, or as it is written where it cannot be taken apart into layers."""
        try:
            imported, dtype = self._import()
        except LayerwiseError as why:
            if self.whole:  # what the user asks for
                raise
            return self._as_written(why)
        try:
            return self._by_layers(imported, dtype)
        except NotByLayersError as error:
            untraced = imported.graph.unseen
            free = self.strategy == "data" or (self.strategy is None and untraced)
            if self.plan is not None or not free:
                raise
            return self._as_written(LayerwiseError(f"the model {untraced[0]}") if untraced else error)

    @property
    def _planned_as_written(self) -> bool:
        """True if the user's plan is one of `_data_plan`."""
        return self.plan is not None and self.plan.strategy.keys() == {LAYER}

    def _import(self) -> tuple[Network, torch.dtype]:
        if self.lists is not None:
            raise LayerwiseError(self.lists.why)
        if self._planned_as_written:
            raise LayerwiseError("the plan has it so")
        a_module = isinstance(self.model, nn.Module)
        with without_hooks(self.model) if isinstance(self.model, nn.Module) else nullcontext():
            # The plan says which they were. Mixed precision and compilation are not planned for what is not traced.
            asked = self.whole or (() if self.plan is None else whole_of(self.plan.provenance))
            partly = self.plan is None and self.request.autocast is None and self.runtime.compile is None
            imported = replace(self._agreed(tuple(asked), partly=partly and a_module), itself=a_module)
        return imported, dtype_of(imported)

    def _agreed(self, asked: tuple[str, ...], *, partly: bool) -> Network:
        """Returns the network, with the same whole modules on all ranks: each finds them by its own values."""

        def act(paths: tuple[str, ...], partly: bool) -> tuple[Network, JSON]:
            made = network(self.model, self.call, self.batch, paths, partly=partly)
            return made, sorted(made.whole)

        made, told = agree(self.world.comm, lambda: act(asked, partly))
        every = tuple(sorted({path for paths in told for path in paths}))
        if any(paths != list(every) for paths in told):
            made, _ = agree(self.world.comm, lambda: act(every, False))
        return made

    def _by_layers(self, imported: Network, dtype: torch.dtype) -> Built:
        """LayerwiseError where no plan fits, NotByLayersError where the module has what layers would leave out."""
        world, plan = self.world, self.plan
        world.comm.handshake({"model": imported.graph.digest, "element type": str(dtype)})
        graph = fuse(imported.graph) if plan is None else plan.layers(imported.graph)
        check_autocast(self.request.autocast, dtype)
        request = replace(self.request, dtype=dtype)
        chosen = plan is not None or isinstance(self.strategy, str)
        machine = machine_of(graph, world, request, self.options, measure=not chosen)
        planner = Planner(graph, world, machine.profile, request)
        choice = alone(world.comm, lambda: planner.choose(self.strategy) if plan is None else planner.priced(plan))
        runtime = replace(self.runtime, dtype=dtype)
        if self.options.race > 1 and world.size > 1:
            choice = self._raced(choice, imported, runtime)
        agreed = parse_plan(world.comm.broadcast_text("" if choice is None else choice.plan.dumps()), "rank 0's plan")
        runtime = replace(runtime, local_batch_norm=uses_local_batch_norm(agreed))
        module = build_module(agreed, imported, world.comm, runtime)
        if choice is None:
            return module, ()
        notes = [*choice.notes, *machine.notes]
        notes += [op.note for op in graph.whole_modules]
        if imported.unproven is not None and not imported.graph.unseen:
            notes.append(f"the layers were not run beside the model as it was imported: {imported.unproven}")
        noted = replace(choice, notes=tuple(notes))
        return module, (text(report(noted, world, machine.source)),)

    def _raced(self, choice: Choice | None, imported: Network, runtime: RuntimeOptions) -> Choice | None:
        """Returns the choice whose plan is fastest on these ranks; None on ranks other than 0, as before."""
        comm = self.world.comm
        if self.request.io is not None:
            raise LayerwiseError("race= feeds each rank samples: leave out io='boxes'")
        choices = alone(comm, lambda: [] if choice is None else contenders(choice, self.options.race))
        plans = agreed_plans(comm, lambda: [c.plan for c in choices or ()])
        runtime = replace(runtime, local_batch_norm=self.request.local_batch_norm)
        training, autocast = not self.request.inference, self.request.autocast
        winner, runs = race(plans, imported, comm, runtime, self.call, training=training, autocast=autocast)
        if not choices:
            return None
        won = choices[winner]
        return replace(won, plan=kept(won.plan, runs), notes=(*won.notes, line(winner, runs)))

    def _as_written(self, why: LayerwiseError) -> Built:
        """Raises `why` where more than splitting samples is asked for."""
        world = self.world
        if not isinstance(self.model, nn.Module) or not (self.plan is None or self._planned_as_written):
            raise why
        if self.request.io is not None or self.strategy not in (None, "data"):
            raise LayerwiseError(f"{why}. strategy='data' runs the model as it is written") from why
        if self.batch < world.size:
            needs = f"needs a sample on every rank, and there are {self.batch} for {world.size}"
            raise LayerwiseError(f"{why}. The model as it is written {needs}") from why
        imported = network_as_written(self.model, self.call, self.batch, why, self.lists)
        graph = imported.graph
        world.comm.handshake({"model": graph.digest, "what keeps it from being split": str(why)})
        agreed = self.plan or _data_plan(graph, world, self.request)
        dtype, local = getattr(torch, graph.dtype), uses_local_batch_norm(agreed)
        module = build_module(agreed, imported, world.comm, replace(self.runtime, dtype=dtype, local_batch_norm=local))
        return module, tuple(map(Text, _as_written_lines(agreed, world, why)))


def _data_plan(graph: LayerGraph, world: World, request: Request) -> Plan:
    """Returns a plan that splits samples over all ranks. Nothing is predicted."""
    facts = {"chosen": "data", "layerwise": __version__, "cost_options": {"local_batch_norm": request.local_batch_norm}}
    strategy = {LAYER: Config.of({"n": world.size})}
    size, order = world.size, world.device_order
    return Plan(
        request.name, graph.digest, graph.batch, size, min(world.gpus_per_node, size), "sample", True, strategy, order,
        provenance=facts,
    )  # fmt: skip


def _as_written_lines(plan: Plan, world: World, why: LayerwiseError) -> Iterator[str]:
    """Yields what is run, why, and whose samples its code sees."""
    yield f"layerwise: {plan.model} on {world}, {samples(plan.batch)} a step: data parallelism"
    yield f"the model is run as it is written, and samples alone are split, because {why}"
    if world.size > 1:
        local = plan.provenance["cost_options"] == {"local_batch_norm": True}
        norms = "each rank's own samples" if local else "all ranks' samples"
        yield (
            f"modules of batch norm take the statistics of {norms}; all else that its code makes of several samples, "
            "its random numbers, and branches that look at data are each rank's own, and its buffers are rank 0's, as "
            "with DistributedDataParallel; time and memory are not predicted"
        )
