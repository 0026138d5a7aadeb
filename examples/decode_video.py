"""A video decoder of diffusers', small and with random weights: one latent on all ranks, the video as on one device.

python examples/decode_video.py                        # needs: pip install diffusers
torchrun --nproc-per-node 2 examples/decode_video.py
"""

import argparse
import os

import torch
from diffusers import AutoencoderKLWan
from torch import Tensor

import layerwise


def main(measure_s: float) -> None:
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    torch.manual_seed(0)
    vae = AutoencoderKLWan(base_dim=8, z_dim=4, dim_mult=[1, 2], num_res_blocks=1, temperal_downsample=[True])
    vae = vae.double().eval()  # of a pipeline: pipe.vae
    latent = torch.randn(1, 4, 3, 4, 4, dtype=torch.float64)  # samples, channels, frames, height, width

    def decode() -> Tensor:
        """Frame by frame, with a cache that the decoder writes into."""
        with torch.inference_mode():
            video: Tensor = vae.decode(latent).sample
        return video

    expected = decode()
    # One rank alone is faster at so small a decoder; leave `strategy` out at real sizes.
    strategy = {"conv_in": {"h": world}, "up_blocks.*": {"h": world}, "conv_out": {"h": world}} if world > 1 else None
    options = layerwise.ParallelOptions(measure_s=measure_s, verbose=False)
    vae.decoder = layerwise.parallelize(vae.decoder, decode, inference=True, strategy=strategy, options=options)
    video = decode()
    if rank == 0:
        split = sum(config.total > 1 for config in vae.decoder.plan.strategy.values())
        print(f"{tuple(video.shape)}: {split} layers are split; difference {(video - expected).abs().max():.1e}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument(
        "--measure-s", type=float, default=0.0, help="seconds to measure this machine; 30 for real work"
    )
    main(**vars(parser.parse_args()))
