"""CosmoFlow (Mathuriya et al., CosmoFlow: Using Deep Learning to Learn the Universe at Scale, SC 2018).

The layers are those that ParaDL ran (Kahira et al., An Oracle for Guiding Large-Scale Model/Hybrid Parallel Training
of Convolutional Neural Networks, HPDC 2021): on a cube of 512 they have the shapes of its layer table.
"""

import torch
from torch import Tensor, nn

from .cosmoflow_layers import HIDDEN, SLOPE, convolutions
from .width import scaling


class CosmoFlow(nn.Module):
    """Seven convolutions, six of them pooled, a global average and three linear layers, on a cube of `side` voxels."""

    def __init__(self, side: int, width: float = 1.0, num_classes: int = 4) -> None:
        super().__init__()
        c = scaling(width)
        layers: list[nn.Module] = []
        in_channels = 4
        for one in convolutions(side):
            layers += [
                nn.Conv3d(in_channels, c(one.channels), one.kernel, one.stride, one.padding),
                nn.LeakyReLU(SLOPE),
            ]
            in_channels = c(one.channels)
            if one.pooled:
                layers.append(nn.AvgPool3d(2))
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        hidden = [c(each) for each in HIDDEN]
        self.classifier = nn.Sequential(
            nn.Linear(in_channels, hidden[0]),
            nn.LeakyReLU(SLOPE),
            nn.Linear(hidden[0], hidden[1]),
            nn.LeakyReLU(SLOPE),
            nn.Linear(hidden[1], num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x
