"""segmentation-models-pytorch: every decoder, on small encoders."""

from __future__ import annotations

from typing import Any

from benchmarks.zoo.example import Build, Example, images


def _built(name: str, encoder: str = "resnet18", size: int = 64, **options: Any) -> Build:
    def build() -> Example:
        import segmentation_models_pytorch as smp

        return images(getattr(smp, name)(encoder, encoder_weights=None, classes=3, **options), size)

    return build


NETWORKS: dict[str, Build] = {
    "Unet": _built("Unet", "timm-mobilenetv3_small_minimal_100"),
    "Unet (scse)": _built("Unet", decoder_attention_type="scse"),
    "UnetPlusPlus": _built("UnetPlusPlus"),
    "MAnet": _built("MAnet"),
    "Linknet": _built("Linknet"),
    "FPN": _built("FPN"),
    "PSPNet": _built("PSPNet"),
    "PAN": _built("PAN", size=128),
    "DeepLabV3": _built("DeepLabV3"),
    "DeepLabV3Plus": _built("DeepLabV3Plus", "mobilenet_v2"),
    "UPerNet": _built("UPerNet"),
    "Segformer": _built("Segformer", "mit_b0"),
    "DPT": _built("DPT", "tu-vit_tiny_patch16_224", 224),
}
