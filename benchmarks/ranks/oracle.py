"""What each rank of benchmarks.oracle_runs runs: measures, asks the oracle, runs what it was asked about.

How layers and steps are timed: benchmarks.ranks.side_by_side. Each rank feeds its share of the samples and computes
their loss (io "sample"): that is counted, where giving every rank all of them (io "free", which the oracle otherwise
assumes as the paper does) is not.
"""

from __future__ import annotations

import json
import os
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.common.networks import Network
from benchmarks.ranks import predictions
from benchmarks.ranks.pipeline import Pipelined
from benchmarks.ranks.predictions import OPTIMIZER, Race, each_network, with_times
from benchmarks.ranks.side_by_side import BACKWARD, FORWARD, Layers, Step, slowest
from layerwise.comm.base import Comm
from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.machine import Profile
from layerwise.machine.curves import Links
from layerwise.measure.cells import CellTask, Key, wanted_cells
from layerwise.oracle.pipeline import cuts_of, pipeline_stages, pipelined_s
from layerwise.oracle.question import Answer, Oracle, Question
from layerwise.oracle.strategies import UnreachableError, Wishes, strategy
from layerwise.search.find import best_cap, candidate

STRATEGIES = ("data", "spatial", "filter", "channel", "df", "ds", "pipeline")
SEGMENTS = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(predictions.Job):
    """One launch."""

    strategies: list[str]


def oracle_of(comm: Comm, profile: Profile, network: Network) -> Oracle:
    """Of this network on these ranks."""
    return Oracle(
        Question(
            network.graph(comm.size),
            profile,
            network.global_batch(comm.size),
            "strong",
            gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            segments=SEGMENTS,
            wishes=Wishes(inside=2, dims=("h", "w")),
            options=CostOptions(io="sample", optimizer=OPTIMIZER, local_batch_norm=True),
        )
    )


def cells_of(oracle: Oracle, model: CostModel, job: Job) -> list[CellTask]:
    """Of every layer the cells that the strategies leave on a device, and of a pipeline's segments the whole."""
    wanted: dict[str, list[Config]] = {layer.name: [] for layer in model.graph.layers}
    for name in job.strategies:
        try:
            shapes = oracle.shapes(name, model.devices.count) if name != "pipeline" else []
        except UnreachableError:
            continue
        for shape in shapes:
            for layer, config in strategy(model.graph, name, shape).items():
                wanted[layer].append(config)
    for layer in model.graph.layers:
        if layer.end:
            wanted[layer.name].append(model.end_config(layer))
    unlike = {name: tuple(dict.fromkeys(configs)) for name, configs in wanted.items()}
    return list((pipeline_cells(model) | wanted_cells(model, unlike)).values())


def pipeline_cells(model: CostModel) -> dict[Key, CellTask]:
    """Every layer's over a segment of the batch."""
    graph = model.graph.rebatch(-(-model.graph.batch // SEGMENTS))
    whole = {layer.name: (Config(),) for layer in graph.layers}
    cells: dict[Key, CellTask] = {}
    for optimizer in (OPTIMIZER, "sgd"):  # as which gradients of segments are added up
        part = CostModel(graph, model.devices, replace(model.options, optimizer=optimizer))
        cells |= wanted_cells(part, whole)
    return cells


def pipeline_step(answer: Answer, network: Network) -> Step:
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


def answers(oracle: Oracle, job: Job, ranks: int) -> dict[str, Answer]:
    """Of every strategy that can use so many ranks."""
    result = {}
    for name in job.strategies:
        try:
            result[name] = oracle.answer(name, ranks)
        except LayerwiseError as error:
            print(f"{oracle.question.graph.name}: {error}", file=sys.stderr)
    return result


def rows_of(oracle: Oracle, network: Network, comm: Comm, job: Job) -> tuple[dict[str, object], Links | None]:
    """Predicted and measured of every strategy, by steps, layers and links that were timed turn about; those links."""
    layers, profile = Layers(comm, OPTIMIZER), oracle.question.profile
    layers.take(cells_of(oracle, oracle.model(comm.size), job), job.layers_s)
    oracle = Oracle(replace(oracle.question, profile=replace(profile, layers=(layers.known,))))
    model, asked = oracle.model(comm.size), answers(oracle, job, comm.size)
    piped = asked.pop("pipeline", None)
    plans = {name: answer.strategy for name, answer in asked.items() if answer.strategy is not None}
    compared = {name: candidate(model, name, plan, None, best_cap(model, plan)) for name, plan in plans.items()}
    race, cells = Race(model, compared, network, comm), pipeline_cells(model) if piped else {}
    race.run(layers, job.plan_s, {"pipeline": pipeline_step(piped, network)} if piped else {}, cells.values())
    rows = race.rows()
    if piped:  # its slowest stage is waited for
        together = [(*key, way) for key in cells for way in (FORWARD, BACKWARD)]
        now, segments = with_times(model, slowest(race.ranks, [together]), race.links), piped.projection.segments
        staged = pipeline_stages(now, len(piped.stages), segments, cuts_of(piped.stages))
        times = race.times["pipeline"]
        rows["pipeline"] = {"predicted_s": pipelined_s(staged, segments, now.devices), "measured_s": median(times)}
    return rows, race.links


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job = Job(**json.loads(sys.argv[1]))

    def measured(comm: Comm, profile: Profile, network: Network) -> tuple[dict[str, object], Links | None]:
        return rows_of(oracle_of(comm, profile, network), network, comm, job)

    each_network(job, Path(sys.argv[2]), measured)


if __name__ == "__main__":
    main()
