"""What each rank of benchmarks.oracle_runs runs: measures, asks the oracle, runs what it was asked about.

How layers and steps are timed: benchmarks.ranks.side_by_side. Each rank feeds its share of the samples and computes
their loss (io "sample"): that is counted, where giving every rank all of them (io "free", which the oracle otherwise
assumes as the paper does) is not.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median

import torch
from torch import nn

from benchmarks.common.networks import Network
from benchmarks.ranks import predictions
from benchmarks.ranks.links_again import LinksAgain
from benchmarks.ranks.pipeline import Pipelined
from benchmarks.ranks.predictions import OPTIMIZER, Training, each_network, reported
from benchmarks.ranks.side_by_side import BACKWARD, FORWARD, Layers, Step, segments_of, slowest
from layerwise.comm.base import Comm
from layerwise.config import Config
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.price import basis
from layerwise.errors import LayerwiseError
from layerwise.graph.fuse import fuse
from layerwise.importers.torch.from_torch import from_torch
from layerwise.machine import Profile
from layerwise.machine.curves import Links
from layerwise.machine.layer_times import LayerTimes
from layerwise.measure.cells import CellTask, Key, wanted_cells
from layerwise.oracle.ask import plan_of as write_plan
from layerwise.oracle.phases import phases_of
from layerwise.oracle.pipeline import cuts_of, pipeline_phases, pipeline_stages, pipelined_s
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
    """Of this network on these ranks, by analytic times of layers."""
    examples = (torch.empty(2, *network.input_shape, device="meta"),)
    with torch.device("meta"):
        raw = from_torch(network.build(), examples, name=network.title)
    return Oracle(
        Question(
            fuse(raw),
            profile,
            network.global_batch(comm.size),
            "strong",
            gpus_per_node=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            segments=SEGMENTS,
            wishes=Wishes(inside=2, dims=("h", "w")),
            options=CostOptions(io="sample", optimizer=OPTIMIZER, local_batch_norm=True),
        )
    )


def with_times(oracle: Oracle, times: LayerTimes, links: Links | None = None) -> Oracle:
    """The same question with measured times of layers and, where they are given, of links."""
    profile = oracle.question.profile
    profile = replace(profile, layers=(times,), links=links or profile.links)
    return Oracle(replace(oracle.question, profile=profile))


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
        cells = pipeline_cells(model) | cells
    return list(cells.values())


def pipeline_cells(model: CostModel) -> dict[Key, CellTask]:
    """Every layer's over a segment of the batch."""
    graph = model.graph.rebatch(-(-model.graph.batch // SEGMENTS))
    whole = {layer.name: (Config(),) for layer in graph.layers}
    cells: dict[Key, CellTask] = {}
    for optimizer in (OPTIMIZER, "sgd"):  # as which gradients of segments are added up
        part = CostModel(graph, model.devices, replace(model.options, optimizer=optimizer))
        cells |= wanted_cells(part, whole)
    return cells


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


def answers(oracle: Oracle, job: Job, ranks: int) -> dict[str, Answer]:
    """Of every strategy that can use so many ranks."""
    result = {}
    for name in job.strategies:
        try:
            result[name] = oracle.answer(name, ranks)
        except LayerwiseError as error:
            print(f"{oracle.question.graph.name}: {error}", file=sys.stderr)
    return result


def priced_anew(answer: Answer, model: CostModel) -> Answer:
    """The very strategy, or the stages, that an answer is about, by other times of layers."""
    if answer.priced is None:
        segments = answer.projection.segments
        staged = pipeline_stages(model, len(answer.stages), segments, cuts_of(answer.stages))
        phases, seconds = pipeline_phases(staged, segments, model.devices), pipelined_s(staged, segments, model.devices)
        projection = replace(answer.projection, phases=phases)
        return replace(answer, projection=projection, overlapped_s=seconds, stages=staged)
    plan, limit = answer.priced.strategy, answer.priced.memory_limit_bytes
    priced = candidate(model, answer.priced.name, plan, limit, best_cap(model, plan))
    projection = replace(answer.projection, phases=phases_of(model, plan))
    return replace(answer, projection=projection, overlapped_s=priced.timeline.total_s, priced=priced)


def rows_of(oracle: Oracle, network: Network, comm: Comm, job: Job) -> tuple[dict[str, object], Links]:
    """Predicted and measured of every strategy, by steps, layers and links that were timed turn about; those links."""
    model, layers = oracle.model(comm.size), Layers(comm, OPTIMIZER)
    cells = cells_of(oracle, model, comm.size, job)
    layers.take(cells, job.layers_s)
    oracle = with_times(oracle, layers.known)
    first = answers(oracle, job, comm.size)
    trainings = {
        name: Training(write_plan(network.title, "measured", oracle.model(comm.size), answer), network, comm)
        for name, answer in first.items()
        if answer.priced is not None
    }
    steps: dict[str, Step] = {
        name: trainings[name].step if name in trainings else run_pipeline(answer, network)
        for name, answer in first.items()
    }
    assert oracle.question.profile.links is not None
    again = LinksAgain(comm, oracle.question.profile.links)
    times, ranks = layers.turn_about(steps, cells, job.plan_s, again.turn)
    links = again.links()
    assert links is not None
    rows: dict[str, object] = {}
    model = oracle.model(comm.size)
    for name, answer in first.items():
        if answer.priced is None:  # its slowest stage is waited for
            segments = [[(*key, way) for key in pipeline_cells(model) for way in (FORWARD, BACKWARD)]]
        else:
            segments = segments_of(model, dict(answer.priced.strategy))
        now = with_times(oracle, slowest(ranks, segments), links).model(comm.size)
        answer = priced_anew(answer, now)
        row = described(answer) | {"measured_s": median(times[name]), "times_s": times[name]}
        if answer.priced is not None:
            plan = write_plan(network.title, "measured", now, answer)
            row |= {"parts": reported(plan, trainings[name], times[name], comm)["parts"]}
            row |= {"measured_share": basis(now, answer.priced.price).measured}
        rows[name] = row
    return rows, links


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
    job = Job(**json.loads(sys.argv[1]))

    def measured(comm: Comm, profile: Profile, network: Network) -> tuple[dict[str, object], Links | None]:
        return rows_of(oracle_of(comm, profile, network), network, comm, job)

    each_network(job, Path(sys.argv[2]), measured)


if __name__ == "__main__":
    main()
