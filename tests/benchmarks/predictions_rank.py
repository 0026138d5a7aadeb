"""What each rank of tests.benchmarks.predictions runs: measures links and layers, plans with them, runs the plans.

A rank keeps to one core, which it shares where there are more ranks than cores. The scheduler gives it whole ticks
(4 ms) there, so a wall clock says nothing of a layer that takes less: layers are timed by the CPU time that they take,
over the share of the core that a rank gets while all compute. A plan's step is timed by the wall clock, over blocks of
steps that follow each other as in training; the slowest rank counts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from statistics import median

import torch
from torch import nn

from layerwise.comm.base import Comm
from layerwise.comm.start import leave, start
from layerwise.config import SearchSpace
from layerwise.cost.measured import LAYER, step_name
from layerwise.cost.tables import CostModel, CostOptions
from layerwise.graph.from_torch import from_torch
from layerwise.graph.fuse import fuse
from layerwise.machine import Profile, load
from layerwise.machine.fields import Field
from layerwise.machine.layer_times import Conditions, LayerTimes
from layerwise.machine.layer_times_json import read, written
from layerwise.measure.__main__ import module
from layerwise.measure.bench import Mode, Update
from layerwise.measure.cells import Wanted, keys_of, wanted_cells
from layerwise.measure.layers import Measuring, timed
from layerwise.measure.links import measure_links
from layerwise.measure.links_profile import conditions, with_links
from layerwise.measure.links_shapes import find_topology
from layerwise.measure.overhead import overhead
from layerwise.measure.watch import Parts, Reading, Watch
from layerwise.plan import Plan
from layerwise.run.compare_times import compare_times
from layerwise.run.load import load as load_module
from layerwise.run.trace import Trace
from layerwise.search.baselines import NAMES, baseline
from layerwise.search.find import candidate, configurations, search
from layerwise.search.make_plan import make_plan
from tests.benchmarks.networks import SMALL, Network

PATIENCE_S = 120.0
OPTIMIZER = "momentum"
BLOCK_S = 1.0
SLOW_S = 1.0  # a step that takes longer is taken less often
TRACED = 7, 4  # steps, of which the first two do not count; if they are slow


@dataclass(frozen=True, slots=True)
class Job:
    """One launch. seconds: budgets of the links, of each network's layers, and of each plan's steps."""

    networks: list[str]
    links_s: float
    layers_s: float
    plan_s: float


def profile_of(comm: Comm, job: Job) -> Profile:
    """The `cpu` profile with the links of the emulation, measured now."""
    where = find_topology(comm)
    if comm.size == 1:
        return load("cpu")
    measured = measure_links(comm, where, job.links_s)
    return with_links(load("cpu"), measured, where, conditions(comm, where))


def with_layers(comm: Comm, profile: Profile, network: Network, job: Job) -> CostModel:
    """The cost model over layer times that all ranks have measured at once, as when they train; rank 0's count."""
    examples = (torch.empty(2, *network.input_shape, device="meta"),)
    with torch.device("meta"):
        raw = from_torch(network.build(), examples, name=network.title)
    graph = fuse(raw.rebatch(network.global_batch(comm.size)))
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options = CostOptions(io="sample", optimizer=OPTIMIZER, local_batch_norm=True)
    model = CostModel(graph, profile.device_graph(comm.size, node), options)
    named = {name: baseline(model, name) for name in NAMES}
    space = SearchSpace(comm.size, network.dims, spread=node < comm.size)
    wanted = wanted_cells(model, configurations(model, space, named, {}))
    first = keys_of(model, named.values())
    cells = [wanted[key] for key in first] + [cell for key, cell in wanted.items() if key not in set(first)]
    known = LayerTimes(Conditions("cpu", torch.__version__, "float32", threads=1))
    measuring = Measuring(known, Mode(torch.device("cpu"), torch.float32), lambda _: None, job.layers_s)
    take(measuring, cells, share_of_core(comm))
    told = comm.tell_all(json.dumps(written([measuring.known])) if comm.rank == 0 else "")[0]
    return CostModel(graph, replace(model.devices, layers=read(Field("measured", "", json.loads(told)))), options)


def share_of_core(comm: Comm) -> float:
    """The part of a core that this rank gets while all ranks compute."""
    x = torch.ones(256, 256)
    comm.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    while time.perf_counter() < wall + 1.0:
        torch.mm(x, x)
    return (time.process_time() - cpu) / (time.perf_counter() - wall)


