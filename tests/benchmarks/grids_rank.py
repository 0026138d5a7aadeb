"""What each rank of tests.benchmarks.grids runs: steps of MLPs on every process grid, and ways to hand out an input."""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.comm.start import join_default_group
from layerwise.config import Config, SearchSpace
from layerwise.cost.tables import CostModel
from layerwise.graph.fuse import fuse
from layerwise.graph.layer import LayerGraph
from layerwise.graph.load import Network, load_network
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.search.grid import ProcessGrid, grid_strategy, grids, study
from tests.benchmarks.calibrated import calibrated
from tests.benchmarks.cluster_rank import PATIENCE_S, Record, agreed, block, latency_s
from tests.benchmarks.cluster_variants import LOSS, Variant

ROUNDS = 3
REPEATS = 15  # of a distribution


@dataclass
class Job:
    """widths: of MLPs of three square layers. slices: bytes of a batch group's samples, to be handed out on a 2x2 grid.

    one_s: seconds a step of one process, by width: then the layer-wise optimum is measured, too.
    """

    widths: list[int]
    batch: int
    steps: int
    slices: list[int]
    one_s: dict[str, float]


def spec(width: int) -> str:
    """The network of the study."""
    return "mlp:" + "x".join([str(width)] * 4)


class Planned(Variant):
    """Training steps of a network under a strategy."""

    def __init__(self, network: Network, graph: LayerGraph, strategy: Mapping[str, Config], comm: Comm) -> None:
        batch = graph.batch
        plan = Plan(network.graph.name, graph.digest, batch, comm.size, 1, "sample", True, strategy)
        super().__init__(load(plan, network, comm=comm))
        self.ranks = tuple(range(comm.size))
        generator = torch.Generator().manual_seed(0)
        width = graph.layers[0].out.shape[1]
        x, y = torch.randn(batch, width, generator=generator), torch.randint(width, (batch,), generator=generator)
        share = self.module.share()
        self.x, self.y = x[share], y[share]

    def loss(self) -> Tensor:
        return LOSS(self.module(self.x), self.y)


def strategies(graph: LayerGraph, job: Job, links: tuple[float, float], width: int) -> dict[str, dict[str, Config]]:
    """Every grid, and the layer-wise optimum. Every rank finds the same: it starts from the same numbers."""
    ranks = dist.get_world_size()
    result = {str(grid): grid_strategy(grid, graph) for grid in grids(ranks, graph)}
    if str(width) in job.one_s:
        devices = calibrated(graph, job.one_s[str(width)], *links).device_graph(ranks, 1)
        found = study(CostModel(graph, devices), SearchSpace(ranks), grids(ranks, graph))
        result["layer-wise"] = {layer.name: found.best.strategy[layer.name] for layer in graph.inner}
    return result


def steps(job: Job, comm: Comm, links: tuple[float, float]) -> list[dict[str, object]]:
    """Seconds a step of every width on every grid, in turns; the losses are those of one device whatever the grid."""
    rows: list[dict[str, object]] = []
    for width in job.widths:
        network = load_network(spec(width), job.batch)
        graph = fuse(network.graph)
        found = strategies(graph, job, links, width)
        every = {name: Planned(network, graph, strategy, comm) for name, strategy in found.items()}
        records = {grid: Record() for grid in every}
        for variant in every.values():
            block(variant, 2, Record())
        for _ in range(ROUNDS):
            for grid, variant in every.items():
                block(variant, job.steps, records[grid])
        for grid, record in records.items():
            times, rank_losses = record.times, [0.0] * comm.size
            dist.all_gather_object(rank_losses, record.losses[-1])
            loss = statistics.mean(rank_losses)
            step_s, strategy = statistics.median(times), {layer: str(c) for layer, c in found[grid].items()}
            row = {"width": width, "grid": grid, "step_s": step_s, "times_s": times, "loss": loss}
            rows.append(row | {"strategy": strategy})
    return rows


def distributions(job: Job, grid: ProcessGrid) -> list[dict[str, float]]:
    """Seconds of both ways to hand out a batch from rank 0, by the bytes of a slice: medians of the slowest rank."""
    rank, world = dist.get_rank(), dist.get_world_size()
    parts = grid.model_parts
    heads = list(range(0, world, parts))
    across = dist.new_group(heads)
    within = [dist.new_group(list(range(head, head + parts))) for head in heads]
    own, head = within[rank // parts], rank - rank % parts
    rows = []
    for size in job.slices:
        batch = torch.arange(grid.batch_groups * size // 4, dtype=torch.float32).chunk(grid.batch_groups)
        mine = torch.empty(size // 4)

        def one_scatter(batch: tuple[Tensor, ...] = batch, mine: Tensor = mine) -> None:
            dist.scatter(mine, [batch[r // parts] for r in range(world)] if rank == 0 else None, src=0)

        def scatter_broadcast(batch: tuple[Tensor, ...] = batch, mine: Tensor = mine) -> None:
            if rank == head:
                dist.scatter(mine, list(batch) if rank == 0 else None, src=0, group=across)
            dist.broadcast(mine, head, group=own)

        row = {"slice_bytes": float(size)}
        for way in (one_scatter, scatter_broadcast):
            mine.zero_()
            way()
            assert torch.equal(mine, batch[rank // parts]), "every rank has its group's samples"
            row[way.__name__] = timed(way)
        rows.append(row)
    return rows


def timed(way: Callable[[], None]) -> float:
    """The median of the slowest rank's time, from a barrier on."""
    times = []
    for _ in range(REPEATS):
        dist.barrier()
        start = time.perf_counter()
        way()
        spent = torch.tensor([time.perf_counter() - start], dtype=torch.float64)
        dist.all_reduce(spent, dist.ReduceOp.MAX)
        times.append(float(spent))
    return agreed(statistics.median(times))


def bandwidth() -> float:
    """Bytes a second of a large message from rank 0 to rank 1."""
    block_bytes, times = torch.zeros(1_000_000), []
    for _ in range(3):
        dist.barrier()
        start = time.perf_counter()
        if dist.get_rank() == 0:
            dist.send(block_bytes, 1)
            dist.recv(torch.zeros(1), 1)
        elif dist.get_rank() == 1:
            dist.recv(block_bytes, 0)
            dist.send(torch.zeros(1), 0)
        times.append(time.perf_counter() - start)
    return block_bytes.nbytes / agreed(statistics.median(times))


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job, out = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    cpu = torch.device("cpu")
    comm = join_default_group(cpu, PATIENCE_S) if dist.get_world_size() > 1 else SoloComm(cpu)
    found: dict[str, object] = {"nodes": comm.size}
    links = (latency_s(), bandwidth()) if comm.size > 1 else (0.0, 0.0)
    found |= {"alpha_s": links[0], "bytes_per_s": links[1], "steps": steps(job, comm, links)}
    if comm.size == 4 and job.slices:
        found["distributions"] = distributions(job, ProcessGrid(2, 2))
    if dist.get_rank() == 0:
        out.write_text(json.dumps(found))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 with gloo now and then aborts in a normal exit


if __name__ == "__main__":
    main()
