"""torchrun --nproc-per-node 2 -m benchmarks.decoders: the decoders of diffusers' autoencoders, small, in float64.

Each class is given random weights and a latent; `vae.decode(latent)` is compared with one device's. Printed is the
table of docs/how-to/predict.md: in how many ways the decoder is called (chunks), the largest difference relative to the
largest number, the memory of the fullest rank (predicted; measured as `common.live` does), and seconds of this process
to plan, in which the model is imported and proven. `--only NAME ...` are some of them.
"""

from __future__ import annotations

import argparse
import time
import warnings
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import layerwise
from benchmarks.common.live import Live
from benchmarks.zoo.shims import torchvision_operators
from layerwise.errors import LayerwiseError
from layerwise.machine import load
from layerwise.machine.profile import Profile
from layerwise.quantities import units
from layerwise.run.calls import CallPlans

UP = {"up_block_types": ("UpDecoderBlock2D",) * 2, "down_block_types": ("DownEncoderBlock2D",) * 2}
IMAGE = {**UP, "block_out_channels": (8, 16), "layers_per_block": 1}
WAN = {"base_dim": 8, "z_dim": 4, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
WAN |= {"temperal_downsample": [False, True], "latents_mean": [0.0] * 4, "latents_std": [1.0] * 4}
FOUR = {"block_out_channels": (8, 8, 8, 8), "layers_per_block": 1, "latent_channels": 4, "norm_num_groups": 4}
HUNYUAN = {"block_out_channels": (8, 16, 16), "layers_per_block": 1, "latent_channels": 4}
HUNYUAN |= {"spatial_compression_ratio": 4, "temporal_compression_ratio": 2}
LTX = {
    "latent_channels": 8, "patch_size": 1, "block_out_channels": (8, 8, 8, 8), "layers_per_block": (1,) * 5,
    "upsample_residual": (False,) * 4, "upsample_factor": (1,) * 4,
    "decoder_block_out_channels": (8, 8, 8, 8), "decoder_layers_per_block": (1,) * 5,
    "decoder_spatio_temporal_scaling": (True, True, False, False), "decoder_inject_noise": (False,) * 5,
}  # fmt: skip
LTX_2 = {
    "latent_channels": 8, "patch_size": 1, "block_out_channels": (8, 8, 8, 8), "layers_per_block": (1,) * 5,
    "decoder_block_out_channels": (8, 16, 32), "decoder_layers_per_block": (1,) * 4, "decoder_causal": False,
    "decoder_spatial_padding_mode": "zeros",
}  # fmt: skip
VIDEO, PICTURE = (1, 4, 3, 8, 8), (1, 4, 8, 8)
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "AutoencoderKL": ({**IMAGE, "norm_num_groups": 4}, PICTURE),
    "AsymmetricAutoencoderKL": (
        {**UP, "down_block_out_channels": (8, 16), "up_block_out_channels": (8, 16), "norm_num_groups": 4}, PICTURE),
    "AutoencoderDC": (
        {"latent_channels": 4, "attention_head_dim": 2, "encoder_block_types": ("ResBlock", "EfficientViTBlock"),
         "decoder_block_types": ("ResBlock", "EfficientViTBlock"), "encoder_block_out_channels": (8, 8),
         "decoder_block_out_channels": (8, 8), "encoder_qkv_multiscales": ((), (5,)),
         "decoder_qkv_multiscales": ((), (5,)), "encoder_layers_per_block": (1, 1),
         "decoder_layers_per_block": (1, 1), "upsample_block_type": "interpolate"}, PICTURE),
    "AutoencoderTiny": (
        {"encoder_block_out_channels": (8, 8), "decoder_block_out_channels": (8, 8), "num_encoder_blocks": (1, 1),
         "num_decoder_blocks": (1, 1)}, PICTURE),
    "VQModel": ({**IMAGE, "norm_num_groups": 4}, (1, 3, 8, 8)),
    "AutoencoderOobleck": (
        {"encoder_hidden_size": 12, "decoder_channels": 12, "decoder_input_channels": 4, "downsampling_ratios": [2, 4],
         "channel_multiples": [1, 2]}, (1, 4, 16)),
    "AutoencoderKLFlux2": ({**IMAGE, "norm_num_groups": 4, "latent_channels": 4}, PICTURE),
    "AutoencoderKLKVAE": ({"channels": 32, "num_enc_blocks": 1, "num_dec_blocks": 1, "z_channels": 4,
                           "ch_mult": (1, 2)}, PICTURE),
    "AutoencoderKLHunyuanImage": (
        {"in_channels": 3, "out_channels": 3, "latent_channels": 4, "block_out_channels": (32, 64),
         "layers_per_block": 1, "spatial_compression_ratio": 2, "sample_size": 16}, PICTURE),
    "AutoencoderKLTemporalDecoder": (
        {"down_block_types": UP["down_block_types"], "block_out_channels": (32, 64)},
        (3, 4, 8, 8),
    ),
    "AutoencoderKLHunyuanVideo": (FOUR, VIDEO),
    "AutoencoderKLHunyuanVideo15": (HUNYUAN, VIDEO),
    "AutoencoderKLHunyuanImageRefiner": (HUNYUAN, VIDEO),
    "AutoencoderKLCogVideoX": (FOUR, (1, 4, 6, 4, 4)),
    "AutoencoderKLCosmos": (
        {"latent_channels": 4, "encoder_block_out_channels": (8,) * 4, "decode_block_out_channels": (8,) * 4,
         "attention_resolutions": (8,), "resolution": 64, "spatial_compression_ratio": 4,
         "temporal_compression_ratio": 4}, VIDEO),
    "AutoencoderKLLTXVideo": (LTX, (1, 8, 3, 4, 4)),
    "AutoencoderKLLTX2Video": (LTX_2, (1, 8, 3, 4, 4)),
    "AutoencoderKLMagvit": ({**FOUR, "norm_num_groups": 8}, (1, 4, 3, 4, 4)),
    "AutoencoderKLMochi": (
        {"latent_channels": 4, "encoder_block_out_channels": (32,) * 4, "decoder_block_out_channels": (32,) * 4,
         "layers_per_block": (1,) * 5, "latents_mean": None, "latents_std": None}, (1, 4, 3, 4, 4)),
    "AutoencoderKLAllegro": (
        {**FOUR, "temporal_downsample_blocks": (True, True, False, False), "sample_size": 64}, (1, 4, 6, 8, 8)),
    "AutoencoderKLKVAEVideo": (
        {"ch": 32, "ch_mult": (1, 2), "num_res_blocks": 1, "z_channels": 4, "temporal_compress_times": 2},
        (1, 4, 3, 4, 4)),
    "AutoencoderVidTok": ({"ch": 32, "ch_mult": [1, 2], "z_channels": 4, "num_res_blocks": 1}, (1, 4, 4, 4, 4)),
    "Kandinsky6SRVAE": (
        {"latent_channels": 4, "encoder_block_out_channels": (16, 32, 32), "layers_per_block": 1,
         "decoder_block_out_channels": (16, 32, 32)}, (1, 4, 3, 4, 4)),
    "AutoencoderKLWan": (WAN, VIDEO),
    "AutoencoderKLWan, 2.2": (
        {**WAN, "decoder_base_dim": 8, "is_residual": True, "in_channels": 12, "out_channels": 12, "patch_size": 2},
        VIDEO),
    "AutoencoderKLQwenImage": (WAN, VIDEO),
}  # fmt: skip