@dataclass(frozen=True)
class CpuWatch(Watch):
    """By the process's CPU time, over the share of a core that it gets."""

    share: float = 1.0

    def __call__(self, parts: Parts, between: Callable[[], object] = lambda: None) -> Reading:
        rows: list[tuple[float, ...]] = []
        began = time.perf_counter()
        while len(rows) < self.least + self.warm or time.perf_counter() < began + self.budget_s:
            times = [time.process_time()]
            for part in parts:
                part()
                times.append(time.process_time())
            between()
            rows.append(tuple((b - a) / self.share for a, b in pairwise(times)))
        return Reading(tuple(median(column) for column in zip(*rows[self.warm :], strict=True)), 0.0, len(rows))


def take(measuring: Measuring, cells: Sequence[Wanted], share: float) -> None:
    """As `layerwise.measure layers` does, by CPU time."""
    beside = overhead(OPTIMIZER, measuring.mode, module)
    for name, found in ((LAYER, beside.layer), (step_name(OPTIMIZER), beside.step)):
        scaled = replace(found, forward_s=found.forward_s / share, backward_s=found.backward_s / share)
        measuring.add((name, ()), scaled)
    began = time.perf_counter()
    watch = CpuWatch(measuring.mode.device, 0.1, share=share)
    for cell in cells:
        if time.perf_counter() > began + measuring.budget_s:
            break
        found = timed(cell, measuring.mode, watch)
        if isinstance(cell.task, Update):
            found = replace(found, forward_s=max(0.0, found.forward_s - beside.call_s / share))
        measuring.add(cell.key, found)


def plans(model: CostModel, network: Network) -> Mapping[str, Plan]:
    """The strategies of the paper's table 4, and what the search finds."""
    count = model.devices.count
    space = SearchSpace(count, network.dims, spread=model.devices.nodes > 1)
    result = search(model, space)
    found = {}
    for name in ("data", "model", "owt", "searched"):
        best = result.best if name == "searched" else candidate(model, name, baseline(model, name))
        found[name] = make_plan(network.title, "measured", model, space, replace(result, best=best), fused=True)
    return found if count > 1 else {"data": found["data"]}


class Training:
    """A plan's module, its samples and its optimizer."""

    def __init__(self, plan: Plan, network: Network, comm: Comm) -> None:
        torch.manual_seed(0)
        examples = (torch.empty(2, *network.input_shape),)
        self.module = load_module(plan, network.build(), comm=comm, local_batch_norm=True, example_inputs=examples)
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=1e-3, momentum=0.9)
        share = self.module.share(plan.batch)
        self.x, self.y = (t[share] for t in network.data(plan.batch))

    def step(self) -> None:
        self.module.train()
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.module(self.x), self.y).backward()
        self.optimizer.step()

    def block(self, steps: int) -> float:
        """Seconds a step of the slowest rank."""
        comm = self.module.comm
        comm.barrier()
        began = time.perf_counter()
        for _ in range(steps):
            self.step()
        mine = (time.perf_counter() - began) / steps
        return max(json.loads(text) for text in comm.tell_all(json.dumps(mine)))


def measure(plan: Plan, network: Network, comm: Comm, seconds: float) -> dict[str, object]:
    """Predicted and measured, of the step and of its parts."""
    training = Training(plan, network, comm)
    slow = training.block(1) > SLOW_S
    one = training.block(1 if slow else 2)
    steps = max(1, min(20, round(BLOCK_S / one)))
    blocks = max(3, min(9, round(seconds / (one * steps))))
    times = [training.block(steps) for _ in range(blocks)]
    trace = Trace()
    training.module.trace = trace
    traced = [training.block(1) for _ in range(TRACED[slow])]
    training.module.trace = None
    parts = compare_times(trace, training.module, traced, comm)
    return {
        "strategy": {name: str(config) for name, config in plan.strategy.items()},
        "predicted_s": plan.predicted["timeline_s"],
        "measured_s": median(times),
        "times_s": times,
        "traced_s": median(traced),
        "parts": parts.as_dict(),
        "predicted": dict(plan.predicted),
    }


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job, out = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    with start(PATIENCE_S) as comm:
        profile = profile_of(comm, job)
        result: dict[str, object] = {"links": None if profile.links is None else profile.links.as_json()}
        for name in job.networks:
            network = SMALL[name]
            model = with_layers(comm, profile, network, job)
            made = plans(model, network)
            result[name] = {s: measure(plan, network, comm, job.plan_s) for s, plan in made.items()}
            if comm.rank == 0:
                out.write_text(json.dumps({"job": asdict(job), "result": result}))
        comm.barrier()
    leave(0)


if __name__ == "__main__":
    main()
