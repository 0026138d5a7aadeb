"""LeNet-5 (LeCun et al., Gradient-Based Learning Applied to Document Recognition, 1998)."""

import torch
from torch import Tensor, nn

from .width import scaling


class LeNet5(nn.Module):
    """Two convolutions and three linear layers, on 32 x 32 images.

    The second convolution sees all of its input channels, and the subsampling has no weights of its own.
    """

    def __init__(self, width: float = 1.0, num_classes: int = 10) -> None:
        super().__init__()
        c = scaling(width)
        self.features = nn.Sequential(
            nn.Conv2d(1, c(6), kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
            nn.Conv2d(c(6), c(16), kernel_size=5),
            nn.Tanh(),
            nn.AvgPool2d(2),
        )
        self.classifier = nn.Sequential(
            nn.Linear(c(16) * 5 * 5, c(120)),
            nn.Tanh(),
            nn.Linear(c(120), c(84)),
            nn.Tanh(),
            nn.Linear(c(84), num_classes),
        )

    def forward(self, x: Tensor) -> Tensor:
        x = self.features(x)
        x = torch.flatten(x, 1)
        x = self.classifier(x)
        return x
