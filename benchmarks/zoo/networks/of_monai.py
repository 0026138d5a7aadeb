"""MONAI: segmentation, classification, reconstruction."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from benchmarks.zoo.example import Build, Example, images, volumes


def _built(
    name: str, called: Callable[..., Example], size: int | tuple[int, ...], colours: int = 1, **options: Any
) -> Build:
    def build() -> Example:
        from monai.networks import nets

        return called(getattr(nets, name)(**options), size, colours)

    return build


THREE: dict[str, Any] = {"spatial_dims": 3, "in_channels": 1, "out_channels": 2}
TWO: dict[str, Any] = THREE | {"spatial_dims": 2}
STEPS: dict[str, Any] = {"channels": (4, 8, 16), "strides": (2, 2)}

NETWORKS: dict[str, Build] = {
    "UNet 2D": _built("UNet", images, 32, **TWO, **STEPS, num_res_units=1),
    "UNet 3D": _built("UNet", volumes, 16, **THREE, **STEPS, num_res_units=1, norm="batch"),
    "BasicUNet": _built("BasicUNet", volumes, 32, **THREE, features=(4, 4, 8, 8, 16, 4)),
    "BasicUNetPlusPlus": _built("BasicUNetPlusPlus", images, 32, **TWO, features=(4, 4, 8, 8, 16, 4)),
    "AttentionUnet": _built("AttentionUnet", volumes, 16, **THREE, **STEPS),
    "DynUNet": _built(
        "DynUNet",
        volumes,
        16,
        **THREE,
        kernel_size=[3, 3, 3],
        strides=[1, 2, 2],
        upsample_kernel_size=[2, 2],
        filters=[4, 8, 16],
        deep_supervision=False,
    ),
    "SegResNet": _built("SegResNet", volumes, 16, **THREE, init_filters=8, blocks_down=(1, 1), blocks_up=(1,)),
    "SegResNetDS": _built("SegResNetDS", volumes, 16, **THREE, init_filters=8, blocks_down=(1, 1), dsdepth=1),
    "VNet": _built("VNet", volumes, 16, **THREE),
    "HighResNet": _built("HighResNet", volumes, 16, **THREE),
    "UNETR": _built(
        "UNETR",
        volumes,
        32,
        in_channels=1,
        out_channels=2,
        img_size=(32, 32, 32),
        feature_size=4,
        hidden_size=24,
        mlp_dim=32,
        num_heads=4,
    ),
    "SwinUNETR": _built(
        "SwinUNETR", images, (64, 32, 32), in_channels=1, out_channels=2, feature_size=12, depths=(2, 2, 1, 1)
    ),
    "DenseNet": _built("DenseNet", volumes, 32, **THREE, init_features=8, growth_rate=4, block_config=(2, 2)),
    "SENet": _built("SEResNet50", images, 32, 3, spatial_dims=2, in_channels=3, layers=(1, 1, 1, 1), num_classes=3),
    "EfficientNetBN": _built(
        "EfficientNetBN", images, 64, 3, model_name="efficientnet-b0", spatial_dims=2, pretrained=False
    ),
    "ResNet 3D": _built(
        "ResNet",
        volumes,
        16,
        block="basic",
        layers=[1, 1, 1, 1],
        block_inplanes=[4, 8, 16, 32],
        n_input_channels=1,
        num_classes=3,
    ),
    "ViT": _built(
        "ViT",
        volumes,
        16,
        in_channels=1,
        img_size=(16, 16, 16),
        patch_size=(8, 8, 8),
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=4,
        classification=True,
    ),
    "ViTAutoEnc": _built(
        "ViTAutoEnc",
        volumes,
        16,
        in_channels=1,
        img_size=(16, 16, 16),
        patch_size=(4, 4, 4),
        hidden_size=24,
        mlp_dim=32,
        num_layers=2,
        num_heads=4,
    ),
    "AutoEncoder": _built("AutoEncoder", volumes, 16, **THREE, channels=(4, 8), strides=(2, 2)),
    "VarAutoEncoder": _built(
        "VarAutoEncoder",
        images,
        32,
        spatial_dims=2,
        in_shape=(1, 32, 32),
        out_channels=1,
        latent_size=4,
        channels=(4, 8),
        strides=(2, 2),
    ),
    "FlexibleUNet": _built("FlexibleUNet", images, 64, 3, in_channels=3, out_channels=2, backbone="efficientnet-b0"),
    "SegResNetVAE": _built(
        "SegResNetVAE",
        volumes,
        16,
        in_channels=1,
        out_channels=2,
        input_image_size=(16, 16, 16),
        init_filters=8,
        blocks_down=(1, 1),
        blocks_up=(1,),
    ),
}
