"""What each rank of benchmarks.inference runs: one sample's answer by one rank and by all, in turns on the same links.

The plan is the one that `layerwise.parallelize` finds by links and layers which these ranks measure.
"""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from layerwise.models.unet3d import UNet3d
from torch import Tensor, nn

import layerwise
from benchmarks.common.live import Live
from benchmarks.ranks.rank import run
from benchmarks.zoo.shims import torchvision_operators

WINDOW, OVERLAP = 64, 0.5  # the overlap that nnU-Net takes, and MONAI's bundles
Answer = Callable[[], Tensor | None]  # what this rank has of it
# What is called, its answer, and where that lies; None: it is not compared.
Way = tuple[nn.Module, Answer, tuple[slice, ...] | None]


@dataclass
class Job:
    """One network on one cluster."""

    network: str
    seconds: float  # of each way's steps
    measure_s: float
    distvae: bool  # whether to time DistVAE's patches, too


def unet(options: layerwise.ParallelOptions, distvae: bool) -> dict[str, Way]:
    """The 3-D U-Net of a quarter of the channels, and a volume of 128 x 128 x 128."""
    network, x = UNet3d(width=0.25).eval(), torch.randn(1, 1, 128, 128, 128)
    model = layerwise.parallelize(copy.deepcopy(network), (x,), batch=1, inference=True, options=options)
    (read,), (made,) = model.read_boxes().values(), model.output_boxes()
    mine, windows = x[read.slices()].contiguous(), windows_of(x, dist.get_rank(), dist.get_world_size())

    def in_windows() -> None:
        for where in windows:
            network(x[where])

    plan: Way = (model, lambda: model(mine), made.slices())
    return {"one rank": (network, lambda: network(x), ()), "plan": plan, "windows": (network, in_windows, None)}


def windows_of(x: Tensor, rank: int, world: int) -> list[tuple[slice, ...]]:
    """This rank's share of the windows that MONAI cuts a volume into."""
    from monai.data.utils import dense_patch_slices
    from monai.inferers.utils import _get_scan_interval

    extents, window = tuple(x.shape[2:]), (WINDOW,) * 3
    interval = _get_scan_interval(extents, window, 3, (OVERLAP,) * 3)
    return [(slice(None), slice(None), *where) for where in dense_patch_slices(extents, window, interval)[rank::world]]


def video(
    name: str, sizes: dict[str, Any], shape: tuple[int, ...], options: layerwise.ParallelOptions, distvae: bool
) -> dict[str, Way]:
    """One of diffusers' autoencoders of videos, and a latent; its decoder is split."""
    torchvision_operators()
    import diffusers

    alone, latent = getattr(diffusers, name)(**sizes).eval(), torch.randn(shape)
    vaes = {"one rank": alone, "plan": copy.deepcopy(alone)}

    def decoded(vae: Any) -> Tensor:
        with torch.inference_mode():
            made: Tensor = vae.decode(latent).sample
        return made

    call = partial(decoded, vaes["plan"])
    vaes["plan"].decoder = layerwise.parallelize(vaes["plan"].decoder, call, inference=True, options=options)
    if distvae:
        from distvae.vae import parallelize_decoder

        vaes["DistVAE"] = copy.deepcopy(alone)
        parallelize_decoder(vaes["DistVAE"], dist.group.WORLD)
    return {way: (vae.decoder, partial(decoded, vae), ()) for way, vae in vaes.items()}


# The decoders have a quarter of their channels; 5 and 9 frames of 256 x 256.
HUNYUAN = {"block_out_channels": (32, 64, 128, 128), "norm_num_groups": 8, "layers_per_block": 1}
NETWORKS: dict[str, Callable[[layerwise.ParallelOptions, bool], dict[str, Way]]] = {
    "unet": unet,
    "hunyuan": partial(video, "AutoencoderKLHunyuanVideo", HUNYUAN, (1, 16, 2, 32, 32)),
    "wan": partial(video, "AutoencoderKLWan", {"base_dim": 24}, (1, 16, 3, 32, 32)),
}


def timed(step: Callable[[], object], seconds: float) -> list[float]:
    """Seconds of at least two steps between barriers, for about so long, after one that does not count."""
    times: list[float] = []
    dist.barrier()
    more = [True]
    while more[0]:
        began = time.perf_counter()
        step()
        dist.barrier()
        times.append(time.perf_counter() - began)
        more = [len(times) <= 2 or sum(times[1:]) < seconds]
        dist.broadcast_object_list(more)
    return times[1:]


def most(value: float) -> float:
    """The largest of all ranks."""
    values = [0.0] * dist.get_world_size()
    dist.all_gather_object(values, value)
    return max(values)


@torch.inference_mode()
def measure(job: Job) -> dict[str, object]:
    """The figures."""
    torch.manual_seed(0)
    began = time.perf_counter()
    with torch.inference_mode(False):
        ways = NETWORKS[job.network](layerwise.ParallelOptions(measure_s=job.measure_s, verbose=False), job.distvae)
    planned_s, rows = time.perf_counter() - began, dict[str, dict[str, float]]()
    expected = ways["one rank"][1]()
    assert expected is not None
    for way, (model, answer, where) in ways.items():
        live = Live([*model.parameters(), *model.buffers()])
        with live:
            found = answer()
        off = 0.0 if where is None or found is None else (found - expected[where]).abs().max() / expected.abs().max()
        takes_part = way != "one rank" or dist.get_rank() == 0
        times = timed(answer if takes_part else lambda: None, job.seconds)
        rows[way] = {"step_s": statistics.median(times), "error": most(float(off)), "memory": most(live.peak)}
    parallel = layerwise.of(ways["plan"][0])
    calls, predicted = getattr(parallel, "calls", None), parallel.plan.predicted
    return {
        "ways": rows,
        "predicted_s": None if calls else predicted["timeline_s"],  # several networks: one plan each
        "predicted_memory_bytes": calls.memory_bytes if calls else predicted["memory_bytes"],
        "planned_s": planned_s,
        "strategy": sorted({str(config) for config in parallel.plan.strategy.values()}),
    }


if __name__ == "__main__":
    run(Job, measure)
