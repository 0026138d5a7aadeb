"""MobileNetV2 (Sandler et al., MobileNetV2: Inverted Residuals and Linear Bottlenecks, CVPR 2018)."""

import torch
from torch import Tensor, nn

from .width import scaling

# (expansion, channels, blocks, stride of the first block): table 2 of the paper.
STAGES = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)


def _conv_bn_relu6(
    in_channels: int, out_channels: int, kernel_size: int, stride: int = 1, groups: int = 1
) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size, stride, padding=kernel_size // 2, groups=groups, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU6(),
    )


class InvertedResidual(nn.Module):
    """A wide depthwise convolution between two narrow ends; the shortcut joins the ends."""

    def __init__(self, in_channels: int, out_channels: int, stride: int, expansion: int) -> None:
        super().__init__()
        self.shortcut = stride == 1 and in_channels == out_channels
        hidden = expansion * in_channels
        layers: list[nn.Module] = []
        if expansion > 1:
            layers.append(_conv_bn_relu6(in_channels, hidden, kernel_size=1))
        layers += [
            _conv_bn_relu6(hidden, hidden, kernel_size=3, stride=stride, groups=hidden),
            nn.Conv2d(hidden, out_channels, kernel_size=1, bias=False),
            nn.BatchNorm2d(out_channels),
        ]
        self.conv = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.conv(x)
        return x + y if self.shortcut else y


class MobileNetV2(nn.Module):
    """Seventeen inverted residuals between two plain convolutions.

    `width` scales every layer and does not round to multiples of 8, unlike torchvision's `width_mult`.
    """

    def __init__(self, width: float = 1.0, num_classes: int = 1000) -> None:
        super().__init__()
        c = scaling(width)
        layers: list[nn.Module] = [_conv_bn_relu6(3, c(32), kernel_size=3, stride=2)]
        in_channels = c(32)
        for expansion, channels, blocks, first_stride in STAGES:
            for block in range(blocks):
                stride = first_stride if block == 0 else 1
                layers.append(InvertedResidual(in_channels, c(channels), stride, expansion))
                in_channels = c(channels)
        layers.append(_conv_bn_relu6(in_channels, c(1280), kernel_size=1))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(nn.Dropout(0.2), nn.Linear(c(1280), num_classes))

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x
