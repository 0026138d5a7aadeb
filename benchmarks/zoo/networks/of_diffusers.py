"""diffusers: denoising networks with a timestep a sample, and autoencoders."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.example import SAMPLES, Build, Example

STAGES = {"block_out_channels": (16, 32), "layers_per_block": 1, "norm_num_groups": 4}
PLAIN = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}


def _built(name: str, **options: Any) -> nn.Module:
    import diffusers

    model: nn.Module = getattr(diffusers, name)(**options)
    return model


def _times() -> Tensor:
    return torch.tensor([3, 17][:SAMPLES])


def _unet2d() -> Example:
    model = _built("UNet2DModel", sample_size=16, attention_head_dim=8, **STAGES, **PLAIN)
    return Example(model, (torch.randn(SAMPLES, 3, 16, 16), _times()), ("sample", "timestep"))


def _condition() -> Example:
    blocks = {
        "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
        "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    }
    model = _built(
        "UNet2DConditionModel", sample_size=16, cross_attention_dim=24, attention_head_dim=8, **STAGES, **blocks
    )
    given = (torch.randn(SAMPLES, 4, 16, 16), _times(), torch.randn(SAMPLES, 5, 24))
    return Example(model, given, ("sample", "timestep", "encoder_hidden_states"))


def _autoencoder() -> Example:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = _built("AutoencoderKL", latent_channels=4, sample_size=32, **STAGES, **blocks)
    return Example(model, (torch.randn(SAMPLES, 3, 32, 32),))


def _vq() -> Example:
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 2, "up_block_types": ("UpDecoderBlock2D",) * 2}
    model = _built("VQModel", latent_channels=4, num_vq_embeddings=16, **STAGES, **blocks)
    return Example(model, (torch.randn(SAMPLES, 3, 32, 32),))


def _dit() -> Example:
    model = _built(
        "DiTTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=1000,
    )
    given = (torch.randn(SAMPLES, 4, 8, 8), _times(), torch.tensor([1, 2][:SAMPLES]))
    return Example(model, given, ("hidden_states", "timestep", "class_labels"))


def _pixart() -> Example:
    model = _built(
        "PixArtTransformer2DModel",
        num_attention_heads=2,
        attention_head_dim=16,
        in_channels=4,
        out_channels=8,
        num_layers=2,
        sample_size=8,
        patch_size=2,
        cross_attention_dim=32,
        caption_channels=24,
        use_additional_conditions=False,
    )
    given = (torch.randn(SAMPLES, 4, 8, 8), torch.randn(SAMPLES, 5, 24), _times())
    return Example(model, given, ("hidden_states", "encoder_hidden_states", "timestep"))


def _sd3() -> Example:
    model = _built(
        "SD3Transformer2DModel",
        sample_size=8,
        patch_size=2,
        in_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=24,
        caption_projection_dim=32,
        pooled_projection_dim=20,
        out_channels=4,
    )
    given = (torch.randn(SAMPLES, 4, 8, 8), torch.randn(SAMPLES, 5, 24), torch.randn(SAMPLES, 20), _times())
    return Example(model, given, ("hidden_states", "encoder_hidden_states", "pooled_projections", "timestep"))


def _unet1d() -> Example:
    model = _built("UNet1DModel", sample_size=64, in_channels=2, out_channels=2, extra_in_channels=64)
    return Example(model, (torch.randn(SAMPLES, 2, 64), _times()), ("sample", "timestep"))


def _unet3d() -> Example:
    blocks = {
        "down_block_types": ("CrossAttnDownBlock3D", "DownBlock3D"),
        "up_block_types": ("UpBlock3D", "CrossAttnUpBlock3D"),
    }
    model = _built(
        "UNet3DConditionModel", sample_size=16, cross_attention_dim=24, attention_head_dim=8, **STAGES, **blocks
    )
    given = (torch.randn(SAMPLES, 4, 3, 16, 16), _times(), torch.randn(SAMPLES, 5, 24))
    return Example(model, given, ("sample", "timestep", "encoder_hidden_states"))


NETWORKS: dict[str, Build] = {
    "UNet2D": _unet2d,
    "UNet2DCondition": _condition,
    "UNet1D": _unet1d,
    "UNet3DCondition": _unet3d,
    "AutoencoderKL": _autoencoder,
    "VQModel": _vq,
    "DiT": _dit,
    "PixArt": _pixart,
    "SD3": _sd3,
}
