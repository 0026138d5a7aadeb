"""ResNet-18, -50 and -152 (He et al., Deep Residual Learning for Image Recognition, CVPR 2016).

The stride of a bottleneck is in its 3 x 3 convolution, as in torchvision; the paper has it in the first 1 x 1.
"""

import torch
from torch import Tensor, nn

from .width import scaling


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Sequential | None:
    """Return the projection that fits a block's input to its output, or None where they have one shape."""
    if stride == 1 and in_channels == out_channels:
        return None
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=1, stride=stride, bias=False),
        nn.BatchNorm2d(out_channels),
    )


class BasicBlock(nn.Module):
    """Two 3 x 3 convolutions beside a shortcut."""

    expansion = 1

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.relu = nn.ReLU()
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.downsample = _shortcut(in_channels, channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.bn2(self.conv2(x))
        x = self.relu(x + shortcut)
        return x


class Bottleneck(nn.Module):
    """1 x 1, 3 x 3 and 1 x 1 convolutions beside a shortcut; the last has four times the channels."""

    expansion = 4

    def __init__(self, in_channels: int, channels: int, stride: int) -> None:
        super().__init__()
        out_channels = self.expansion * channels
        self.conv1 = nn.Conv2d(in_channels, channels, kernel_size=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, kernel_size=3, stride=stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.conv3 = nn.Conv2d(channels, out_channels, kernel_size=1, bias=False)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.relu = nn.ReLU()
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        shortcut = x if self.downsample is None else self.downsample(x)
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.relu(self.bn2(self.conv2(x)))
        x = self.bn3(self.conv3(x))
        x = self.relu(x + shortcut)
        return x


def _stage(
    block: type[BasicBlock | Bottleneck], in_channels: int, channels: int, blocks: int, stride: int
) -> nn.Sequential:
    out_channels = block.expansion * channels
    return nn.Sequential(
        block(in_channels, channels, stride),
        *(block(out_channels, channels, stride=1) for _ in range(blocks - 1)),
    )


class ResNet(nn.Module):
    """A stem, four stages of residual blocks, a global average and one linear layer."""

    def __init__(
        self,
        block: type[BasicBlock | Bottleneck],
        blocks: tuple[int, int, int, int],
        width: float = 1.0,
        num_classes: int = 1000,
    ) -> None:
        super().__init__()
        c, k = scaling(width), block.expansion
        self.conv1 = nn.Conv2d(3, c(64), kernel_size=7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(c(64))
        self.relu = nn.ReLU()
        self.maxpool = nn.MaxPool2d(kernel_size=3, stride=2, padding=1)
        self.layer1 = _stage(block, c(64), c(64), blocks[0], stride=1)
        self.layer2 = _stage(block, k * c(64), c(128), blocks[1], stride=2)
        self.layer3 = _stage(block, k * c(128), c(256), blocks[2], stride=2)
        self.layer4 = _stage(block, k * c(256), c(512), blocks[3], stride=2)
        self.avgpool = nn.AdaptiveAvgPool2d((1, 1))
        self.fc = nn.Linear(k * c(512), num_classes)

    def forward(self, x: Tensor) -> Tensor:
        x = self.relu(self.bn1(self.conv1(x)))
        x = self.maxpool(x)
        x = self.layer1(x)
        x = self.layer2(x)
        x = self.layer3(x)
        x = self.layer4(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.fc(x)
        return x


def resnet18(width: float = 1.0, num_classes: int = 1000) -> ResNet:
    return ResNet(BasicBlock, (2, 2, 2, 2), width, num_classes)


def resnet50(width: float = 1.0, num_classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 4, 6, 3), width, num_classes)


def resnet152(width: float = 1.0, num_classes: int = 1000) -> ResNet:
    return ResNet(Bottleneck, (3, 8, 36, 3), width, num_classes)
