"""What each rank of benchmarks.grids runs: steps of MLPs on every process grid.

Links and layers are measured first and every grid is predicted with them, as in benchmarks.ranks.predictions,
whose measurements these are. But a rank keeps to its node's quota, not to a core.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean

import torch
from layerwise.models.mlp import mlp

from benchmarks.common.networks import Network
from benchmarks.common.process_grids import study
from benchmarks.ranks import predictions
from benchmarks.ranks.cluster_variants import Ours
from benchmarks.ranks.predictions import PATIENCE_S, measure, measured_model, plan_of, profile_of
from layerwise.comm.base import Comm
from layerwise.comm.start import leave, start
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel
from layerwise.plan import Plan
from layerwise.search.baselines import grids
from layerwise.search.result import Candidate


@dataclass(frozen=True, slots=True)
class Job:
    """One launch, with budgets."""

    widths: list[int]  # of MLPs of three square layers
    batch: int
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
    result = {str(grid): priced for grid, priced in studied.grids.items()}
    if all(studied.best.strategy != one.strategy for one in result.values()):
        result["layer-wise"] = studied.best
    return result


def first_loss(plan: Plan, network: Network, comm: Comm) -> float:
    """Of the whole batch, at the initial values: the same whatever the plan."""
    with torch.no_grad():
        mine = float(Ours(network, plan, comm).loss())
    return mean(json.loads(text) for text in comm.all_gather_text(json.dumps(mine)))


def steps(job: Job, comm: Comm, budgets: predictions.Job) -> dict[str, object]:
    """Links; and of every width on every grid seconds a step, predicted and measured."""
    profile = profile_of(comm, budgets.links_s)
    rows: list[dict[str, object]] = []
    for width in job.widths:
        network = network_of(width, job.batch)
        model = measured_model(comm, profile, network, budgets)[0]
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


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job, out = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    budgets = predictions.Job([], job.links_s, job.layers_s, job.plan_s)
    with start(PATIENCE_S) as comm:
        report = {"nodes": comm.size, "job": asdict(job)} | steps(job, comm, budgets)
        if comm.rank == 0:
            out.write_text(json.dumps(report))
        comm.barrier()
    leave(0)


if __name__ == "__main__":
    main()
