"""parallelize: splits the layers of the model of your training loop over the ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, TypedDict

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

from layerwise.api.arguments import DEFAULT, ParallelOptions, check, check_autocast, facts
from layerwise.api.build import Task
from layerwise.api.loaders import example_of
from layerwise.api.planner import Request, Strategy
from layerwise.api.source import ExampleInputs, Model, device_of, examples_of
from layerwise.api.world import join
from layerwise.arguments import Count, checked
from layerwise.cli import console
from layerwise.errors import LayerwiseError
from layerwise.importers.torch.read.calls import RecordedCall, recorded, unlike
from layerwise.importers.torch.read.fed import fed_by
from layerwise.machine import reserved_bytes
from layerwise.plan import Plan, load_plan
from layerwise.process import process_kept
from layerwise.quantities import parse_bytes
from layerwise.run.compiling import settings_of
from layerwise.run.parallel import ParallelModule, of
from layerwise.run.step_check import StepCheck


class Further(TypedDict, total=False):
    """The keywords of `parallelize` that `fit` hands on."""

    strategy: Strategy | Plan | os.PathLike[str] | None
    memory_limit: float | str | None
    compile: bool | Mapping[str, Any]
    device_mesh: DeviceMesh | dist.ProcessGroup | None


class Keywords(Further, total=False):
    """The keywords of `parallelize`, which the integrations take, too."""

    batch: Count | None
    autocast: torch.dtype | None
    inference: bool
    options: ParallelOptions


@process_kept()
@torch.inference_mode(False)  # within which parameters and examples would be of no use to training
@checked
def parallelize(
    model: Model,
    example_inputs: ExampleInputs | DataLoader[Any] | Callable[[], object] | None = None,
    *,
    strategy: Strategy | Plan | os.PathLike[str] | None = None,
    batch: Count | None = None,
    memory_limit: float | str | None = None,
    autocast: torch.dtype | None = None,
    compile: bool | Mapping[str, Any] = False,
    inference: bool = False,
    device_mesh: DeviceMesh | dist.ProcessGroup | None = None,
    options: ParallelOptions = DEFAULT,
) -> ParallelModule:
    """Splits every layer of `model` in the way that is predicted to be fastest, and returns the changed model.

        model = layerwise.parallelize(model, example_inputs)    # under torchrun; was: DistributedDataParallel(model)
        optimizer = torch.optim.AdamW(model.parameters())       # after this call

    Nothing else in the loop changes: each rank feeds its own samples and takes the loss of its own outputs. The numbers
    are those of one device on the samples of all ranks together, where the loss is a mean over samples. Every rank
    calls it with the same arguments. Without torchrun the model runs on one device.

    A script for one device needs these two lines:

        model = layerwise.parallelize(model, loader)    # a batch of the loader is that of all ranks together
        loader = layerwise.split(loader, model)         # each rank loads its share of every batch

    Args:
        model: An nn.Module (where the ranks' values differ, rank 0's win; on the meta device they are drawn from
            `options.seed`), an ExportedProgram, or the path of an .onnx file.
        example_inputs: What one rank calls the model with: a tensor, a tuple, or a dict of arguments by name. Or the
            DataLoader of one device, of (inputs, target) or of tensors by name; its batch is that of all ranks. Or, for
            inference, a function that calls the model, such as `lambda: vae.decode(latent)`, which runs on shapes
            alone: every rank then makes these calls, and is returned all; state between them stays in boxes.
        strategy: How to split, where you know it. A name: "data", "model" or "owt". Some layers by hand, as
            {layers: {dimension: degree}}: {"fc*": {"c": 4}} splits outputs, {"head": {"k": 4}} inputs, {} means one
            device; layers are named singly, by a module around them, or with * and ?, and all others are optimised. A
            `Plan`, or its .json file. None: every layer is optimised.
        batch: The samples of all ranks together. None: the example's times the number of ranks. With fewer samples than
            ranks every rank feeds the whole batch, or its boxes of it where the model returns its loss.
        memory_limit: The bytes of a device that a step may take, or a text such as "14GB". Layers are recomputed, or
            share out their states, where that is needed. None: what a device has, less what libraries take.
        autocast: torch.bfloat16 or torch.float16, where the loop calls the model within torch.autocast of that type.
        compile: Whether torch.compile compiles what a rank computes by itself; a dict has its arguments.
        inference: Whether to plan for the forward pass alone, with nothing saved. The model is then in evaluation mode,
            and its parameters are not trained.
        device_mesh: The ranks to plan for, which alone call this: a 1-D mesh such as `mesh["domain"]`, or a process
            group. The first dimension of a 2-D mesh has replicas, each of which computes samples of its own. None: all
            ranks.
        options: What few scripts need, as `ParallelOptions` says.

    Returns:
        The model, changed in place: a parallel module.

    Raises:
        LayerwiseError: The model, the inputs, the strategy or the memory limit will not do.
        CommError: Ranks are missing, or have other arguments.

    Examples:
        >>> import layerwise
        >>> quiet = layerwise.ParallelOptions(verbose=False)
        >>> model = layerwise.parallelize(torch.nn.Linear(4, 2), torch.randn(8, 4), options=quiet)  # on one device
        >>> model(torch.randn(8, 4)).shape, model.plan.gpus
        (torch.Size([8, 2]), 1)
    """
    check(model, options.optimizer, memory_limit)
    check_autocast(autocast)
    settings = settings_of(compile)
    if isinstance(example_inputs, DataLoader):
        if batch is not None:
            raise LayerwiseError("batch= and the DataLoader both say how many samples a batch has: leave batch= out")
        example_inputs, batch = example_of(example_inputs)
    plan, named = plan_or_strategy(strategy)
    calls, as_called = list[RecordedCall](), False
    if callable(example_inputs) and not isinstance(example_inputs, torch.Tensor):
        if not (inference and isinstance(model, nn.Module)):
            raise LayerwiseError("a function as example_inputs calls a module in inference: give inference=True")
        if options.io is not None or batch is not None or plan is not None:
            raise LayerwiseError(
                "a function as example_inputs says what every rank feeds: leave out batch=, io= and plans"
            )
        if options.race > 1:
            raise LayerwiseError("a function as example_inputs is not raced: leave race= out of ParallelOptions")
        calls = recorded(model.eval(), example_inputs)
        several = unlike(calls)
        options = replace(options, io="boxes" if several else "free")
        call, calls = calls[-1].call, calls if several else []
        examples = tuple(x for x in pytree.tree_leaves(call) if isinstance(x, torch.Tensor))
        as_called = True
    else:
        call, examples = examples_of(example_inputs, model)
    device = device_of(model, examples)
    world = join(device, device_mesh, options.comm, options.timeout_s)
    io, shared = options.io, options.shared
    if io is not None and plan is not None and plan.io != io:
        raise LayerwiseError(f"the plan has io {plan.io!r}, not {io!r}: leave io= out of ParallelOptions")
    full = io is not None or (plan is not None and plan.io == "boxes")
    arguments = {
        "batch": batch, "strategy": repr(named), "inference": inference, "autocast": autocast,
        "compile": settings is not None, "memory_limit": memory_limit, "names of inputs": ", ".join(call[1]),
        "calls of the model": " | ".join(str(sorted(map(repr, recorded.key))) for recorded in calls),
        "device_mesh": f"{world.replicas} x {world.size // world.replicas} ranks {world.device_order}",
    }  # fmt: skip
    world.comm.handshake(facts(plan, call, options, arguments))  # before the work that they are for
    own = examples[0].shape[0] if examples else 0
    if shared and isinstance(model, nn.Module):  # the first of them may be one of these
        own = fed_by(model, call, shared).batch
    counted = own * (1 if full else world.size)
    samples = _batch(batch, counted, plan)
    have = world.memories[0] if world.memories else world.memory_bytes
    available = have - reserved_bytes(have, device.type)
    memory = available if memory_limit is None else parse_bytes(memory_limit, "memory_limit")
    request = Request(_title(model), memory, options, autocast=autocast, inference=inference)
    task = Task(
        model,
        call,
        samples,
        world,
        request,
        plan=plan,
        strategy=named,
        compile=settings,
        calls=calls,
        as_called=as_called,
    )
    module, shown = task.build()
    if inference:
        module.eval().requires_grad_(False)
    if options.verbose and world.comm.rank == 0:
        if not inference:
            of(module).step_check = StepCheck.of(of(module).plan, lambda line: console().print(line, soft_wrap=True))
        for line in shown:
            console().print(line)
    return module


def plan_or_strategy(strategy: Strategy | Plan | os.PathLike[str] | None) -> tuple[Plan | None, Strategy | None]:
    """Returns a plan, where `strategy` is one or its file, and what else says how to split."""
    if isinstance(strategy, Plan):
        return strategy, None
    if isinstance(strategy, os.PathLike) or (isinstance(strategy, str) and strategy.endswith(".json")):
        return load_plan(strategy), None
    return None, strategy


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
