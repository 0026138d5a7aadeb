"""Plans for the emulated cluster, by its links and layers as they were just measured: each layer by itself."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from benchmarks.common.networks import NETWORKS
from benchmarks.ranks.predictions import profile_of, with_times
from benchmarks.ranks.side_by_side import Layers
from layerwise.comm.base import Comm
from layerwise.config import Config, SearchSpace, States
from layerwise.cost.model import CostModel, CostOptions, Strategy
from layerwise.cost.price import measured_share
from layerwise.cost.timeline.simulate import timeline
from layerwise.machine import Profile
from layerwise.measure.cells import CellTask, wanted_cells
from layerwise.measure.job import ENOUGH
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.partition.sharding import may_shard
from layerwise.plan import Plan
from layerwise.search.baselines import baseline
from layerwise.search.find import best_cap, candidate, search
from layerwise.search.make_plan import make_plan

OPTIMIZER = "momentum"
OTHER = 5 << 20  # bytes of a bucket


def model_of(name: str, profile: Profile, ranks: int) -> CostModel:
    """The cost model of the network at its batch for so many ranks."""
    graph = NETWORKS[name].graph(ranks)
    options = CostOptions(io="sample" if graph.batch >= ranks else "free", optimizer=OPTIMIZER)
    return CostModel(graph, profile.device_graph(ranks), options)


def space_of(name: str, ranks: int) -> SearchSpace:
    """What the search may choose from."""
    return SearchSpace(ranks, NETWORKS[name].dims, spread=True)


def measured_model(name: str, comm: Comm, links_s: float, layers_s: float) -> tuple[CostModel, list[Strategy], Layers]:
    """Over links and layers that all ranks have measured at once, as when they train; the strategies whose layers are
    all measured, the fastest first; and these layers.

    For `layers_s` the layers of the fixed splits and of data parallelism are measured, then those of the best plan,
    until nothing is missing of it.
    """
    layers = Layers(comm, OPTIMIZER)
    model = model_of(name, profile_of(comm, links_s), comm.size)
    return *measured_layers(model, space_of(name, comm.size), layers, layers_s), layers


def measured_layers(
    model: CostModel, space: SearchSpace, layers: Layers, layers_s: float
) -> tuple[CostModel, list[Strategy]]:
    """The model over layers that are measured for so long, and the strategies whose layers are all measured, the
    fastest first."""
    ends = time.perf_counter() + layers_s
    wanted = [baseline(model, "data"), *(fixed for dim in "dhw" if (fixed := along(model, dim)) is not None)]
    while True:
        left = {cell.key: cell for strategy in wanted for cell in layers.measuring.left(_cells(model, strategy))}
        budget_s = layers.comm.all_gather_object(ends - time.perf_counter())[0]
        if not left or budget_s <= 0:
            break
        layers.take(list(left.values()), budget_s)
        model = with_times(model, layers.known)
        wanted.append(search(model, space).best.strategy)
    full = [strategy for strategy in wanted if not layers.measuring.left(_cells(model, strategy))]
    return model, sorted(full, key=lambda strategy: timeline(model, strategy).total_s)


def priced_anew(
    model: CostModel, name: str, layers: Layers, made: Mapping[str, Plan], budget_s: float
) -> Mapping[str, Plan]:
    """The same plans, priced by times that are taken now: among many a search chooses those that seem too short."""
    strategies = {
        key: {layer.name: plan.strategy[layer.name] for layer in model.graph.inner} for key, plan in made.items()
    }
    cells = {cell.key: cell for strategy in strategies.values() for cell in _cells(model, strategy)}
    layers.take(list(cells.values()), budget_s)
    now, space = with_times(model, layers.known), space_of(name, model.devices.count)
    found = ((key, candidate(now, key, strategy)) for key, strategy in strategies.items())
    return {key: make_plan(_spec(name), "emulated", now, space, one, fused=True) for key, one in found}


def _spec(name: str) -> str:
    return f"benchmarks.common.networks:{name}"


def _cells(model: CostModel, strategy: Strategy) -> Collection[CellTask]:
    return wanted_cells(model, {layer.name: [strategy[layer.name]] for layer in model.graph.inner}).values()


SHARED: Mapping[str, States] = {"sharded": "sharded", "gathered": "gathered"}  # how the data-parallel plan has states


def plans(
    model: CostModel, name: str, wanted: Collection[str], measured: Sequence[Strategy] = ()
) -> Mapping[str, Plan]:
    """Those of these that are `wanted` and possible.

    `data`: samples over all ranks, local batch norm. `capped`: the same with the buckets that search finds best, or of
    5 MiB where it keeps DistributedDataParallel's. `searched`: the best plan that layerwise finds; where less than
    `ENOUGH` of its compute time is measured, the first of the `measured` strategies, if there are any: a fit does not
    know PyTorch's kernels either, and what it takes for fast is what the search takes.
    `sharded`, `gathered`: as `data`, and each rank keeps its part of the optimizer's state, or of the parameters, too.
    `fixed d`: of volumes, all layers split along depth, as in Dryden et al., Channel and filter parallelism for
    large-scale CNN training, SC 2019 (DistConv), where one split of space is chosen for the whole network.
    """
    graph, ranks, space = model.graph, model.devices.count, space_of(name, model.devices.count)
    local = CostModel(graph, model.devices, replace(model.options, local_batch_norm=True))
    strategies = dict[str, tuple[CostModel, Mapping[str, Config]]]()
    if (fixed := along(model, "d")) is not None:
        strategies["fixed d"] = model, fixed
    if model.options.io == "sample":
        data = baseline(local, "data")
        strategies["data"] = local, data
        for key, states in SHARED.items():
            shared = {
                layer.name: replace(data[layer.name], states=states)
                for layer in graph.inner
                if may_shard(layer, data[layer.name], ranks)
            }
            strategies[key] = local, {**data, **shared}
    found = [(key, of, candidate(of, key, strategy)) for key, (of, strategy) in strategies.items() if key in wanted]
    if "capped" in wanted and "data" in strategies:
        cap = best_cap(*strategies["data"])
        found.append(("capped", local, candidate(local, "data", data, None, OTHER if cap == BUCKET_BYTES else cap)))
    if "searched" in wanted:
        best = search(model, space).best
        if measured and measured_share(model, best.strategy) < ENOUGH:
            best = candidate(model, "measured", measured[0])
        found.append(("searched", model, best))
    return {key: make_plan(_spec(name), "emulated", of, space, one, fused=True) for key, of, one in found}


def along(model: CostModel, dim: str) -> dict[str, Config] | None:
    """Every layer split along one dimension of space over as many ranks as it has slices for, what has none is on one.

    None where no layer has enough for all ranks.
    """
    ranks = model.devices.count
    most = {layer.name: layer.space.max_degree(dim) for layer in model.graph.inner}
    return {name: Config.of({dim: min(ranks, n)}) for name, n in most.items()} if max(most.values()) >= ranks else None


def in_short(plan: Plan) -> str:
    """Runs of layers with equal configurations: `0.0 … 0.12 {n=4}, 2.1 … 2.4 {c=4}, 2.6 {n=4}`."""
    runs: list[tuple[list[str], Config]] = []
    for name, config in plan.strategy.items():
        if not runs or runs[-1][1] != config:
            runs.append(([], config))
        runs[-1][0].append(name)
    ends = (f"{names[0]} … {names[-1]}" if len(names) > 1 else names[0] for names, _ in runs)
    return ", ".join(f"{end} {config}" for end, (_, config) in zip(ends, runs, strict=True))
