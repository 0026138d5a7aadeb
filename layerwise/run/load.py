"""load: makes a model parallel on this rank, by a plan."""

from __future__ import annotations

import copy
import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.comm.start import join_default_group
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.graph.samples import check_samples
from layerwise.importers.load import Network, load_network, network_of, planned_call, with_constants
from layerwise.importers.torch.read.arguments import call_of
from layerwise.plan import Plan, load_plan
from layerwise.run.base import Run
from layerwise.run.compiling import settings_of
from layerwise.run.data_parallel.module import DataRun
from layerwise.run.data_parallel.replacements import replacements
from layerwise.run.guards.compare_model import ModelComparison
from layerwise.run.guards.hooks import check_modules, check_plain, check_traced, without_hooks
from layerwise.run.layered import LayeredRun
from layerwise.run.options import RuntimeOptions, check_types, plan_digest, uses_local_batch_norm
from layerwise.run.parallel import ParallelModule
from layerwise.run.state.initial import broadcast_values
from layerwise.run.state.model_state import settle_values
from layerwise.run.state.tree import Before, Names, collect, skeleton


def load(
    plan: Plan | str | os.PathLike[str],
    model: nn.Module | LayerGraph | Network | str | None = None,
    *,
    comm: Comm | None = None,
    device: torch.device | str | None = None,
    dtype: torch.dtype = torch.float32,
    weights: Mapping[str, Tensor] | None = None,
    seed: int = 0,
    local_batch_norm: bool | None = None,
    autocast: torch.dtype | None = None,
    checkpoint_activations: bool = False,
    compile: bool | Mapping[str, Any] = False,
    compare_ranks: bool = True,
    example_inputs: tuple[Any, ...] | Mapping[str, Any] | None = None,
) -> ParallelModule:
    """Returns this rank's part of a planned network. All ranks must call it with the same arguments.

        module = layerwise.run.load("plan.json", model, example_inputs=(x,))

    Args:
        plan: A plan, or the path of its file.
        model: The model that the plan is for, or its name as on the command line. A module on the meta device, or a
            built-in network, gets PyTorch's default initial values, drawn by position from `seed`: each rank creates
            only what it owns. If the ranks' modules have different values, rank 0's win. None: the model that the plan
            names, unless that is `package.module:callable`, which you must name yourself.
        comm: The ranks' communicator; one of a single rank runs any plan on one device. None: torch.distributed's
            default group if there is one, else a single rank.
        device: The device of this rank. None: the communicator's, or the CPU.
        dtype: Element type of parameters and, without autocast, of activations.
        weights: A state dict, possibly lazy, to use instead of the model's values.
        seed: Seed of random initial values and of dropout.
        local_batch_norm: Whether batch norm uses each rank's own samples. None: as the plan was searched.
        autocast: The type for mixed precision, such as torch.bfloat16.
        checkpoint_activations: Whether to recompute, beside the plan's, all layers that save memory by it.
        compile: Whether to use torch.compile on what a rank computes; a dict: its arguments.
        compare_ranks: Whether ranks with the same parameters compare a sample of them now and then.
        example_inputs: Inputs to trace a module with, (samples, ...) each, in order or by name.

    Returns:
        The parallel model, with its parameters on `device`.

    Raises:
        LayerwiseError: The plan is for another network or number of ranks, or an argument is invalid.
        CommError: The ranks have different plans, arguments or models.

    Examples:
        >>> import layerwise
        >>> x, quiet = torch.randn(8, 4), layerwise.ParallelOptions(verbose=False)
        >>> plan = layerwise.parallelize(nn.Linear(4, 2), x, options=quiet).plan
        >>> load(plan, nn.Linear(4, 2), example_inputs=(x,))(x).shape
        torch.Size([8, 2])
    """
    plan = plan if isinstance(plan, Plan) else load_plan(plan)
    if device is None:
        device = comm.device if comm is not None else "cpu"
    options = RuntimeOptions(
        torch.device(device),
        dtype,
        autocast,
        seed,
        uses_local_batch_norm(plan, local_batch_norm),
        recompute=checkpoint_activations,
        compile=settings_of(compile),
        compare_ranks=compare_ranks,
    )
    comm = comm if comm is not None else _default_comm(options.device)
    if isinstance(model, nn.Module):
        if example_inputs is None:
            raise LayerwiseError("a module needs example inputs to be traced: pass example_inputs=(tensor, ...)")
        check_plain(model)
        positional, named = call_of(model, example_inputs)
        with without_hooks(model):
            imported = network_of(
                model, positional, plan.batch, plan.model, named, shared=plan.shared, together=plan.together
            )
            network = replace(with_constants(imported, positional, named, dtype), itself=True)
    elif isinstance(model, LayerGraph):
        network = Network(model, {}, {})
    elif isinstance(model, Network):
        network = replace(model, itself=False)
    else:
        network = load_network(*planned_call(plan.model, model, plan.batch, plan.provenance), dtype)
    return build_module(plan, network, comm, options, weights=weights)


