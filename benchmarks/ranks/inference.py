"""What each rank of benchmarks.inference runs: one sample's answer by one rank, by all of them, and in MONAI's windows.

All in turns, on the same links. The plan is found by links and layers that are measured on these ranks.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from layerwise.models.unet3d import UNet3d
from torch import Tensor, nn

from benchmarks.common.live import Live
from benchmarks.ranks.cluster_plan import OPTIMIZER, measured_layers
from benchmarks.ranks.predictions import profile_of
from benchmarks.ranks.rank import PATIENCE_S, run
from benchmarks.ranks.side_by_side import Layers
from benchmarks.zoo.shims import torchvision_operators
from layerwise.comm.base import Comm
from layerwise.comm.start import join_default_group
from layerwise.config import SearchSpace
from layerwise.cost.model import CostModel, CostOptions
from layerwise.cost.setting import Strategy
from layerwise.graph.fuse import fuse
from layerwise.importers.load import network_of
from layerwise.importers.torch.proof import left_unproven
from layerwise.machine import load as load_profile
from layerwise.machine.devices import DeviceGraph
from layerwise.plan import Plan
from layerwise.run.load import load
from layerwise.run.parallel import ParallelModule
from layerwise.search.find import candidate, search
from layerwise.search.make_plan import make_plan
from layerwise.search.result import Candidate, SearchResult

LINKS = 0.1  # of the time for measuring is for links
WINDOW, OVERLAP = 64, 0.5  # the overlap that nnU-Net takes, and MONAI's bundles


@dataclass
class Job:
    """One network on one cluster."""

    network: str
    seconds: float  # of each way's steps
    measure_s: float


def unet() -> tuple[nn.Module, Tensor]:
    """The 3-D U-Net of a quarter of the channels, and a volume of 128 x 128 x 128."""
    return UNet3d(width=0.25), torch.randn(1, 1, 128, 128, 128)


def decoder() -> tuple[nn.Module, Tensor]:
    """HunyuanVideo's decoder of a quarter of the channels, and the latent of 5 frames of 256 x 256."""
    torchvision_operators()
    import diffusers

    options = {"block_out_channels": (32, 64, 128, 128), "norm_num_groups": 8, "layers_per_block": 1}
    return diffusers.AutoencoderKLHunyuanVideo(**options).decoder, torch.randn(1, 16, 2, 32, 32)


NETWORKS = {"unet": unet, "decoder": decoder}


def windows_of(x: Tensor, rank: int, world: int) -> list[tuple[slice, ...]]:
    """This rank's share of the windows that MONAI cuts a volume into."""
    from monai.data.utils import dense_patch_slices
    from monai.inferers.utils import _get_scan_interval

    extents, window = tuple(x.shape[2:]), (WINDOW,) * 3
    interval = _get_scan_interval(extents, window, 3, (OVERLAP,) * 3)
    return [(slice(None), slice(None), *where) for where in dense_patch_slices(extents, window, interval)[rank::world]]


def timed(step: Callable[[], object], seconds: float, least: int = 2) -> list[float]:
    """Seconds of at least so many steps between barriers, for about so long, after one that does not count."""
    times: list[float] = []
    dist.barrier()
    while len(times) <= least or sum(times[1:]) < seconds:
        began = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - began)
        more = [len(times) <= least or sum(times[1:]) < seconds]
        dist.broadcast_object_list(more)
        if not more[0]:
            break
    return times[1:]


def planned(network: nn.Module, x: Tensor, comm: Comm, seconds: float) -> tuple[ParallelModule, Plan]:
    """The plan that is found by links and layers which these ranks measure, and this rank's part of it.

    Nothing is proven by running, which every rank would do in the same memory: `measure` compares the answer.
    """
    devices = profile_of(comm, LINKS * seconds).device_graph(comm.size)
    model, space = priced(network, x, devices), SearchSpace(comm.size, spread=True)
    model, _ = measured_layers(model, space, Layers(comm, OPTIMIZER), (1 - LINKS) * seconds)
    return loaded(model, space, search(model, space), network, x, comm)


def priced(network: nn.Module, x: Tensor, devices: DeviceGraph) -> CostModel:
    """What an answer costs on these devices."""
    example = (torch.empty_like(x, device="meta"),)
    imported = network_of(copy.deepcopy(network).to("meta").eval(), example, 1, "network")
    return CostModel(fuse(imported.graph), devices, CostOptions(io="boxes", kind="inference"))


def loaded(
    model: CostModel, space: SearchSpace, found: SearchResult | Candidate, network: nn.Module, x: Tensor, comm: Comm
) -> tuple[ParallelModule, Plan]:
    """This rank's part of what has been found, and its plan."""
    plan = make_plan("network", "emulated", model, space, found, fused=True)
    with left_unproven("its answer is compared"):
        return load(plan, copy.deepcopy(network), comm=comm, dtype=x.dtype, example_inputs=(x,)), plan


def error_of(strategy: Strategy, network: nn.Module, x: Tensor, comm: Comm) -> float:
    """How far the answer is from one rank's, over its largest value, in float64; by rank 0."""
    network, x = copy.deepcopy(network).double(), x.double()
    model = priced(network, x, load_profile("cpu").device_graph(comm.size))
    found = candidate(model, "double", {layer.name: strategy[layer.name] for layer in model.graph.inner})
    double, _ = loaded(model, SearchSpace(comm.size, spread=True), found, network, x, comm)
    with torch.inference_mode():
        boxes, part = in_boxes(double, x)()
        alone = network(x) if comm.rank == 0 else None
    parts: list[Any] = [None] * comm.size
    dist.all_gather_object(parts, (boxes[comm.rank], part))
    if alone is None:
        return 0.0
    held = [(alone[box.slices()], values) for box, values in parts if box is not None and box.volume]
    return max(float((there - values).abs().max() / alone.abs().max()) for there, values in held)


def in_boxes(model: ParallelModule, x: Tensor) -> Callable[[], Any]:
    """One answer of the plan: each rank is given its box of the sample and has its box of the answer."""
    sized = model.sized((tuple(x.shape[1:]),), 1)
    mine = x[sized.inputs[0].slices()].contiguous()
    return lambda: sized.run([mine])[0]


def measure(job: Job) -> dict[str, object]:
    """The figures, by rank 0."""
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    network, x = NETWORKS[job.network]()
    network = network.eval()
    comm = join_default_group(torch.device("cpu"), PATIENCE_S)
    began = time.perf_counter()
    model, plan = planned(network, x, comm, job.measure_s)
    planned_s = time.perf_counter() - began
    times: dict[str, list[float]] = {}
    with torch.inference_mode():
        answer = in_boxes(model, x)
        times["plan"] = timed(answer, job.seconds)
        times["one rank"] = timed(lambda: network(x) if rank == 0 else None, job.seconds)
        if job.network == "unet":
            own = windows_of(x, rank, world)
            times["windows"] = timed(lambda: [network(x[where]) for where in own], job.seconds)
        live = Live([*model.parameters(), *model.buffers()])
        with live:
            answer()
        shares = comm.all_gather_object(live.peak)
    error = error_of(plan.strategy, network, x, comm)
    return {
        "times": {name: statistics.median(seconds) for name, seconds in times.items()},
        "predicted_s": plan.predicted["timeline_s"],
        "memory_bytes": max(shares),
        "predicted_memory_bytes": plan.predicted["memory_bytes"],
        "error": error,
        "planned_s": planned_s,
        "strategy": sorted({str(config) for config in plan.strategy.values()}),
    }


if __name__ == "__main__":
    run(Job, measure)
