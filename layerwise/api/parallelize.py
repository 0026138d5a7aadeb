"""parallelize: a model in a training loop of the user's becomes this rank's part of a layer-wise parallel one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
import torch.distributed as dist
from rich.text import Text
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from layerwise.api.accumulate import Accumulate
from layerwise.api.arguments import ParallelOptions, check, check_autocast, check_io, facts
from layerwise.api.build import Task
from layerwise.api.loaders import example_of
from layerwise.api.planner import Request, Strategy
from layerwise.api.source import ExampleInputs, Model, device_of, examples_of
from layerwise.api.world import join
from layerwise.arguments import Count, checked
from layerwise.cli import console
from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.calls import RecordedCall, recorded
from layerwise.importers.torch.read.fed import fed_by
from layerwise.machine import reserved_bytes
from layerwise.plan import Plan, load_plan
from layerwise.process import process_kept
from layerwise.quantities import parse_bytes
from layerwise.run.compiling import settings_of
from layerwise.run.options import RuntimeOptions
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.step_check import StepCheck

DEFAULT = ParallelOptions()


class Further(TypedDict, total=False):
    """The keywords of `parallelize` that `fit` hands on."""

    strategy: Strategy | None
    plan: Plan | str | os.PathLike[str] | None
    memory_limit: float | str | None
    compile: bool | Mapping[str, Any]
    io: Literal["boxes", "free"] | None
    inference: bool
    shared: Sequence[str] | None
    device_mesh: DeviceMesh | dist.ProcessGroup | None
    verbose: bool
    options: ParallelOptions


class Keywords(Further, total=False):
    """The keywords of `parallelize`, which the integrations take, too."""

    batch: Count | None
    optimizer: str
    autocast: torch.dtype | None


@process_kept()
@torch.inference_mode(False)  # within which parameters and examples would be of no use to training
@checked
def parallelize(
    model: Model,
    example_inputs: ExampleInputs | DataLoader[Any] | Callable[[], object] | None = None,
    *,
    strategy: Strategy | None = None,
    plan: Plan | str | os.PathLike[str] | None = None,
    batch: Count | None = None,
    memory_limit: float | str | None = None,
    optimizer: str = "sgd",
    autocast: torch.dtype | None = None,
    compile: bool | Mapping[str, Any] = False,
    io: Literal["boxes", "free"] | None = None,
    inference: bool = False,
    shared: Sequence[str] | None = None,
    device_mesh: DeviceMesh | dist.ProcessGroup | None = None,
    verbose: bool = True,
    options: ParallelOptions = DEFAULT,
) -> ParallelModule:
    """Returns this rank's part of `model`, every layer of which is split as is predicted to be fastest.

        model = layerwise.parallelize(model, example_inputs)    # under torchrun; was: DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())       # after this call

    Nothing else in the loop changes: each rank feeds its own samples and takes the loss of its own outputs. The numbers
    are those of one device on all ranks' samples together, where the loss is a mean over samples. Every rank calls it
    alike; without torchrun the model runs on one device. A script for one device says two things:

        model = layerwise.parallelize(model, loader)    # a batch of all ranks together is one of the loader's
        loader = layerwise.split(loader, model)         # of which each rank loads its share

    Args:
        model: An nn.Module (where ranks' values differ, rank 0's win; on the meta device they are drawn from
            `options.seed`), an ExportedProgram, or the path of an .onnx file.
        example_inputs: What one rank calls the model with, a tensor, a tuple, or a dict of arguments by name; or one
            device's DataLoader of (inputs, target) or of tensors by name, whose batches are of all ranks together; or,
            for inference, a function that calls the model as it will be called, such as lambda: vae.decode(latent),
            which runs on shapes alone. Every rank then calls alike, and gets all; state between calls stays in boxes.
        strategy: "data", "model", "owt", or {layers: {dimension: degree}} for some layers, such as {"fc*": {"c": 4}}
            (outputs) or {"head": {"k": 4}} (inputs); {} is one device. Layers are named as one, as a module around
            them, or with * and ?. The others are optimised around them. None: all are.
        plan: A plan, or its file, to run without a search.
        batch: Samples of all ranks together. None: the example's times the number of ranks. With fewer samples than
            ranks every rank feeds the whole batch; where the model returns its loss, it may feed its boxes alone.
        memory_limit: Bytes a device, or a text such as "14GB", that a step may take; layers recompute or share out
            their states where that is needed. None: what a device has, less what libraries take.
        optimizer: "sgd", "momentum" or "adam", for the memory of its state.
        autocast: torch.bfloat16 or torch.float16, where the loop calls the model within torch.autocast of that type.
        compile: What a rank computes by itself goes through torch.compile; a dict has its arguments.
        io: "boxes", where each rank feeds only its boxes of the inputs (`BoxLoader`), and the loss is inside the model;
            "free", where each feeds the whole batch. example_inputs are then those of the whole batch, also on the meta
            device. None: each feeds its samples, where each has one.
        inference: Plan for answers alone: the forward pass, with running statistics and nothing saved. The module is in
            evaluation mode, and its parameters are not trained.
        shared: Inputs, by name, that are the same for all samples and on all ranks, such as ("texts",) for the texts of
            classes. None: those as long as the example's batch are found out by running the model, and named.
        device_mesh: The ranks to plan for, which alone call this: a 1-D mesh, such as `mesh["domain"]`, or a process
            group. Of a 2-D mesh the first dimension has replicas, each of which computes samples of its own in every
            layer. None: all ranks.
        verbose: Rank 0 prints what was chosen, what it gains, and what that rests on.
        options: What needs to be said seldom.

    Returns:
        The parallel module.

    Raises:
        LayerwiseError: The model, the inputs, the strategy, the plan or the memory will not do.
        CommError: Ranks are missing, or were given something else.

    Examples:
        >>> import layerwise
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 2), torch.randn(8, 4), verbose=False)  # on one device
        >>> model(torch.randn(8, 4)).shape, model.plan.gpus
        (torch.Size([8, 2]), 1)
    """
    if plan is not None and strategy is not None:
        raise LayerwiseError("plan= and strategy= both say how to split: give one of them")
    check(model, optimizer, memory_limit)
    check_autocast(autocast)
    settings = settings_of(compile)
    if isinstance(example_inputs, DataLoader):
        if batch is not None:
            raise LayerwiseError("batch= and the DataLoader both say how many samples a batch has: leave batch= out")
        example_inputs, batch = example_of(example_inputs)
    calls, as_called = list[RecordedCall](), False
    if callable(example_inputs) and not isinstance(example_inputs, torch.Tensor):
        if not (inference and isinstance(model, nn.Module)):
            raise LayerwiseError("a function as example_inputs calls a module in inference: give inference=True")
        if io is not None or plan is not None or batch is not None:
            raise LayerwiseError(
                "a function as example_inputs says what every rank feeds: leave io=, plan=, batch= out"
            )
        calls = recorded(model.eval(), example_inputs)
        io = "boxes" if len(calls) > 1 or calls[0].carried else "free"
        call, calls = calls[-1].call, calls if io == "boxes" else []
        examples = tuple(x for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor))
        as_called = True
    else:
        call, examples = examples_of(example_inputs, model)
    device = device_of(model, examples)
    world = join(device, device_mesh, options.comm, options.timeout_s)
    user_plan = plan if isinstance(plan, Plan) or plan is None else load_plan(plan)
    check_io(io, user_plan)
    full = io is not None or (user_plan is not None and user_plan.io == "boxes")
    arguments = {
        "batch": batch, "strategy": repr(strategy), "io": io, "inference": inference, "optimizer": optimizer,
        "autocast": autocast, "compile": settings is not None, "memory_limit": memory_limit,
        "device_mesh": f"{world.replicas} x {world.size // world.replicas} ranks {world.device_order}",
        "names of inputs": ", ".join(call[1]), "shared": shared and ", ".join(shared),
    }  # fmt: skip
    world.comm.handshake(facts(user_plan, call, options, arguments))  # before the work that they are for
    own = examples[0].shape[0] if examples else 0
    if shared and isinstance(model, nn.Module):  # the first of them may be one of these
        own = fed_by(model, call, shared).batch
    counted = own * (1 if full else world.size)
    samples = _batch(batch, counted, user_plan)
    available = world.memory_bytes - reserved_bytes(world.memory_bytes, device.type)
    memory = available if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    world = world if memory_limit is None else replace(world, memories=())
    local = options.local_batch_norm
    request = Request(_title(model), torch.float32, memory, optimizer, local, autocast, io, inference, options.effort)
    runtime = RuntimeOptions(
        device,
        seed=options.seed,
        local_batch_norm=local,
        compile=settings,
        compare_ranks=options.compare_ranks,
        compare_model=options.compare_model,
    )
    asked = model, call, samples, user_plan, strategy, world, request, runtime, options, shared, calls, as_called
    module, shown = Task(*asked).build()
    if inference:
        module.eval().requires_grad_(False)
    if (every := options.sync_every) > 1:
        Accumulate(module, every)
        batch_of_step = f"the effective batch is {every * of(module).plan.batch:,}"
        shown += (Text(f"sync_every={every}: the optimizer steps every {every} batches; {batch_of_step}"),)
    if verbose and world.comm.rank == 0:
        if not inference:
            of(module).step_check = StepCheck.of(of(module).plan, lambda line: console().print(line, soft_wrap=True))
        for line in shown:
            console().print(line)
    return module


def _batch(batch: int | None, counted: int, plan: Plan | None) -> int:
    """Returns the samples of all ranks together. counted: those of the examples, 0 where there are none."""
    if batch is None:
        if plan is not None:
            return plan.batch
        if not counted:
            raise LayerwiseError("give example_inputs, or batch=, the number of samples of all ranks together")
        return counted
    if plan is not None and plan.batch != batch:
        raise LayerwiseError(f"the plan is for a global batch of {plan.batch}, not {batch}: leave batch= out")
    return batch


def _title(model: Model) -> str:
    if isinstance(model, str | os.PathLike):
        return Path(model).name
    return type(model).__name__
