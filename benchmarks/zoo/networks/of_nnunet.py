"""nnU-Net's dynamic_network_architectures."""

from __future__ import annotations

from typing import Any

from torch import nn

from benchmarks.zoo.example import Build, Example, images, volumes

STAGES: dict[str, Any] = {
    "n_stages": 3,
    "features_per_stage": (4, 8, 16),
    "strides": (1, 2, 2),
    "conv_bias": True,
    "norm_op_kwargs": {"eps": 1e-5, "affine": True},
    "nonlin": nn.LeakyReLU,
    "nonlin_kwargs": {"inplace": True},
}
DEPTHS = {
    "PlainConvUNet": {"n_conv_per_stage": (2, 2, 2), "n_conv_per_stage_decoder": (2, 2)},
    "ResidualEncoderUNet": {"n_blocks_per_stage": (1, 2, 2), "n_conv_per_stage_decoder": (1, 1)},
    "ResidualUNet": {"n_blocks_per_stage": (1, 2, 2), "n_conv_per_stage_decoder": (1, 1)},
}


def _unet(kind: str, dims: int, *, deep: bool = False) -> Build:
    def build() -> Example:
        from dynamic_network_architectures.architectures import unet

        conv, norm = (nn.Conv2d, nn.InstanceNorm2d) if dims == 2 else (nn.Conv3d, nn.InstanceNorm3d)
        model = getattr(unet, kind)(
            input_channels=1,
            num_classes=3,
            conv_op=conv,
            norm_op=norm,
            kernel_sizes=(3,) * 3,
            deep_supervision=deep,
            **STAGES,
            **DEPTHS[kind],
        )
        return images(model, 32, 1) if dims == 2 else volumes(model, 16)

    return build


NETWORKS: dict[str, Build] = {
    "PlainConvUNet 2D": _unet("PlainConvUNet", 2),
    "PlainConvUNet 3D": _unet("PlainConvUNet", 3, deep=True),
    "ResidualEncoderUNet 2D": _unet("ResidualEncoderUNet", 2, deep=True),
    "ResidualEncoderUNet 3D": _unet("ResidualEncoderUNet", 3),
    "ResidualUNet 3D": _unet("ResidualUNet", 3),
}
