"""AlexNet: Krizhevsky's one-tower form, which torchvision has, and the original of two groups."""

import torch
from torch import Tensor, nn

from .width import scaling


class AlexNet(nn.Module):
    """One tower (Krizhevsky, One Weird Trick for Parallelizing Convolutional Neural Networks, 2014)."""

    def __init__(self, width: float = 1.0, num_classes: int = 1000) -> None:
        super().__init__()
        c = scaling(width)
        self.features = nn.Sequential(
            nn.Conv2d(3, c(64), kernel_size=11, stride=4, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c(64), c(192), kernel_size=5, padding=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(c(192), c(384), kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c(384), c(256), kernel_size=3, padding=1),
            nn.ReLU(),
            nn.Conv2d(c(256), c(256), kernel_size=3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.avgpool = nn.AdaptiveAvgPool2d((6, 6))
        self.classifier = nn.Sequential(
            nn.Dropout(0.5),
            nn.Linear(c(256) * 6 * 6, c(4096)),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(c(4096), c(4096)),
            nn.ReLU(),
            nn.Linear(c(4096), num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = self.avgpool(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x


def _response_norm() -> nn.LocalResponseNorm:
    # The paper multiplies the sum over 5 channels by 1e-4; torch multiplies their mean.
    return nn.LocalResponseNorm(size=5, alpha=5 * 1e-4, beta=0.75, k=2.0)


class GroupedAlexNet(nn.Module):
    """Two groups, one for each GPU of its day (Krizhevsky et al., ImageNet Classification with Deep CNNs, 2012).

    Images are 227 x 227: that gives the paper's 55 x 55 outputs without padding, and its 224 x 224 does not.
    """

    def __init__(self, width: float = 1.0, num_classes: int = 1000) -> None:
        super().__init__()
        c = scaling(width)
        self.features = nn.Sequential(
            nn.Conv2d(3, 2 * c(48), kernel_size=11, stride=4),
            nn.ReLU(),
            _response_norm(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(2 * c(48), 2 * c(128), kernel_size=5, padding=2, groups=2),
            nn.ReLU(),
            _response_norm(),
            nn.MaxPool2d(kernel_size=3, stride=2),
            nn.Conv2d(2 * c(128), 2 * c(192), kernel_size=3, padding=1),  # here the GPUs saw each other's channels
            nn.ReLU(),
            nn.Conv2d(2 * c(192), 2 * c(192), kernel_size=3, padding=1, groups=2),
            nn.ReLU(),
            nn.Conv2d(2 * c(192), 2 * c(128), kernel_size=3, padding=1, groups=2),
            nn.ReLU(),
            nn.MaxPool2d(kernel_size=3, stride=2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(2 * c(128) * 6 * 6, c(4096)),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(c(4096), c(4096)),
            nn.ReLU(),
            nn.Dropout(0.5),
            nn.Linear(c(4096), num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x
