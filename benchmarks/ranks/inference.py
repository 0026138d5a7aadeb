"""What each rank of benchmarks.inference runs: one sample's answer by one rank, by all of them, and in MONAI's windows.

All in turns, on the same links. The plan is the one that `layerwise.parallelize` finds, by links and layers that it
measures on these ranks.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layerwise.models.unet3d import UNet3d
from torch import Tensor, nn

import layerwise
from benchmarks.common.live import Live
from benchmarks.zoo.shims import torchvision_operators
from layerwise.comm.start import join_default_group
from layerwise.run.parallel import ParallelModule

PATIENCE_S = 300
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
    """Wan's video decoder, narrow, and a latent of 4 frames; in float64, to be compared to the last digit but a few."""
    torchvision_operators()
    import diffusers

    sizes = {"base_dim": 16, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    model = diffusers.AutoencoderKLWan(temperal_downsample=[False, True], **sizes).decoder
    return model.double(), torch.randn(1, 4, 4, 32, 32, dtype=torch.float64)


NETWORKS = {"unet": unet, "decoder": decoder}


def windows_of(x: Tensor, rank: int, world: int) -> list[tuple[slice, ...]]:
    """This rank's share of the windows that MONAI cuts a volume into."""
    from monai.data.utils import dense_patch_slices
    from monai.inferers.utils import _get_scan_interval

    extents, window = tuple(x.shape[2:]), (WINDOW,) * 3
    interval = _get_scan_interval(extents, window, 3, (OVERLAP,) * 3)
    return [(slice(None), slice(None), *where) for where in dense_patch_slices(extents, window, interval)[rank::world]]


def timed(step: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of steps between barriers, for about so long, after one that does not count."""
    times: list[float] = []
    dist.barrier()
    while len(times) < 3 or sum(times[1:]) < seconds:
        began = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - began)
        more = [len(times) < 3 or sum(times[1:]) < seconds]
        dist.broadcast_object_list(more)
        if not more[0]:
            break
    return times[1:]


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
    shares = [0.0]
    with torch.inference_mode():
        alone = network(x) if rank == 0 else None
    options = layerwise.ParallelOptions(measure_s=job.measure_s, timeout_s=PATIENCE_S)
    began = time.perf_counter()
    model = layerwise.parallelize(
        network, torch.empty_like(x, device="meta"), inference=True, io="boxes", options=options
    )
    planned_s = time.perf_counter() - began
    times: dict[str, list[float]] = {}
    with torch.inference_mode():
        run = in_boxes(model, x)
        boxes, part = run()
        parts = comm.all_gather_object((boxes[rank], part))
        error = 0.0
        if alone is not None:
            for box, values in parts:
                if box is not None and box.volume:
                    error = max(error, float((alone[box.slices()] - values).abs().max() / alone.abs().max()))
        times["plan"] = timed(run, job.seconds)
        times["one rank"] = timed(lambda: network(x) if rank == 0 else None, job.seconds)
        if job.network == "unet":
            own = windows_of(x, rank, world)
            times["windows"] = timed(lambda: [network(x[where]) for where in own], job.seconds)
        live = Live([*model.parameters(), *model.buffers()])
        with live:
            run()
        shares = comm.all_gather_object(live.peak)
    return {
        "times": {name: statistics.median(seconds) for name, seconds in times.items()},
        "predicted_s": model.plan.predicted["timeline_s"],
        "memory_bytes": max(shares),
        "predicted_memory_bytes": model.plan.predicted["memory_bytes"],
        "error": error,
        "planned_s": planned_s,
        "strategy": sorted({str(config) for config in model.plan.strategy.values()}),
    }


def main() -> None:
    """argv: the job as JSON, and where rank 0 writes the result."""
    job, out = Job(**json.loads(sys.argv[1])), Path(sys.argv[2])
    torch.set_num_threads(1)
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[int(os.environ["RANK"]) % len(cores)]})
    dist.init_process_group("gloo", timeout=timedelta(seconds=PATIENCE_S))
    result = measure(job)
    if dist.get_rank() == 0:
        out.write_text(json.dumps(result))
    dist.barrier()
    sys.stdout.flush()
    os._exit(0)  # torch 2.13 with gloo now and then aborts in a normal exit


if __name__ == "__main__":
    main()