def build_module(
    plan: Plan,
    network: Network,
    comm: Comm,
    options: RuntimeOptions,
    *,
    weights: Mapping[str, Tensor] | None = None,
) -> ParallelModule:
    """Returns `load`'s result for a network that has been imported."""
    arguments = f"{options.dtype}, seed {options.seed}" + ", checkpoint_activations" * options.recompute
    arguments += ", compare_ranks=False" * (not options.compare_ranks) + ", compare_model" * options.compare_model
    comm.handshake({"plan": plan_digest(plan), "torch": torch.__version__, "arguments of load": arguments})
    broadcast_values(network.built, comm)
    graph = plan.layers(network.graph.rebatch(plan.batch))
    plan.check(graph)
    if comm.size == 1 and plan.gpus > 1:
        plan = serial(plan)
    plan.check(graph, comm.size)
    check_types(replace(options, autocast=None).typed(graph), options.dtype)
    if plan.io == "sample" and plan.batch < plan.gpus:
        raise LayerwiseError(
            f"a batch of {plan.batch} samples is too small to give each of {plan.gpus} ranks one: search with --io "
            "free, or with a larger batch"
        )
    to_replace = replacements(network, graph, plan, comm.size, options)
    layers = to_replace is None
    if layers:
        check_traced(graph)
        if plan.io == "sample":
            check_samples(graph)
        if network.itself and network.module is not None:
            check_modules(network.module)
    module = _place_of(network, layers=layers)
    before = Before(module)
    try:
        if to_replace is None:
            layered = LayeredRun(module, replace(network, graph=graph), plan, comm, options)
            if options.compare_model and network.itself and network.unproven is None and plan.io != "boxes":
                layered.comparison = ModelComparison(network.graph, network.structure)
            run: Run = layered
        else:
            settle_values(module, network, graph, options)
            assert network.arguments is not None
            run = DataRun(module, graph, plan, comm, options, to_replace, dict(network.keys), network.arguments)
        if weights is not None:
            run.load_state_dict(weights)
    except BaseException:
        before.put_back()
        raise
    run.keep()
    if layers or not network.itself:
        collect(network.module)
    return module  # type: ignore[return-value]


def _place_of(network: Network, *, layers: bool) -> nn.Module:
    """Returns the module to make parallel: the network's own, a copy, or, for a file, a module of names only."""
    if network.module is None:
        return Names()
    if network.itself:
        return network.module
    copied = skeleton(network.module) if layers else copy.deepcopy(network.module)
    if copied is None:
        raise LayerwiseError(
            "the model cannot be copied: pass the model that you will train, which is then changed in place"
        )
    return copied


def serial(plan: Plan) -> Plan:
    """Returns the plan of the same network on one device."""
    return replace(
        plan,
        gpus=1,
        gpus_per_node=1,
        device_order=(0,),
        shares=(),
        strategy={
            name: replace(config, degrees=(), placement="contiguous", states="replicated", weights=())
            for name, config in plan.strategy.items()
        },
    )


def _default_comm(device: torch.device) -> Comm:
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        return join_default_group(device)
    return SoloComm(device)
