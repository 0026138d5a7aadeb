"""DenseNet-121 (Huang et al., Densely Connected Convolutional Networks, CVPR 2017)."""

from collections import OrderedDict

import torch
from torch import Tensor, nn

from .width import scaling

LAYERS = (6, 12, 24, 16)  # of each dense block
GROWTH = 32  # channels that a dense layer adds
BOTTLENECK = 4  # channels between its two convolutions, in units of the growth


class DenseLayer(nn.Module):
    """Reads the concatenation of all the outputs before it."""

    def __init__(self, in_channels: int, growth: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(in_channels)
        self.relu1 = nn.ReLU()
        self.conv1 = nn.Conv2d(in_channels, BOTTLENECK * growth, kernel_size=1, bias=False)
        self.norm2 = nn.BatchNorm2d(BOTTLENECK * growth)
        self.relu2 = nn.ReLU()
        self.conv2 = nn.Conv2d(BOTTLENECK * growth, growth, kernel_size=3, padding=1, bias=False)

    def forward(self, features: list[Tensor]) -> Tensor:
        x: Tensor = torch.cat(features, 1)
        x = self.conv1(self.relu1(self.norm1(x)))
        x = self.conv2(self.relu2(self.norm2(x)))
        return x


class DenseBlock(nn.ModuleDict):
    """Dense layers, and the concatenation of all that they made."""

    def __init__(self, layers: int, in_channels: int, growth: int) -> None:
        super().__init__({f"denselayer{i + 1}": DenseLayer(in_channels + i * growth, growth) for i in range(layers)})

    def forward(self, x: Tensor) -> Tensor:
        features = [x]
        for layer in self.values():
            features.append(layer(features))
        return torch.cat(features, 1)


def _transition(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        OrderedDict(
            norm=nn.BatchNorm2d(in_channels),
            relu=nn.ReLU(),
            conv=nn.Conv2d(in_channels, out_channels, kernel_size=1, bias=False),
            pool=nn.AvgPool2d(2),
        )
    )


class DenseNet121(nn.Module):
    """Four dense blocks; transitions between them halve the channels and the image."""

    def __init__(self, width: float = 1.0, num_classes: int = 1000) -> None:
        super().__init__()
        c = scaling(width)
        channels = c(64)
        self.features = nn.Sequential(
            OrderedDict(
                conv0=nn.Conv2d(3, channels, kernel_size=7, stride=2, padding=3, bias=False),
                norm0=nn.BatchNorm2d(channels),
                relu0=nn.ReLU(),
                pool0=nn.MaxPool2d(kernel_size=3, stride=2, padding=1),
            )
        )
        for number, layers in enumerate(LAYERS, start=1):
            self.features.add_module(f"denseblock{number}", DenseBlock(layers, channels, c(GROWTH)))
            channels += layers * c(GROWTH)
            if number < len(LAYERS):
                self.features.add_module(f"transition{number}", _transition(channels, channels // 2))
                channels //= 2
        self.features.add_module("norm5", nn.BatchNorm2d(channels))
        self.classifier = nn.Linear(channels, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = nn.functional.relu(self.features(x))
        x = nn.functional.adaptive_avg_pool2d(x, (1, 1))
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x
