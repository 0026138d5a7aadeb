"""What each rank of benchmarks.predictions runs: measures links and layers, plans with them, runs the plans.

How layers and steps are timed: benchmarks.ranks.side_by_side.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median

import torch

from benchmarks.common.networks import SMALL, Network
from benchmarks.ranks.cluster_variants import Ours
from benchmarks.ranks.links_again import LinksAgain
from benchmarks.ranks.parts import parts_of
from benchmarks.ranks.side_by_side import Layers, Step, block, segments_of, slowest
from layerwise.api.machine import strategies
from layerwise.comm.base import Comm
from layerwise.comm.start import leave, start
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.machine import Profile, load
from layerwise.machine.curves import Links
from layerwise.machine.layer_times import LayerTimes
from layerwise.measure.cells import CellTask, wanted_cells
from layerwise.measure.links import conditions, measure_links, with_links
from layerwise.measure.topology import find_topology
from layerwise.plan import Plan
from layerwise.run.parallel import of
from layerwise.search.baselines import NAMES, baseline, configurations
from layerwise.search.find import candidate, search
from layerwise.search.make_plan import make_plan
from layerwise.search.result import Candidate
from layerwise.trace import Trace

PATIENCE_S = 120.0
OPTIMIZER = "momentum"
ROUNDS = 2  # of measuring what the best plan needs, and searching again
TRACED = 6, 3  # further steps, of which the first two do not count; and where a step takes longer than
SLOW_S = 1.0


@dataclass(frozen=True, slots=True)
class Job:
    """One launch, with budgets."""

    networks: list[str]
    links_s: float
    layers_s: float  # of each network
    plan_s: float  # of each plan's steps


def profile_of(comm: Comm, links_s: float) -> Profile:
    """The `cpu` profile with the links of the emulation, measured now."""
    where = find_topology(comm)
    if comm.size == 1:
        return load("cpu")
    measured = measure_links(comm, where, links_s)
    facts = comm.broadcast_text(json.dumps(conditions(comm, where)))  # a plan tells of the first rank's machine
    return with_links(load("cpu"), measured, where, json.loads(facts))


def measured_model(comm: Comm, profile: Profile, network: Network, job: Job) -> tuple[CostModel, Layers]:
    """The cost model over layer times that all ranks have measured at once, as when they train.

    First the layers of the best plan and of the baselines, until nothing of these is missing; then what else there is.
    """
    graph = network.graph(comm.size)
    node = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    options = CostOptions(io="sample", optimizer=OPTIMIZER, local_batch_norm=True)
    layers = Layers(comm, OPTIMIZER)
    model = CostModel(graph, profile.device_graph(comm.size, node), options)
    space = space_of(model, network)
    for last in (False,) * ROUNDS + (True,):
        best = strategies(model, space)
        of_best = {layer.name: [strategy[layer.name] for strategy in best] for layer in graph.inner}
        every = configurations(model, space, {name: baseline(model, name) for name in NAMES})
        cells = wanted_cells(model, every if last else of_best).values()
        layers.take(layers.measuring.left(cells), job.layers_s)
        model = with_times(model, layers.known)
    return model, layers


def with_times(model: CostModel, times: LayerTimes, links: Links | None = None) -> CostModel:
    """The model over other times of layers and, where they are given, of links."""
    devices = replace(model.devices, layers=(times,), links=links or model.devices.links)
    return CostModel(model.original, devices, model.options)


def space_of(model: CostModel, network: Network) -> SearchSpace:
    """What the search may choose from."""
    return SearchSpace(model.devices.count, network.dims, spread=model.devices.nodes > 1)


def candidates(model: CostModel, network: Network) -> dict[str, Candidate]:
    """The strategies of the paper's table 4, and what the search finds."""
    if model.devices.count == 1:
        return {"data": candidate(model, "data", baseline(model, "data"))}
    named = {name: candidate(model, name, baseline(model, name)) for name in ("data", "model", "owt")}
    return named | {"searched": search(model, space_of(model, network)).best}


def plan_of(model: CostModel, network: Network, one: Candidate) -> Plan:
    """As a plan, with what the model predicts of it."""
    return make_plan(network.title, "measured", model, space_of(model, network), one, fused=True)


