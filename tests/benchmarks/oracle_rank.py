"""What each rank of tests.benchmarks.oracle_runs runs: measures, asks the oracle, runs what it was asked about.

As tests.benchmarks.predictions_rank, whose measurements these are: a rank keeps to one core, layers are timed by CPU
time over the share of the core that a rank gets, and the slowest rank's wall clock counts for a step. Each rank feeds
its share of the samples and computes their loss (io "sample"): that is counted, where giving every rank all of them
(io "free", which the oracle otherwise assumes as the paper does) is not.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from layerwise.comm.base import Comm
from layerwise.comm.start import leave, start
from layerwise.config import Config
from layerwise.cost.basis import basis
from layerwise.cost.tables import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.from_torch import from_torch
from layerwise.graph.fuse import fuse
from layerwise.machine import Profile
from layerwise.machine.fields import Field
from layerwise.machine.layer_times import Conditions, LayerTimes
from layerwise.machine.layer_times_json import read, written
from layerwise.measure.bench import Mode
from layerwise.measure.cells import wanted_cells
from layerwise.measure.layers import Measuring
from layerwise.oracle.question import Answer, Oracle, Question
from layerwise.oracle.strategies import UnreachableError, Wishes, strategy
from layerwise.oracle.write import plan_of
from layerwise.run.pipeline import Pipelined
from tests.benchmarks.networks import SMALL, Network
from tests.benchmarks.predictions_rank import measure, profile_of, share_of_core, take

PATIENCE_S = 120.0
OPTIMIZER = "momentum"
STRATEGIES = ("data", "spatial", "filter", "channel", "df", "ds", "pipeline")
BLOCK_S = 0.7
SEGMENTS = 4


@dataclass(frozen=True, slots=True)
class Job:
    """One launch. seconds: budgets of the links, of each network's layers, and of each plan's steps."""

    networks: list[str]
    strategies: list[str]
    links_s: float
    layers_s: float
    plan_s: float


def oracle_of(comm: Comm, profile: Profile, network: Network, job: Job) -> Oracle:
    """Over layer times that all ranks have measured at once; rank 0's count."""
    examples = (torch.empty(2, *network.input_shape, device="meta"),)
    with torch.device("meta"):
        raw = from_torch(network.build(), examples, name=network.title)
    question = Question(
        fuse(raw),
        profile,
        network.global_batch(comm.size),
        "strong",
        gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        segments=SEGMENTS,
        wishes=Wishes(inside=2, dims=("h", "w")),
        options=CostOptions(io="sample", optimizer=OPTIMIZER, local_batch_norm=True),
    )
    oracle = Oracle(question)
    model = oracle.model(comm.size)
    known = LayerTimes(Conditions("cpu", torch.__version__, "float32", threads=1))
    measuring = Measuring(known, Mode(torch.device("cpu"), torch.float32), lambda _: None, job.layers_s)
    take(measuring, cells_of(oracle, model, comm.size, job), share_of_core(comm))
    told = comm.tell_all(json.dumps(written([measuring.known])) if comm.rank == 0 else "")[0]
    return Oracle(replace(question, profile=replace(profile, layers=read(Field("measured", "", json.loads(told))))))


def cells_of(oracle: Oracle, model: CostModel, ranks: int, job: Job) -> list:
    """Of every layer the cells that the strategies leave on a device, and of a pipeline's segments the whole."""
    wanted: dict[str, dict[Config, None]] = {layer.name: {} for layer in model.graph.layers}
    for name in job.strategies:
        if name == "pipeline":
            continue
        try:
            plans = [strategy(model.graph, name, shape) for shape in oracle.shapes(name, ranks)]
        except UnreachableError:
            continue
        for plan in plans:
            for layer, config in plan.items():
                wanted[layer][config] = None
    for layer in model.graph.layers:
        if layer.end:
            wanted[layer.name][model.end_config(layer)] = None
    cells = dict(wanted_cells(model, {name: tuple(configs) for name, configs in wanted.items()}))
    if "pipeline" in job.strategies:
        part = CostModel(model.graph.rebatch(-(-model.graph.batch // SEGMENTS)), model.devices, model.options)
        whole = {layer.name: (Config(),) for layer in part.graph.layers}
        cells |= {key: cell for key, cell in wanted_cells(part, whole).items() if key not in cells}
    return list(cells.values())


def run_pipeline(answer: Answer, network: Network) -> Callable[[], None]:
    """A step of the pipeline, its stages cut where the oracle cuts them. Without dropout, which it refuses."""
    torch.manual_seed(0)
    module = network.build()
    for part in module.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    x, y = network.data(answer.projection.batch)
    starts = [stage.layers[0] for stage in answer.stages[1:]]
    piped = Pipelined(module, starts, segments=answer.projection.segments, example=x, loss=nn.functional.cross_entropy)
    optimizer = torch.optim.SGD(piped.parameters(), lr=1e-3, momentum=0.9)

    def step() -> None:
        optimizer.zero_grad()
        piped.step(x, y)
        optimizer.step()

    return step


def block(step: Callable[[], None], steps: int, comm: Comm) -> float:
    """Seconds a step of the slowest rank."""
    comm.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        step()
    mine = (time.perf_counter() - began) / steps
    return max(json.loads(text) for text in comm.tell_all(json.dumps(mine)))


def blocks_of(step: Callable[[], None], comm: Comm, seconds: float) -> list[float]:
    """Seconds a step, of several blocks."""
    block(step, 1, comm)
    one = block(step, 2, comm)
    steps = max(1, min(20, round(BLOCK_S / one)))
    blocks = max(3, min(9, round(seconds / (one * steps))))
    return [block(step, steps, comm) for _ in range(blocks)]


def run(oracle: Oracle, answer: Answer, network: Network, comm: Comm, job: Job) -> dict[str, object]:
    """Measured s a step; of a plan also its parts, and on what its predicted computation rests."""
    if answer.priced is None:
        times = blocks_of(run_pipeline(answer, network), comm, job.plan_s)
        return {"measured_s": median(times), "times_s": times}
    model = oracle.model(comm.size)
    found = measure(plan_of(network.title, "measured", model, answer), network, comm, job.plan_s)
    kept = {key: found[key] for key in ("measured_s", "times_s", "parts")}
    return kept | {"measured_share": basis(model, answer.priced.price).measured}


def described(answer: Answer) -> dict[str, object]:
    """What the oracle says."""
    phases = answer.projection.phases
    return {
        "predicted_s": answer.overlapped_s,
        "computation_s": phases.computation_s,
        "communication_s": phases.communication_s,
        "groups": answer.projection.groups,
        "grid": dict(answer.shape.grid) if answer.shape else {},
    }


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job, out = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    with start(PATIENCE_S) as comm:
        profile = profile_of(comm, job)
        result: dict[str, dict[str, object]] = {}
        for network_name in job.networks:
            network, rows = SMALL[network_name], {}
            oracle = oracle_of(comm, profile, network, job)
            for name in job.strategies:
                try:
                    answer = oracle.answer(name, comm.size)
                except LayerwiseError as error:
                    print(f"{network_name}: {error}", file=sys.stderr)
                    continue
                rows[name] = described(answer) | run(oracle, answer, network, comm, job)
            result[network_name] = rows
            if comm.rank == 0:
                out.write_text(json.dumps({"result": result}))
        comm.barrier()
    leave(0)


if __name__ == "__main__":
    main()