def slow() -> Profile:
    """Processors so slow beside their links that also small networks are worth being split."""
    cpu = load("cpu")
    rates = {dtype: rate / 1e5 for dtype, rate in cpu.processor.peak_flops.items()}
    processor = replace(cpu.processor, peak_flops=rates, memory_bandwidth_bytes_per_s=1e5, kernel_floor_s=1e-9)
    return replace(cpu, name="slow", processor=processor)


class Watched(nn.Module):
    """A decoder whose memory is counted while it is called."""

    def __init__(self, decoder: nn.Module, live: Live) -> None:
        super().__init__()
        self.decoder, self.live = decoder, live

    def forward(self, *inputs: Any, **named: Any) -> Any:
        with self.live:
            return self.decoder(*inputs, **named)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("decoder"), name)


def decoded(name: str) -> tuple[str, ...]:
    """The row of one class. Every rank calls it."""
    torchvision_operators()
    import diffusers

    sizes, shape = CASES[name]
    torch.manual_seed(0)
    vae = getattr(diffusers, name.partition(",")[0])(**sizes).double().eval()
    latent = torch.randn(shape, dtype=torch.float64)
    if "Allegro" in name:
        vae.enable_tiling()  # it has no other way
    more = {"num_frames": len(latent)} if "Temporal" in name else {}

    def decode() -> Tensor:
        with torch.no_grad():
            made = vae.decode(latent, **more)
        video: Tensor = getattr(made, "sample", made)  # VidTok's is the video itself
        return video

    expected = decode()
    began = time.process_time()
    try:
        options = layerwise.ParallelOptions(profile=slow(), measure_s=0, verbose=False)
        vae.decoder = layerwise.parallelize(vae.decoder, decode, inference=True, options=options)
        seconds = time.process_time() - began
        run = layerwise.of(vae.decoder)
        live = Live([*vae.decoder.parameters(), *vae.decoder.buffers()])
        vae.decoder = Watched(vae.decoder, live)
        video = decode()
    except LayerwiseError as refusal:
        return name, "refused", str(refusal), "", "", "", f"{time.process_time() - began:.1f}"
    error = float((video - expected).abs().max() / expected.abs().max())
    split = sum(config.total > 1 for config in run.plan.strategy.values())
    calls: CallPlans | None = getattr(run, "calls", None)
    ways = 1 if calls is None else len(calls)
    peaks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(peaks, live.peak)
    held = run.plan.predicted.get("memory_bytes", 0) if calls is None else calls.memory_bytes
    return (
        name, str(ways), f"{split} of {len(run.plan.strategy)}", f"{error:.0e}", units(held, "B"),
        units(max(peaks), "B"), f"{seconds:.1f}",
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=CASES, default=list(CASES), metavar="NAME")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    dist.init_process_group("gloo")
    if dist.get_rank() == 0:
        print("| class | ways it is called | layers split | error | memory predicted | measured | seconds to plan |")
        print("|---|---|---|---|---|---|---|")
    for name in args.only:
        row = decoded(name)
        if dist.get_rank() == 0:
            print("|", " | ".join(row), "|", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