def measure_together(
    model: CostModel, layers: Layers, network: Network, comm: Comm, seconds: float
) -> tuple[dict[str, object], Links | None]:
    """Predicted and measured of every strategy, and the links as they then were.

    Strategies are chosen by the times that are known before; what is predicted of them rests on those taken meanwhile.
    """
    race = Race(model, candidates(model, network), network, comm)
    race.run(layers, seconds)
    return race.rows(), race.links


class Race:
    """Steps of plans, their layers and links, timed turn about: the machine is the same for all."""

    def __init__(self, model: CostModel, compared: Mapping[str, Candidate], network: Network, comm: Comm) -> None:
        self.model, self.compared, self.network, self.comm = model, compared, network, comm
        self.trainings = {name: Ours(network, plan_of(model, network, one), comm) for name, one in compared.items()}
        self.times: dict[str, list[float]] = {}  # seconds of steps
        self.ranks: list[LayerTimes] = []  # each rank's times of layers
        self.links: Links | None = None

    def run(
        self, layers: Layers, seconds: float, others: Mapping[str, Step] | None = None, cells: Iterable[CellTask] = ()
    ) -> None:
        """Times everything. others: steps of no plan, whose layers are the `cells`."""
        needed = {l.name: [one.strategy[l.name] for one in self.compared.values()] for l in self.model.graph.layers}
        steps = {name: training.step for name, training in self.trainings.items()} | dict(others or {})
        every = {cell.key: cell for cell in cells} | wanted_cells(self.model, needed)
        again = LinksAgain(self.comm, self.model.devices.links)
        self.times, self.ranks = layers.turn_about(steps, list(every.values()), seconds, again.turn)
        self.links = again.links()

    def rows(self) -> dict[str, object]:
        """Predicted, by these times, and measured."""
        rows: dict[str, object] = {}
        for name, one in self.compared.items():
            now = with_times(self.model, slowest(self.ranks, segments_of(self.model, one.strategy)), self.links)
            plan = plan_of(now, self.network, candidate(now, name, one.strategy, bucket_bytes=one.bucket_bytes))
            rows[name] = reported(plan, self.trainings[name], self.times[name], self.comm)
        return rows


def measure(plan: Plan, network: Network, comm: Comm, seconds: float) -> dict[str, object]:
    """Predicted and measured of one plan."""
    training = Ours(network, plan, comm)
    one = median(block(training.step, 2, comm))
    return reported(plan, training, block(training.step, max(3, round(seconds / one)), comm), comm)


def reported(plan: Plan, training: Ours, times: Sequence[float], comm: Comm) -> dict[str, object]:
    """What the plan predicts beside what was measured, of the step and, in further steps, of its parts."""
    of(training.module).plan = plan
    of(training.module).trace = trace = Trace()
    traced = block(training.step, TRACED[median(times) > SLOW_S], comm, tries=1)
    of(training.module).trace = None
    return {
        "strategy": {name: str(config) for name, config in plan.strategy.items()},
        "predicted_s": plan.predicted["timeline_s"],
        "range_s": [plan.predicted["timeline_low_s"], plan.predicted["timeline_high_s"]],
        "measured_s": median(times),
        "times_s": times,
        "traced_s": median(traced),
        "parts": parts_of(trace, training.module, traced, comm),
        "predicted": dict(plan.predicted),
    }


def each_network(
    job: Job, out: Path, measured: Callable[[Comm, Profile, Network], tuple[dict[str, object], Links | None]]
) -> None:
    """Measures every network of a job on this rank's core; rank 0 writes rows and links to `out`. Ends the process."""
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    with start(PATIENCE_S) as comm:
        result: dict[str, object] = {}
        links: dict[str, object] = {}
        for name in job.networks:
            # The links are measured anew for each: the machine's speed moves.
            result[name], last = measured(comm, profile_of(comm, job.links_s), SMALL[name])
            links[name] = last and last.as_json()
            if comm.rank == 0:
                out.write_text(json.dumps({"job": asdict(job), "links": links, "result": result}))
        comm.barrier()
    leave(0)


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job = Job(**json.loads(sys.argv[1]))

    def measured(comm: Comm, profile: Profile, network: Network) -> tuple[dict[str, object], Links | None]:
        model, layers = measured_model(comm, profile, network, job)
        return measure_together(model, layers, network, comm, job.plan_s)

    each_network(job, Path(sys.argv[2]), measured)


if __name__ == "__main__":
    main()
