"""Host time of plans that are run layer by layer: what a layer and an exchange add, on one device and on two ranks.

    python -m benchmarks.host_time --split

One device: a plan of one device layer by layer, against the plain model. Two ranks over gloo, by the CPU time of
rank 0's own thread, which is not that of gloo's: samples split, layer by layer, against DistributedDataParallel, which
tells what a layer adds; then channels split as well as they can be, against that, which tells what an exchange adds
there and back. The second contains what halves of layers take more than whole ones of half the samples.
"""

from __future__ import annotations

import os
import socket
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import layerwise.models
import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import Tensor, nn

from layerwise.comm.solo import SoloComm
from layerwise.graph.fuse import fuse
from layerwise.importers.load import Network, network_of
from layerwise.plan import Plan, parse_strategy
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule

Step = Callable[[], None]
Medians = Mapping[str, float]  # seconds


@dataclass(frozen=True)
class SplitRow:
    """What one network's layers and exchanges add, in seconds."""

    network: str
    side: int
    layers: int
    exchanges: int  # between layers, of the plan that splits channels
    medians: Medians
    alone_s: float  # a layer, on one device
    layer_s: float  # a layer, on two ranks
    exchange_s: float  # there and back


def compare(
    name: str, side: int, batch: int, steps: int, step_of: Callable[[nn.Module, Tensor, Tensor], Step]
) -> SplitRow:
    """Both comparisons. step_of: of a model and its data."""
    torch.manual_seed(0)
    plain, network, x = _given(name, side, batch)
    model = load(_plan(network, batch, 1, {}), network, comm=SoloComm())
    y = torch.zeros(batch, dtype=torch.long)
    medians = dict(
        turn_about({"plain": step_of(plain, x, y), "layers": step_of(model, x, y)}, steps, time.process_time)
    )
    layers = len(model.plan.strategy)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    queue = processes.get_context("spawn").SimpleQueue()
    processes.spawn(_rank, (name, side, batch, steps, step_of, port, queue), nprocs=2)
    exchanges, found = queue.get()
    medians |= {f"{which}, 2 ranks": value for which, value in found.items()}
    return SplitRow(
        name,
        side,
        layers,
        exchanges,
        medians,
        (medians["layers"] - medians["plain"]) / layers,
        (found["layers"] - found["ddp"]) / layers,
        (found["channels"] - found["layers"]) / max(exchanges, 1),
    )


def turn_about(contestants: Mapping[str, Step], steps: int, clock: Callable[[], float]) -> Medians:
    """Medians of their steps, which they take turn about."""
    times: dict[str, list[float]] = {which: [] for which in contestants}
    for step in contestants.values():
        for _ in range(3):
            step()
    for turn in range(steps):
        for which in sorted(contestants, reverse=turn % 2 == 1):
            begun = clock()
            contestants[which]()
            times[which].append(clock() - begun)
    return {which: statistics.median(each) for which, each in times.items()}


def _given(name: str, side: int, batch: int) -> tuple[nn.Module, Network, Tensor]:
    """The model, the network that layers are run of whatever the plan, and images."""
    model, x = layerwise.models.find(name).build(), torch.randn(batch, 3, side, side)
    return model, replace(network_of(layerwise.models.find(name).build(), (x,), batch, name), module=None), x


def _plan(network: Network, batch: int, ranks: int, wanted: Mapping[str, int]) -> Plan:
    """Every layer cut as wanted, where it can be; else by samples."""
    graph = fuse(network.graph)
    cuts = {layer.name: _cut(layer, wanted, ranks) for layer in graph.inner}
    strategy = parse_strategy(cuts, graph, ranks)
    return Plan(network.graph.name, graph.digest, batch, ranks, ranks, "sample", True, strategy)


def _cut(layer: Any, wanted: Mapping[str, int], ranks: int) -> dict[str, int]:
    can = {d.label: wanted[d.label] for d in layer.space.dims if wanted.get(d.label, 0) and d.max_degree >= ranks}
    return can or ({"n": ranks} if ranks > 1 else {})


def _rank(rank: int, name: str, side: int, batch: int, steps: int, step_of: Any, port: int, queue: Any) -> None:
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": "2"}
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    plain, network, x = _given(name, side, batch)
    mine, y = x.chunk(2)[rank], torch.zeros(batch // 2, dtype=torch.long)
    models: dict[str, Any] = {"ddp": nn.parallel.DistributedDataParallel(plain)}
    for which, degrees in (("layers", {"n": 2}), ("channels", {"c": 2})):
        models[which] = load(_plan(network, batch, 2, degrees), network, local_batch_norm=True)
    found = turn_about({which: step_of(model, mine, y) for which, model in models.items()}, steps, time.thread_time)
    if rank == 0:
        queue.put((_exchanges(models["channels"]), found))
    dist.destroy_process_group()


def _exchanges(module: ParallelModule) -> int:
    return sum(edge.travels for scheduled in module.rank_schedule.layers for edge in scheduled.edges)
