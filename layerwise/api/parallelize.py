"""parallelize: a model in a training loop of the user's becomes this rank's part of a layer-wise parallel one."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from layerwise.api.arguments import check, check_autocast, check_io, facts
from layerwise.api.data import loaders as loaders_of
from layerwise.api.loop.accumulate import Accumulate, auto
from layerwise.api.loop.guards import watch
from layerwise.api.loop.keywords import ByPosition, by_name
from layerwise.api.planning.choose import Planner, Request, Strategy
from layerwise.api.planning.machine import Machine, built_in
from layerwise.api.planning.machine import given as given_profile
from layerwise.api.planning.measuring import cached, measurable, measured
from layerwise.api.planning.source import ExampleInputs, Model, device_of, dtype_of, examples_of, network
from layerwise.api.planning.table import table
from layerwise.api.world import World, join
from layerwise.cli import console
from layerwise.comm.base import Comm
from layerwise.comm.together import alone
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.machine import reserved_bytes
from layerwise.machine.profile import Profile
from layerwise.plan import Plan, load_plan, parse_plan
from layerwise.quantities import parse_bytes
from layerwise.run.compiling import settings_of
from layerwise.run.guards.hooks import without_hooks
from layerwise.run.load import build_module
from layerwise.run.module import LayeredModule
from layerwise.run.options import RuntimeOptions, uses_local_batch_norm
from layerwise.run.parallel import ParallelModule
from layerwise.version import __version__

Examples = ExampleInputs | Mapping[str, Tensor]


class How(TypedDict, total=False):
    """The keywords of `parallelize`, which `fit` takes, too."""

    plan: Plan | str | os.PathLike[str] | None
    profile: Profile | str | os.PathLike[str] | None
    strategy: Strategy | None
    batch: int | None
    io: Literal["boxes"] | None
    memory_limit: float | str | None
    device_mesh: DeviceMesh | dist.ProcessGroup | None
    measure_s: float
    optimizer: str
    local_batch_norm: bool
    autocast: torch.dtype | None
    compile: bool | Mapping[str, Any]
    sync_every: int | Literal["auto"]
    seed: int
    timeout_s: float
    verbose: bool
    comm: Comm | None


@overload
def parallelize(
    model: Model, example_inputs: DataLoader[Any], *held_out: DataLoader[Any], **how: Unpack[How]
) -> tuple[Any, ...]: ...


@overload
def parallelize(model: Model, example_inputs: Examples | None = None, **how: Unpack[How]) -> ParallelModule: ...


def parallelize(
    model: Model,
    example_inputs: Examples | DataLoader[Any] | None = None,
    *held_out: DataLoader[Any],
    plan: Plan | str | os.PathLike[str] | None = None,
    profile: Profile | str | os.PathLike[str] | None = None,
    strategy: Strategy | None = None,
    batch: int | None = None,
    io: Literal["boxes"] | None = None,
    memory_limit: float | str | None = None,
    device_mesh: DeviceMesh | dist.ProcessGroup | None = None,
    measure_s: float = 30.0,
    optimizer: str = "sgd",
    local_batch_norm: bool = False,
    autocast: torch.dtype | None = None,
    compile: bool | Mapping[str, Any] = False,
    sync_every: int | Literal["auto"] = 1,
    seed: int = 0,
    timeout_s: float = 30.0,
    verbose: bool = True,
    comm: Comm | None = None,
) -> ParallelModule | tuple[Any, ...]:
    """This rank's part of `model`, split layer by layer in the way that is predicted to be fastest.

        model = layerwise.parallelize(model, example_inputs)    # under torchrun; was: DistributedDataParallel(model)

    Nothing else in the loop changes: each rank feeds its own samples, takes the loss of its own outputs, and steps the
    optimizer over `model.parameters()`, which is built after this call. On one device, and where the plan splits
    samples only, the model itself is run, with its own parameters; else these are DTensors, and an optimizer over those
    of before raises at its step. The numbers are those of one device on all ranks' samples together, where the loss is
    a mean over samples: as with DistributedDataParallel the mean of the ranks' losses is taken, which is not that of
    one with class weights or ignored targets (inside the model it is). torch.autocast around the call is followed, with
    GradScaler for float16.

        model, loader, held_out = layerwise.parallelize(model, loader, held_out)    # DataLoaders as one device has them

    also splits the data: what `loader` draws on rank 0 is a batch of all ranks together, of which each loads its share.
    From further loaders, to evaluate with, every rank has all of a batch; in evaluation, without gradients, each
    computes its share of it and gets all outputs.

    model: an nn.Module (every rank has built it; where the values differ, rank 0's win; on the meta device they are
    drawn by position from `seed`), an ExportedProgram, or the path of an .onnx or .pt2 file, with its weights.
    example_inputs: what one rank calls the model with: a tensor, a tuple, or a dict for a model that is called by
    names. It tells the device and the batch. Or a DataLoader of (inputs, target) or of tensors by name.
    batch: samples of all ranks together (default: the example's times the number of ranks); with fewer samples than
    ranks every rank feeds the whole batch. io: "boxes" where each rank reads only the boxes of the inputs that it
    needs (`BoxLoader` does, `read_boxes` says which), and gets its box of each output with samples, all of a loss
    and of numbers of the whole batch. Then example_inputs are those of the whole batch, also on the meta device, and a
    loss is inside the model, its target an input.
    strategy: "data", "model" or "owt", or {layer: {dimension: degree}} for some layers, such as {"fc": {"c": 4}}
    (outputs) or {"fc": {"k": 4}} (inputs); the others are optimised around them. plan: run this one, without a search.
    profile: of the machine. Default: measured on these ranks and kept in ~/.cache/layerwise; what is not there yet is
    measured in about `measure_s` seconds (0: nothing is measured, a built-in profile serves instead).
    memory_limit: bytes a device, or a text such as "14GB", that a step may take; where the fastest plan takes more,
    some layers are recomputed or share out their states (default: what a device has, of a GPU less what libraries take:
    `layerwise.machine.reserved_bytes`). device_mesh: 1-D, over all ranks, or a process group. optimizer: "sgd",
    "momentum" or "adam", for the memory of its state. local_batch_norm: statistics of each rank's own samples, as
    DistributedDataParallel has them. autocast: torch.bfloat16 or torch.float16 where the loop calls the model within
    torch.autocast of that type: the plan is one for mixed precision then. compile: True, or a dict of torch.compile's
    arguments such as {"mode": "max-autotune"}: what each rank computes by itself goes through torch.compile, and what
    communicates stays between the compiled parts; on one device that is torch.compile of the model. A compiled model
    has no second derivatives. sync_every=k: for data parallelism only, gradients travel and the optimizer steps every
    k-th time, for a batch k times as large; "auto": the least k whose communication is below 10 % of the time. verbose:
    rank 0 prints what was chosen, what it gains, and what that rests on.

    Every rank calls it alike. Without torchrun (and without a process group) it returns a working model on one device.
    LayerwiseError where the model, the inputs, the strategy, the plan or the memory do not do; CommError where ranks
    are missing or differ.
    """
    if plan is not None and strategy is not None:
        raise LayerwiseError("plan= and strategy= both say how to split: give one of them")
    check(model, optimizer, sync_every, memory_limit, batch)
    check_autocast(autocast)
    settings = settings_of(compile)
    if isinstance(example_inputs, DataLoader):
        if batch is not None:
            raise LayerwiseError("batch= and the DataLoader both say how many samples a batch has: leave batch= out")
        loaders = (example_inputs, *held_out)
        example_inputs, batch = loaders_of.example_of(example_inputs)
        for loader in held_out:
            loaders_of.check(loader)
    elif held_out:
        raise LayerwiseError(
            "give DataLoaders to evaluate with after the one to train on: parallelize(model, loader, ...)"
        )
    else:
        loaders = ()
    original = model
    names: tuple[str, ...] = ()
    if isinstance(example_inputs, Mapping) and isinstance(model, nn.Module):
        names = tuple(example_inputs)
        model, example_inputs = ByPosition(model, names), tuple(example_inputs.values())
    examples = examples_of(example_inputs, model)
    device = device_of(model, examples)
    if comm is None and device_mesh is not None and not (dist.is_available() and dist.is_initialized()):
        raise LayerwiseError("device_mesh needs torch.distributed's process group: start the script with torchrun")
    world = join(device, device_mesh, comm, timeout_s)
    wanted = plan if isinstance(plan, Plan) or plan is None else load_plan(plan)
    check_io(io, wanted, loaders)
    boxes = io == "boxes" or (wanted is not None and wanted.io == "boxes")
    samples = _batch(batch, examples, wanted, 1 if boxes else world.size)
    arguments = {
        "layerwise": __version__,
        "torch": torch.__version__,
        "batch": samples,
        "strategy": repr(strategy),
        "io": io,
        "sync_every": sync_every,
        "optimizer": optimizer,
        "local_batch_norm": local_batch_norm,
        "autocast": autocast,
        "compile": settings is not None,
        "memory_limit": memory_limit,
        "measure_s > 0": measure_s > 0,
        "profile": "by itself" if profile is None else "given",
        "names of inputs": ", ".join(names),
    }
    world.comm.handshake(facts(wanted, examples, arguments))  # before the work that they are for
    with without_hooks(original) if isinstance(original, nn.Module) else nullcontext():
        imported = network(model, examples, samples)
    if isinstance(original, nn.Module):
        imported = replace(imported, module=original, itself=True)
    dtype = dtype_of(imported)
    world.comm.handshake({"model": imported.graph.digest, "element type": str(dtype)})
    graph = fuse(imported.graph) if wanted is None else wanted.layers(imported.graph)
    own = world.memory_bytes - reserved_bytes(world.memory_bytes, device.type)
    memory = own if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    check_autocast(autocast, dtype)
    request = Request(_title(model), dtype, memory, optimizer, local_batch_norm, autocast, io)
    budget_s = measure_s if wanted is None and not isinstance(strategy, str) else 0.0
    machine = _machine(world, graph, request, budget_s) if profile is None else given_profile(profile)
    planner = Planner(graph, world, machine.profile, request)
    choice = alone(world.comm, lambda: planner.choose(strategy) if wanted is None else planner.given(wanted))
    agreed = parse_plan(world.comm.broadcast_text("" if choice is None else choice.plan.dumps()), "rank 0's plan")
    options = RuntimeOptions(device, dtype, seed=seed, local_batch_norm=uses_local_batch_norm(agreed), compile=settings)
    module = build_module(agreed, imported, world.comm, options)
    if isinstance(original, nn.Module):
        module.train(original.training)
        watch(original, module)
    if isinstance(module, LayeredModule) and names:
        by_name(module, names)
    note = _accumulate(module, sync_every)
    if choice is not None and verbose:
        noted = replace(choice, notes=(*choice.notes, *machine.notes, *note))
        console().print(table(noted, world, machine.source), soft_wrap=False)
    return (module, *loaders_of.shared(loaders, module)) if loaders else module


def _machine(world: World, graph: LayerGraph, request: Request, budget_s: float) -> Machine:
    """What is known of these ranks, or is measured now. On ranks other than 0, which do not plan, any."""
    base = built_in(world)
    planner = Planner(graph, world, base.profile, request)
    if budget_s > 0 and measurable(planner.options.dtype, world.comm):
        used = [] if world.comm.device.type == "cpu" else [world.comm.device]
        with torch.random.fork_rng(used, device_type=world.comm.device.type):  # the script draws as if without this
            known = measured(planner, budget_s)
    elif world.comm.rank == 0 and world.size > 1:
        known = cached(world)
    else:
        return base
    if known.profile is None:
        return replace(base, notes=known.notes)
    return Machine(known.profile, f"what was measured on these ranks ({known.path or 'not kept'})", known.notes)


def _accumulate(module: ParallelModule, every: int | Literal["auto"]) -> tuple[str, ...]:
    """Sets it up; what to say of it."""
    if every == 1 or (module.comm.size == 1 and every == "auto"):
        return ()
    if every == "auto":
        predicted = module.plan.predicted
        every, note = auto(module, predicted.get("forward_s", 0.0) + predicted.get("backward_s", 0.0))
    else:
        batch = f"the effective batch is {every * module.plan.batch:,}"
        note = f"sync_every={every}: the optimizer steps every {every} batches; {batch}"
    Accumulate(module, every)
    return (note,)


def _batch(batch: int | None, examples: tuple[Tensor, ...], plan: Plan | None, ranks: int) -> int:
    """Samples of all ranks together. ranks: of which each has as many as the example."""
    if batch is None:
        if plan is not None:
            return plan.batch
        if not examples:
            raise LayerwiseError("give example_inputs, or batch=, the number of samples of all ranks together")
        return examples[0].shape[0] * ranks
    if plan is not None and plan.batch != batch:
        raise LayerwiseError(f"the plan is for a global batch of {plan.batch}, not {batch}: leave batch= out")
    return batch


def _title(model: Model) -> str:
    if isinstance(model, str | os.PathLike):
        return Path(model).name
    return type(model.called if isinstance(model, ByPosition) else model).__name__
