"""Plans for the emulated cluster: its links, and this machine's speed as it was just measured."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch

from benchmarks.common.calibrated import calibrated
from benchmarks.common.networks import NETWORKS
from layerwise.config import Config, SearchSpace, States
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.torch.from_torch import from_torch
from layerwise.machine import Profile, load
from layerwise.partition.sharding import may_shard
from layerwise.plan import Plan
from layerwise.search.baselines import baseline
from layerwise.search.find import candidate, search
from layerwise.search.make_plan import make_plan

GOODPUT = 0.92  # of the nominal rate: what gloo's all_reduce of 16 MB reaches here, headers and all
OPTIMIZER = "momentum"


@dataclass(frozen=True, slots=True)
class Measured:
    """What a plan rests on."""

    step_s: float  # of one rank without communication, all ranks at work
    samples: int  # of that step
    rate: float | None  # of each node's link in bits per second; None: no limit
    latency_s: float  # of a message


def graph_of(name: str, batch: int) -> LayerGraph:
    """The network, unfused, with `batch` samples."""
    network = NETWORKS[name]
    with torch.device("meta"):
        module, examples = network.build(), (torch.empty(2, *network.input_shape),)
    return from_torch(module, examples, name=name).rebatch(batch)


def profile_of(name: str, measured: Measured) -> Profile:
    """`cpu`, its speed scaled so that one rank's step takes as long as measured, and the links of the emulation."""
    node = load("cpu").levels[0]
    bandwidth = GOODPUT * measured.rate / 8 if measured.rate else node.bandwidth_bytes_per_s
    graph = fuse(graph_of(name, measured.samples))
    return calibrated(graph, measured.step_s, measured.latency_s, bandwidth, OPTIMIZER)


SHARED: Mapping[str, States] = {"sharded": "sharded", "gathered": "gathered"}  # how the data-parallel plan has states


def plans(name: str, ranks: int, measured: Measured) -> Mapping[str, Plan]:
    """`data`: samples over all ranks, local batch norm. `searched`: the best plan that layerwise finds.

    `sharded`, `gathered`: as `data`, and each rank keeps its part of the optimizer's state, or of the parameters, too.
    `fixed d`: of volumes, all layers split along depth, as in Dryden et al., Channel and filter parallelism for
    large-scale CNN training, SC 2019 (DistConv), where one split of space is chosen for the whole network.
    """
    devices = profile_of(name, measured).device_graph(ranks)
    batch = NETWORKS[name].global_batch(ranks)
    graph, space = fuse(graph_of(name, batch)), SearchSpace(ranks, NETWORKS[name].dims, spread=True)
    io = "sample" if batch >= ranks else "free"
    model = CostModel(graph, devices, CostOptions(io=io, optimizer=OPTIMIZER))
    spec = f"benchmarks.common.networks:{name}"
    found = search(model, space)
    made = {"searched": make_plan(spec, "emulated", model, space, found, fused=True)}
    if any(layer.space.max_degree("d") >= ranks for layer in graph.inner):
        fixed = candidate(model, "fixed d", {layer.name: _along_d(layer, ranks) for layer in graph.inner})
        made["fixed d"] = make_plan(spec, "emulated", model, space, replace(found, best=fixed), fused=True)
    if batch >= ranks:
        local = CostModel(graph, devices, CostOptions(io=io, optimizer=OPTIMIZER, local_batch_norm=True))
        data = candidate(local, "data", baseline(local, "data"))
        result = search(local, space)
        made["data"] = make_plan(spec, "emulated", local, space, replace(result, best=data), fused=True)
        for key, states in SHARED.items():
            strategy = {
                layer.name: replace(config, states=states)
                for layer in graph.inner
                if may_shard(layer, config := data.strategy[layer.name], ranks)
            }
            shared = candidate(local, key, {**data.strategy, **strategy})
            made[key] = make_plan(spec, "emulated", local, space, replace(result, best=shared), fused=True)
    return made


def _along_d(layer: Layer, ranks: int) -> Config:
    """Over as many ranks as it has slices for; what has no depth is on one."""
    return Config.of({"d": min(ranks, layer.space.max_degree("d"))})


def in_short(plan: Plan) -> str:
    """Runs of layers with equal configurations: `0.0 … 0.12 {n=4}, 2.1 … 2.4 {c=4}, 2.6 {n=4}`."""
    runs: list[tuple[list[str], Config]] = []
    for name, config in plan.strategy.items():
        if not runs or runs[-1][1] != config:
            runs.append(([], config))
        runs[-1][0].append(name)
    ends = (f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0] for names, _ in runs)
    return ", ".join(f"{end} {config}" for end, (_, config) in zip(ends, runs, strict=True))
