"""segmentation-models-pytorch: every decoder, on small encoders."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.example import Build, Example, images, shallow


def _built(name: str, encoder: str = "resnet18", size: int = 64, *, whole: bool = False, **options: Any) -> Build:
    """whole: with blocks that repeat, as its forward pass counts them."""

    def build() -> Example:
        import segmentation_models_pytorch as smp

        model = getattr(smp, name)(encoder, encoder_weights=None, classes=3, **options)
        return images(model if whole else shallow(model), size)

    return build


NARROW = {"decoder_channels": (32, 16, 16, 8, 8)}

NETWORKS: dict[str, Build] = {
    "Unet": _built("Unet", "timm-mobilenetv3_small_minimal_100", **NARROW),
    "Unet (scse)": _built("Unet", decoder_attention_type="scse", decoder_channels=(32, 16, 16, 16, 16)),
    "UnetPlusPlus": _built("UnetPlusPlus", **NARROW),
    "MAnet": _built("MAnet", **NARROW),
    "Linknet": _built("Linknet"),
    "FPN": _built("FPN", whole=True, decoder_pyramid_channels=64, decoder_segmentation_channels=32),
    "PSPNet": _built("PSPNet", psp_out_channels=64),
    "PAN": _built("PAN", size=128),
    "DeepLabV3": _built("DeepLabV3", decoder_channels=32),
    "DeepLabV3Plus": _built("DeepLabV3Plus", "mobilenet_v2", decoder_channels=32),
    "UPerNet": _built("UPerNet", decoder_channels=32),
    "Segformer": _built("Segformer", "mit_b0", decoder_segmentation_channels=64),
    "DPT": _built(
        "DPT",
        "tu-vit_tiny_patch16_224",
        64,
        whole=True,
        img_size=64,
        decoder_intermediate_channels=(16, 16, 32, 32),
        decoder_fusion_channels=16,
    ),
}
