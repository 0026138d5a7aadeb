"""torchvision: classification, segmentation, video."""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo.example import SAMPLES, Build, Example, images, shallow

CLASSES = 7


def _models() -> ModuleType:
    from torchvision import models

    return models


def _named(name: str, size: int = 64, **options: Any) -> Build:
    """One of torchvision's own sizes, with blocks that repeat left out."""
    return lambda: images(shallow(_models().get_model(name, weights=None, num_classes=CLASSES, **options)), size)


def _narrow(name: str, size: int, width: int = 64) -> Build:
    """With a hidden width of its dense layers that is not 4096."""

    def build() -> Example:
        made = _named(name, size)()
        head = made.model.classifier
        dense = [i for i, layer in enumerate(head) if isinstance(layer, nn.Linear)]
        widths = [head[dense[0]].in_features, *(width for _ in dense[1:]), CLASSES]
        for i, (before, after) in zip(dense, pairwise(widths), strict=True):
            head[i] = nn.Linear(before, after)
        return made

    return build


def _segmentation(name: str, size: int = 64, **options: Any) -> Build:
    def build() -> Example:
        models = _models()
        model = models.get_model(name, weights=None, weights_backbone=None, num_classes=CLASSES, **options)
        return images(shallow(model), size)

    return build


def _video(name: str, size: int = 16, frames: int = 4, **options: Any) -> Build:
    def build() -> Example:
        model = _models().get_model(name, weights=None, num_classes=CLASSES, **options)
        if hasattr(model, "avgpool") and isinstance(model.avgpool, nn.AvgPool3d):  # of a fixed size
            model.avgpool = nn.AvgPool3d((frames // 8, size // 32, size // 32))
        return Example(shallow(model), (torch.randn(SAMPLES, 3, frames, size, size),))

    return build


def _resnet(block: str, layers: tuple[int, ...], **options: Any) -> Example:
    resnet = _models().resnet
    return images(resnet.ResNet(getattr(resnet, block), list(layers), num_classes=CLASSES, **options), 64)


def _vit(size: int = 32) -> Example:
    model = _models().VisionTransformer(
        size, patch_size=8, num_layers=2, num_heads=4, hidden_dim=32, mlp_dim=64, num_classes=CLASSES
    )
    return images(model, size)


def _swin(size: int, window: int, *, second: bool = False) -> Example:
    swin = _models().swin_transformer
    options: dict[str, Any] = {}
    if second:
        options = {"block": swin.SwinTransformerBlockV2, "downsample_layer": swin.PatchMergingV2}
    model = swin.SwinTransformer(
        [4, 4], 24, [2, 2, 1], [2, 4, 4], [window, window], stochastic_depth_prob=0.0, num_classes=CLASSES, **options
    )
    return images(model, size)


def _swin3d() -> Example:
    _models()
    from torchvision.models.video.swin_transformer import SwinTransformer3d

    model = SwinTransformer3d([2, 4, 4], 24, [2, 1], [2, 4], [2, 4, 4], stochastic_depth_prob=0.0, num_classes=CLASSES)
    return Example(model, (torch.randn(SAMPLES, 3, 4, 32, 32),))


def _convnext() -> Example:
    convnext = _models().convnext
    settings = [convnext.CNBlockConfig(16, 32, 2), convnext.CNBlockConfig(32, None, 2)]
    return images(convnext.ConvNeXt(settings, num_classes=CLASSES), 64)


def _maxvit() -> Example:
    model = _models().MaxVit((32, 32), 16, 4, [16, 32], [1, 1], 8, 0.0, num_classes=CLASSES)
    return images(model, 32)


def _densenet() -> Example:
    return images(_models().DenseNet(8, (2, 2, 2), 16, num_classes=CLASSES), 64)


class _FewSteps(nn.Module):
    """RAFT with two steps of refinement, not twelve."""

    def __init__(self, flow: nn.Module) -> None:
        super().__init__()
        self.flow = flow

    def forward(self, first: Tensor, second: Tensor) -> list[Tensor]:
        made: list[Tensor] = self.flow(first, second, num_flow_updates=2)
        return made


def _raft() -> Example:
    _models()
    from torchvision.models.optical_flow import raft_small

    pictures = (torch.randn(SAMPLES, 3, 128, 128), torch.randn(SAMPLES, 3, 128, 128))
    return Example(_FewSteps(raft_small(weights=None)), pictures)


NETWORKS: dict[str, Build] = {
    "alexnet": _narrow("alexnet", 64),
    "convnext": _convnext,
    "densenet": _densenet,
    "efficientnet_b0": _named("efficientnet_b0"),
    "efficientnet_v2_s": _named("efficientnet_v2_s"),
    "googlenet": _named("googlenet", aux_logits=True, init_weights=False),
    "inception_v3": _named("inception_v3", 75, aux_logits=False, init_weights=False),
    "maxvit": _maxvit,
    "mnasnet0_5": _named("mnasnet0_5"),
    "mobilenet_v2": _named("mobilenet_v2", width_mult=0.5),
    "mobilenet_v3_small": _named("mobilenet_v3_small"),
    "regnet_x_400mf": _named("regnet_x_400mf"),
    "regnet_y_400mf": _named("regnet_y_400mf"),
    "resnet (basic blocks)": partial(_resnet, "BasicBlock", (1, 1, 1, 1)),
    "resnet (bottlenecks)": partial(_resnet, "Bottleneck", (1, 1, 1, 1)),
    "resnext": partial(_resnet, "Bottleneck", (1, 1, 1, 1), groups=32, width_per_group=4),
    "shufflenet_v2_x0_5": _named("shufflenet_v2_x0_5"),
    "squeezenet1_0": _named("squeezenet1_0"),
    "swin": partial(_swin, 32, 4),
    "swin at 224": partial(_swin, 224, 7),
    "swin_v2": partial(_swin, 32, 4, second=True),
    "vgg11_bn": _narrow("vgg11_bn", 32),
    "vit": _vit,
    "deeplabv3_resnet50": _segmentation("deeplabv3_resnet50", aux_loss=True),
    "fcn_resnet50": _segmentation("fcn_resnet50", aux_loss=True),
    "lraspp_mobilenet_v3_large": _segmentation("lraspp_mobilenet_v3_large"),
    "r3d_18": _video("r3d_18"),
    "mc3_18": _video("mc3_18"),
    "r2plus1d_18": _video("r2plus1d_18"),
    "s3d": _video("s3d", 32, 8),
    "swin3d": _swin3d,
    "raft_small": _raft,
}
