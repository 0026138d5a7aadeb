"""What each rank of benchmarks.grids runs: steps of MLPs on every process grid, and ways to hand out an input.

Links and layers are measured first and every grid is predicted with them, as in benchmarks.ranks.predictions,
whose measurements these are. But a rank keeps to its node's quota, not to a core.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, median, quantiles

import torch
import torch.distributed as dist
from layerwise.models.mlp import mlp
from torch import Tensor, nn

from benchmarks.common.networks import Network
from benchmarks.common.process_grids import study
from benchmarks.ranks import predictions
from benchmarks.ranks.predictions import PATIENCE_S, Training, measure, plan_of, profile_of, with_layers
from layerwise.comm.base import Comm
from layerwise.comm.start import leave, start
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.plan import Plan
from layerwise.search.baselines import ProcessGrid, grids
from layerwise.search.result import Candidate

DISTRIBUTED = ProcessGrid(2, 2)
TIMES = 25  # that an input is handed out each way, in turns
SMALL_SLICE, LARGE_SLICE = 64, 2 * 2**20  # bytes: alpha and beta are those of one scatter of so much a process


@dataclass(frozen=True, slots=True)
class Job:
    """One launch, with budgets."""

    widths: list[int]  # of MLPs of three square layers
    batch: int
    slices: list[int]  # bytes of a batch group's samples, to be handed out on a 2x2 grid
    links_s: float
    layers_s: float  # of each network
    plan_s: float  # of each grid's steps


def spec(width: int) -> str:
    """The network of the study."""
    return "mlp:" + "x".join([str(width)] * 4)


def network_of(width: int, batch: int) -> Network:
    """The same to be trained, with as many classes as it is wide."""
    return Network(spec(width), lambda: mlp(*[width] * 4), (width,), width, batch=batch)


def candidates(model: CostModel) -> dict[str, Candidate]:
    """Every grid, and the layer-wise optimum where it is none of them. Every rank finds the same: from equal times."""
    ranks = model.devices.count
    studied = study(model, SearchSpace(ranks), grids(ranks, model.graph))
    result = {str(priced.grid): priced.tables for priced in studied.grids}
    if all(studied.best.strategy != one.strategy for one in result.values()):
        result["layer-wise"] = studied.best
    return result


def first_loss(plan: Plan, network: Network, comm: Comm) -> float:
    """Of the whole batch, at the initial values: the same whatever the plan."""
    training = Training(plan, network, comm)
    with torch.no_grad():
        mine = float(nn.functional.cross_entropy(training.module(training.x), training.y))
    return mean(json.loads(text) for text in comm.all_gather_text(json.dumps(mine)))


def steps(job: Job, comm: Comm, budgets: predictions.Job) -> dict[str, object]:
    """Links; and of every width on every grid seconds a step, predicted and measured."""
    profile = profile_of(comm, budgets.links_s)
    rows: list[dict[str, object]] = []
    for width in job.widths:
        network = network_of(width, job.batch)
        model = with_layers(comm, profile, network, budgets)
        for grid, one in candidates(model).items():
            plan = plan_of(model, network, one)
            result = measure(plan, network, comm, job.plan_s)
            kept = {key: result[key] for key in ("strategy", "predicted_s", "times_s")}
            row = {
                "width": width,
                "grid": grid,
                "step_s": result["measured_s"],
                "loss": first_loss(plan, network, comm),
            }
            rows.append(row | kept | {"parts": result["parts"]["totals"]})
    return {"links": None if profile.links is None else profile.links.as_json(), "steps": rows}


def distributions(slices: list[int], comm: Comm) -> dict[str, object]:
    """Seconds of both ways to hand out a batch from rank 0 on a 2x2 grid; alpha and beta of one scatter."""
    ways = Ways(comm)
    small = median(ways.timed(SMALL_SLICE)["one_scatter"])
    large = median(ways.timed(LARGE_SLICE)["one_scatter"])
    rows = []
    for size in slices:
        by_way = ways.timed(size)
        row: dict[str, object] = {"slice_bytes": float(size)}
        for way, times in by_way.items():
            row |= {way: median(times), f"{way}_quartiles": quantiles(times)[::2]}
        pairs = zip(by_way["one_scatter"], by_way["scatter_broadcast"], strict=True)
        rows.append(row | {"one_scatter_wins": mean(a < b for a, b in pairs)})
    return {
        "alpha_s": small,
        "beta_s_per_byte": (large - small) / (DISTRIBUTED.processes * (LARGE_SLICE - SMALL_SLICE)),
        "rows": rows,
    }


class Ways:
    """One scatter to all; or one to the first of each batch group, which broadcasts. Every rank makes it."""

    def __init__(self, comm: Comm) -> None:
        self.comm, self.parts = comm, DISTRIBUTED.model_parts
        heads = list(range(0, comm.size, self.parts))
        self.across = dist.new_group(heads)
        within = [dist.new_group(list(range(head, head + self.parts))) for head in heads]
        self.own, self.head = within[comm.rank // self.parts], comm.rank - comm.rank % self.parts

    def timed(self, size: int) -> dict[str, list[float]]:
        """Seconds of the slowest rank for slices of `size` bytes, from a barrier on, the two ways in turns."""
        comm, groups = self.comm, DISTRIBUTED.batch_groups
        batch = torch.arange(groups * size // 4, dtype=torch.float32).chunk(groups)
        mine = torch.empty(size // 4)

        def one_scatter() -> None:
            everyone = [batch[rank // self.parts] for rank in range(comm.size)] if comm.rank == 0 else None
            dist.scatter(mine, everyone, src=0)

        def scatter_broadcast() -> None:
            if comm.rank == self.head:
                dist.scatter(mine, list(batch) if comm.rank == 0 else None, src=0, group=self.across)
            dist.broadcast(mine, self.head, group=self.own)

        times: dict[str, list[float]] = {}
        for way in (one_scatter, scatter_broadcast):
            mine.zero_()
            way()
            assert torch.equal(mine, batch[comm.rank // self.parts]), "every rank has its group's samples"
        for _ in range(TIMES):
            for way in (one_scatter, scatter_broadcast):
                times.setdefault(way.__name__, []).append(_slowest(way))
        return times


def _slowest(way: Callable[[], None]) -> float:
    dist.barrier()
    began = time.perf_counter()
    way()
    spent: Tensor = torch.tensor([time.perf_counter() - began], dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job, out = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    budgets = predictions.Job([], job.links_s, job.layers_s, job.plan_s)
    with start(PATIENCE_S) as comm:
        report: dict[str, object] = {"nodes": comm.size, "job": asdict(job)}
        if job.widths:
            report |= steps(job, comm, budgets)
        if comm.size == DISTRIBUTED.processes and job.slices:
            report["distribution"] = distributions(job.slices, comm)
        if comm.rank == 0:
            out.write_text(json.dumps(report))
        comm.barrier()
    leave(0)


if __name__ == "__main__":
    main()
