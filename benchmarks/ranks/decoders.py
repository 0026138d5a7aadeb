"""What each rank of `benchmarks.decoders --rate` runs: a video decoded by one rank and by all, on the same links.

The plan is the one that `layerwise.parallelize` finds by links and layers which these ranks measure.
"""

from __future__ import annotations

import copy
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import layerwise
from benchmarks.common.live import Live
from benchmarks.ranks.inference import timed
from benchmarks.ranks.rank import run
from benchmarks.zoo.shims import torchvision_operators

# Of a quarter of the channels: the class, its options and the latent's shape, of 5 and of 9 frames of 256 x 256.
HUNYUAN = {"block_out_channels": (32, 64, 128, 128), "norm_num_groups": 8, "layers_per_block": 1}
VIDEOS: dict[str, tuple[str, dict[str, Any], tuple[int, ...]]] = {
    "hunyuan": ("AutoencoderKLHunyuanVideo", HUNYUAN, (1, 16, 2, 32, 32)),
    "wan": ("AutoencoderKLWan", {"base_dim": 24}, (1, 16, 3, 32, 32)),
}


@dataclass
class Job:
    """One decoder on one cluster."""

    decoder: str
    seconds: float  # of each way's steps
    measure_s: float
    distvae: bool = False  # whether to time DistVAE's patches beside it


def measure(job: Job) -> dict[str, object]:
    """Returns the figures."""
    torchvision_operators()
    import diffusers

    kind, options, shape = VIDEOS[job.decoder]
    torch.manual_seed(0)
    vae = getattr(diffusers, kind)(**options).eval()
    latent, alone = torch.randn(shape), copy.deepcopy(vae)

    def decode(of: Any) -> Tensor:
        with torch.inference_mode():
            video: Tensor = of.decode(latent).sample
        return video

    chosen = layerwise.ParallelOptions(measure_s=job.measure_s, verbose=False)
    began = time.perf_counter()
    vae.decoder = layerwise.parallelize(vae.decoder, lambda: decode(vae), inference=True, options=chosen)
    planned_s = time.perf_counter() - began
    ways: dict[str, Any] = {"plan": vae, "one rank": alone if dist.get_rank() == 0 else None}
    if job.distvae:
        from distvae.vae import parallelize_decoder

        patched = copy.deepcopy(alone)
        parallelize_decoder(patched, dist.group.WORLD)
        ways["DistVAE"] = patched
    expected, errors, peaks = decode(alone), dict[str, float](), dict[str, float]()
    for name, of in ways.items():
        live = Live([latent, *([] if of is None else (*of.decoder.parameters(), *of.decoder.buffers()))])
        with live:
            video = expected if of is None else decode(of)
        errors[name] = float((video - expected).abs().max() / expected.abs().max())
        peak = torch.tensor(float(live.peak))
        dist.all_reduce(peak, dist.ReduceOp.MAX)
        peaks[name] = float(peak)
    rounds: dict[str, list[float]] = {name: [] for name in ways}
    for name, of in (*ways.items(), *ways.items()):
        rounds[name] += timed(lambda of=of: of and decode(of), job.seconds / 2, least=1)
    strategy = layerwise.of(vae.decoder).plan.strategy.values()
    return {
        "times": {name: statistics.median(seconds) for name, seconds in rounds.items()},
        "errors": errors,
        "memory": peaks,
        "planned_s": planned_s,
        "strategy": sorted({str(config) for config in strategy}),
    }


if __name__ == "__main__":
    run(Job, measure)
