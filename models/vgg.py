"""VGG-16 (Simonyan and Zisserman, Very Deep Convolutional Networks for Large-Scale Image Recognition, ICLR 2015)."""

import torch
from torch import Tensor, nn

from .width import scaling

# Convolutions and their channels between two poolings: configuration D of the paper.
STAGES = ((2, 64), (2, 128), (3, 256), (3, 512), (3, 512))


class VGG16(nn.Module):
    """Thirteen 3 x 3 convolutions and three linear layers."""

    def __init__(self, width: float = 1.0, num_classes: int = 1000) -> None:
        super().__init__()
        c = scaling(width)
        layers: list[nn.Module] = []
        in_channels = 3
        for convolutions, channels in STAGES:
            for _ in range(convolutions):
                layers += [nn.Conv2d(in_channels, c(channels), kernel_size=3, padding=1), nn.ReLU()]
                in_channels = c(channels)
            layers.append(nn.MaxPool2d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool2d((7, 7))
        self.classifier = nn.Sequential(
            nn.Linear(in_channels * 7 * 7, c(4096)),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(c(4096), c(4096)),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(c(4096), num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x
