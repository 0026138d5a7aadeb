"""What each rank of benchmarks.unequal runs: a rank alone, the searched plan and the best equal one, in turns."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from benchmarks.common.networks import NETWORKS, SMALL, Network
from benchmarks.ranks import cluster
from benchmarks.ranks.cluster_plan import OPTIMIZER, in_short
from benchmarks.ranks.cluster_variants import Ours, Torch
from benchmarks.ranks.rank import PATIENCE_S, run
from layerwise.api.arguments import ParallelOptions
from layerwise.api.machine import machine_of
from layerwise.api.planner import Planner, Request
from layerwise.api.world import World, join
from layerwise.cost.model import CostModel
from layerwise.plan import Plan, parse_plan
from layerwise.search.find import search
from layerwise.search.make_plan import make_plan
from layerwise.search.report.sentences import unequal_lines

ALONE = 3  # steps of a rank by itself, of which the first does not count


@dataclass
class Job:
    """One cell of the benchmark."""

    network: str
    measure_s: float
    budget_s: float
    rounds: int | None


def network_of(name: str) -> Network:
    """Returns a network by its name; "small" is the AlexNet-like one whose linear layers are 1,024 wide, not 4,096."""
    return replace(SMALL["alexnet"], title="AlexNet-like, 1,024 wide") if name == "small" else NETWORKS[name]


def alone_s(network: Network, batch: int, optimizer_steps: int = ALONE) -> list[float]:
    """Seconds of a step of the whole batch on each rank by itself, all at once, without communication."""
    variant, times = Torch(network.build(), network, batch, (dist.get_rank(),)), list[float]()
    for _ in range(optimizer_steps):
        began = time.perf_counter()
        variant.step()
        times.append(time.perf_counter() - began)
    each = [0.0] * dist.get_world_size()
    dist.all_gather_object(each, median(times[1:]))
    return each


def plans(name: str, world: World, job: Job) -> tuple[dict[str, Plan], dict[str, object]]:
    """The searched plan and the best one with equal boxes, by what was measured on these ranks; and what to say."""
    network = network_of(name)
    graph = network.graph(world.size)
    options = ParallelOptions(measure_s=job.measure_s, optimizer=OPTIMIZER)
    request = Request(f"benchmarks.common.networks:{name}", world.memory_bytes, options)
    machine = machine_of(graph, world, request, measure=True)
    planner, texts, about = Planner(graph, world, machine.profile, request), [""], dict[str, object]()
    if world.comm.rank == 0:
        choice = planner.choose(None)
        even = CostModel(graph, planner.devices, planner.options, ())
        space = replace(planner.space, weights=())
        equal = make_plan(name, "emulated", even, space, search(even, space), fused=True)
        model = choice.best.model
        assert choice.searched is not None
        about = {
            "weights": model.weights,
            "predicted_ideal_s": model.ideal_s,
            "said": list(unequal_lines(choice.searched)),
            "machine": [machine.source, *machine.notes],
        }
        texts = [choice.plan.dumps(), equal.dumps()]
    found = [
        parse_plan(world.comm.broadcast_text(texts[i] if world.comm.rank == 0 else ""), "rank 0's") for i in (0, 1)
    ]
    return {"searched": found[0], "equal": found[1]}, about


def measure(job: Job) -> dict[str, object]:
    """The figures; those of rank 0 are whole."""
    world = join(torch.device("cpu"), timeout_s=PATIENCE_S)
    made, about = plans(job.network, world, job)
    network = network_of(job.network)
    batch = network.global_batch(world.size)
    torch.manual_seed(0)
    each_s = alone_s(network, batch)
    variants = {name: Ours(network, plan, world.comm) for name, plan in made.items()}
    records = {name: cluster.Record() for name in variants}
    cluster.take_turns(cluster.Job("", [], job.budget_s, job.rounds, False, 0.0), variants, records)
    rows = {}
    for name, variant in variants.items():
        predicted = variant.plan.predicted
        rows[name] = {
            "step_s": median(records[name].times),
            "times_s": records[name].times,
            "predicted_s": [predicted[key] for key in ("timeline_low_s", "timeline_s", "timeline_high_s")],
            "plan": in_short(variant.plan),
            "losses": records[name].losses,
        }
    ideal_s = 1 / sum(1 / s for s in each_s)
    return {"kinds": world.kinds, "batch": batch, "alone_s": each_s, "ideal_s": ideal_s, "plans": rows, **about}


if __name__ == "__main__":
    run(Job, measure)
