"""Decoders of diffusers' autoencoders of images and videos, in one chunk, that is without their temporal caches; and
Mamba's causal short convolution."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from benchmarks.zoo.example import SAMPLES, Build, Example

FRAMES, SIZE, CHANNELS = 4, 8, 4  # of a latent


def _decoder(name: str, **options: Any) -> nn.Module:
    """The decoder of an autoencoder, its weights drawn."""
    import diffusers

    decoder: nn.Module = getattr(diffusers, name)(latent_channels=CHANNELS, **options).decoder
    return decoder


def _image() -> Example:
    stages = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = _decoder("AutoencoderKL", block_out_channels=(8, 16), layers_per_block=1, norm_num_groups=4, **stages)
    return Example(model, (torch.randn(SAMPLES, CHANNELS, SIZE, SIZE),))


def _video(model: nn.Module) -> Example:
    return Example(model, (torch.randn(SAMPLES, CHANNELS, FRAMES, SIZE, SIZE),))


def _wan(name: str = "AutoencoderKLWan", **options: Any) -> Example:
    """`feat_cache` is None: the time convolutions of upsampling, which only its chunks run, are not called."""
    import diffusers

    sizes = {"base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    return _video(getattr(diffusers, name)(temperal_downsample=[False, True], **sizes, **options).decoder)


def _wan_22() -> Example:
    """Wan 2.2: the shortcuts of upsampling repeat channels and shuffle them into space; not into time, see `_wan`."""
    import diffusers

    sizes = {"base_dim": 8, "decoder_base_dim": 8, "z_dim": CHANNELS, "dim_mult": [1, 2, 2], "num_res_blocks": 1}
    options = {"is_residual": True, "in_channels": 12, "out_channels": 12, "temperal_downsample": [False, False]}
    return _video(diffusers.AutoencoderKLWan(patch_size=2, **sizes, **options).decoder)


def _ltx(**options: Any) -> Example:
    model = _decoder(
        "AutoencoderKLLTXVideo",
        block_out_channels=(8, 16),
        decoder_block_out_channels=(8, 16),
        layers_per_block=(1, 1, 1),
        decoder_layers_per_block=(1, 1, 1),
        spatio_temporal_scaling=(True, False),
        decoder_spatio_temporal_scaling=(True, False),
        decoder_inject_noise=(False, False, False),
        down_block_types=("LTXVideoDownBlock3D",) * 2,
        downsample_type=("conv",) * 2,
        upsample_residual=(False, False),
        upsample_factor=(1, 1),
        patch_size=2,
        **options,
    )
    return _video(model)


def _hunyuan() -> Example:
    model = _decoder(
        "AutoencoderKLHunyuanVideo",
        block_out_channels=(8, 8, 16, 16),
        layers_per_block=1,
        norm_num_groups=4,
    )
    return Example(model, (torch.randn(SAMPLES, CHANNELS, FRAMES, 4, 4),))


class ShortConvolution(nn.Module):
    """What Mamba runs before its scan: a depthwise convolution padded on both sides and cut to the sequence."""

    def __init__(self, width: int = 16, kernel: int = 4) -> None:
        super().__init__()
        self.into = nn.Linear(width, 2 * width, bias=False)
        self.conv1d = nn.Conv1d(width, width, kernel, groups=width, padding=kernel - 1)
        self.out = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        hidden, gate = self.into(x).transpose(1, 2).chunk(2, dim=1)
        hidden = F.silu(self.conv1d(hidden)[..., : x.shape[1]])
        return self.out((hidden * F.silu(gate)).transpose(1, 2))  # type: ignore[no-any-return]


NETWORKS: dict[str, Build] = {
    "AutoencoderKL": _image,
    "AutoencoderKLWan": _wan,
    "AutoencoderKLWan (residual)": _wan_22,
    "AutoencoderKLLTXVideo": _ltx,
    "AutoencoderKLLTXVideo (causal)": lambda: _ltx(decoder_causal=True),
    "AutoencoderKLHunyuanVideo": _hunyuan,
    "AutoencoderKLQwenImage": lambda: _wan("AutoencoderKLQwenImage"),
    "Mamba's short convolution": lambda: Example(ShortConvolution(), (torch.randn(SAMPLES, 12, 16),)),
}
