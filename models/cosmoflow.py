"""CosmoFlow (Mathuriya et al., CosmoFlow: Using Deep Learning to Learn the Universe at Scale, SC 2018).

The layers are those that ParaDL ran (Kahira et al., An Oracle for Guiding Large-Scale Model/Hybrid Parallel Training
of Convolutional Neural Networks, HPDC 2021): on a cube of 512 they have the shapes of its layer table.
"""

import torch
from torch import Tensor, nn

from .width import scaling

# (channels, kernel, stride) of each convolution.
CONVOLUTIONS = ((16, 3, 1), (32, 3, 1), (64, 3, 2), (128, 3, 1), (256, 2, 1), (256, 2, 1), (128, 2, 1))
SLOPE = 0.2  # of the leaky ReLU: the default of Chainer, in which ParaDL ran


class CosmoFlow(nn.Module):
    """Seven convolutions, six of them pooled, a global average and three linear layers, on a cube of `side` voxels."""

    def __init__(self, side: int, width: float = 1.0, num_classes: int = 4) -> None:
        super().__init__()
        c = scaling(width)
        layers: list[nn.Module] = []
        in_channels = 4
        for number, (channels, kernel, stride) in enumerate(CONVOLUTIONS, start=1):
            # Small cubes shrink to one voxel before the last convolutions: those are padded, to have a 2-cube to read.
            padding = 1 if kernel == 2 and side == 1 else 0
            layers += [nn.Conv3d(in_channels, c(channels), kernel, stride, padding), nn.LeakyReLU(SLOPE)]
            in_channels = c(channels)
            side = (side + 2 * padding - kernel) // stride + 1
            if number < len(CONVOLUTIONS) and side > 1:
                layers.append(nn.AvgPool3d(2))
                side //= 2
        self.features = nn.Sequential(*layers)
        self.avgpool = nn.AdaptiveAvgPool3d(1)
        self.classifier = nn.Sequential(
            nn.Linear(in_channels, c(2048)),
            nn.LeakyReLU(SLOPE),
            nn.Linear(c(2048), c(256)),
            nn.LeakyReLU(SLOPE),
            nn.Linear(c(256), num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x
