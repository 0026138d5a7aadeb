"""Task: a model on ranks that have met becomes a parallel module."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import RenderableType
from torch import nn

from layerwise.api.arguments import check_autocast
from layerwise.api.machine import machine_of
from layerwise.api.planner import Choice, Planner, Request, Strategy, report
from layerwise.api.race import agreed_plans, contenders, kept, line, race
from layerwise.api.source import Model, dtype_of, network
from layerwise.api.world import World
from layerwise.comm.together import agree, alone
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network
from layerwise.importers.torch.read.arguments import Call
from layerwise.importers.torch.read.calls import RecordedCall, returning_written
from layerwise.plan import Plan, parse_plan
from layerwise.report.text import text
from layerwise.run.calls import CallPlans
from layerwise.run.guards.hooks import without_hooks
from layerwise.run.layered import LayeredRun
from layerwise.run.load import build_module
from layerwise.run.options import RuntimeOptions, uses_local_batch_norm
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.state.tree import without_memory

Built = tuple[ParallelModule, tuple[RenderableType, ...]]  # and what rank 0 shows of it


@dataclass(frozen=True, slots=True)
class Task:
    """A model that is to be made parallel, and the way to. Every rank has the same."""

    model: Model
    call: Call  # what one rank calls it with
    batch: int  # samples of all ranks together
    world: World
    request: Request
    plan: Plan | None = None  # the user's
    strategy: Strategy | None = None
    compile: Mapping[str, Any] | None = None  # torch.compile's arguments
    calls: Sequence[RecordedCall] = ()  # the ways in which it is called; (): by `call` alone
    as_called: bool = False  # with this batch alone

    def build(self) -> Built:
        """Returns the module. LayerwiseError where the model cannot be imported, or no plan fits."""
        a_module, options = isinstance(self.model, nn.Module), self.request.options
        with without_hooks(self.model) if isinstance(self.model, nn.Module) else nullcontext():
            shared = options.shared
            if self.plan is not None and shared is None:
                shared = self.plan.shared
            together = options.samples_together or (self.plan is not None and self.plan.together)
            how = partial(network, self.model, batch=self.batch, shared=shared, together=together)
            made, _ = agree(self.world.comm, lambda: (self._imported(partial(how, as_called=self.as_called)), None))
            ways = [replace(one, itself=a_module) for one in made]
        # The parameters of the last are those of all: a first chunk has no layers of what was before it.
        return self._by_layers(ways[-1], dtype_of(ways[-1]), ways)

    def _imported(self, how: Callable[..., Network]) -> list[Network]:
        """Returns the network of each way in which the model is called."""
        if not self.calls:
            return [how(call=self.call)]
        assert isinstance(self.model, nn.Module)
        calls = self.calls if self.world.size > 1 else self.calls[-1:]  # one rank runs the model as it is written
        found = list[Network]()
        for recorded in calls:
            with returning_written(self.model, recorded.unread):
                found.append(how(call=recorded.call))
        return found

    def _by_layers(self, imported: Network, dtype: torch.dtype, ways: Sequence[Network]) -> Built:
        """LayerwiseError where no plan fits, or the module has what layers would leave out."""
        world, plan, options = self.world, self.plan, self.request.options
        world.comm.handshake({"model": imported.graph.digest, "element type": str(dtype)})
        graph = fuse(imported.graph) if plan is None else plan.layers(imported.graph)
        check_autocast(self.request.autocast, dtype)
        request = replace(self.request, dtype=dtype)
        chosen = plan is not None or isinstance(self.strategy, str)
        machine = machine_of(graph, world, request, measure=not chosen)
        planner = Planner(graph, world, machine.profile, request)
        choice = alone(world.comm, lambda: planner.choose(self.strategy) if plan is None else planner.priced(plan))
        runtime = RuntimeOptions(
            self.world.comm.device,
            dtype,
            seed=options.seed,
            local_batch_norm=options.local_batch_norm,
            compile=self.compile,
            compare_ranks=options.compare_ranks,
            compare_model=options.compare_model,
        )
        if options.race > 1 and world.size > 1:
            choice = self._raced(choice, imported, runtime)
        told = {"shared": list(imported.shared)} if imported.shared else {}
        if choice is not None and (told or imported.together):
            facts = {**choice.plan.provenance, **told, "together": imported.together}
            choice = replace(choice, plan=replace(choice.plan, provenance=facts))
        agreed = parse_plan(world.comm.broadcast_text("" if choice is None else choice.plan.dumps()), "rank 0's plan")
        runtime = replace(runtime, local_batch_norm=uses_local_batch_norm(agreed))
        several = self.calls if world.size > 1 else ()
        kept = [without_memory(way) for way, _ in zip(ways, several, strict=False)]  # while its parameters are there
        module = build_module(agreed, imported, world.comm, runtime)
        run = of(module)
        if kept and isinstance(run, LayeredRun):
            self._add_ways(run, kept, Planner(graph, world, machine.profile, request), agreed)
        if choice is None:
            return module, ()
        notes = [*choice.notes, *machine.notes]
        if imported.unproven is not None and not imported.graph.unseen:
            notes.append(
                "the model was not run as it was imported, to see that its layers compute the same and its samples are "
                f"independent: {imported.unproven}"
            )
        if imported.shared_found:
            notes.append(
                f"{', '.join(imported.shared)}: as long as the batch, and yet the same for all samples, as running the "
                "model on some of them showed; ParallelOptions(shared=...) says otherwise"
            )
        noted = replace(choice, notes=tuple(notes))
        return module, (text(report(noted, world, machine.source)),)

    def _add_ways(self, run: LayeredRun, ways: Sequence[Network], planner: Planner, plan: Plan) -> None:
        """Plans every other way in which the model is called, around the same boxes of parameters."""
        comm, run.calls = self.world.comm, CallPlans(run, run.evaluation)
        quick = replace(planner.request, options=replace(planner.request.options, effort="quick"))
        for way, recorded in zip(ways, self.calls, strict=True):
            agreed = plan
            if way is not ways[-1]:
                beside = replace(planner, graph=fuse(way.graph), request=quick)
                choice = alone(comm, partial(beside.choose, None, plan))
                text = comm.broadcast_text("" if choice is None else choice.plan.dumps())
                agreed = parse_plan(text, "rank 0's plan")
            run.calls.add(way, agreed, recorded)

    def _raced(self, choice: Choice | None, imported: Network, runtime: RuntimeOptions) -> Choice | None:
        """Returns the choice whose plan is fastest on these ranks; None on ranks other than 0, as before."""
        comm = self.world.comm
        if self.request.options.io is not None:
            raise LayerwiseError("race= feeds each rank its samples: leave io= out of ParallelOptions")
        choices = alone(comm, lambda: [] if choice is None else contenders(choice, self.request.options.race))
        plans = agreed_plans(comm, lambda: [c.plan for c in choices or ()])
        training, autocast = not self.request.inference, self.request.autocast
        winner, runs = race(plans, imported, comm, runtime, self.call, training=training, autocast=autocast)
        if not choices:
            return None
        won = choices[winner]
        return replace(won, plan=kept(won.plan, runs), notes=(*won.notes, line(winner, runs)))
