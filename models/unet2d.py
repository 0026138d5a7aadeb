"""U-Net (Ronneberger et al., U-Net: Convolutional Networks for Biomedical Image Segmentation, MICCAI 2015).

As in common use today, unlike the paper: convolutions are padded, so that output and input have one size, and batch
norm follows each. The image's sides are multiples of 16.
"""

import torch
from torch import Tensor, nn

from .width import scaling


def _double_conv(in_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(in_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
        nn.Conv2d(out_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm2d(out_channels),
        nn.ReLU(),
    )


class Up(nn.Module):
    """Double the image, halve the channels, and join what the other side of the U has of this size."""

    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose2d(in_channels, out_channels, kernel_size=2, stride=2)
        self.conv = _double_conv(2 * out_channels, out_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([skip, self.up(x)], 1)
        x = self.conv(x)
        return x


class UNet2d(nn.Module):
    """Four poolings down, four transposed convolutions up."""

    def __init__(self, width: float = 1.0, num_classes: int = 2) -> None:
        super().__init__()
        c = scaling(width)
        self.pool = nn.MaxPool2d(2)
        self.down1 = _double_conv(3, c(64))
        self.down2 = _double_conv(c(64), c(128))
        self.down3 = _double_conv(c(128), c(256))
        self.down4 = _double_conv(c(256), c(512))
        self.bottom = _double_conv(c(512), c(1024))
        self.up4 = Up(c(1024), c(512))
        self.up3 = Up(c(512), c(256))
        self.up2 = Up(c(256), c(128))
        self.up1 = Up(c(128), c(64))
        self.head = nn.Conv2d(c(64), num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool(skip1))
        skip3 = self.down3(self.pool(skip2))
        skip4 = self.down4(self.pool(skip3))
        x = self.bottom(self.pool(skip4))
        x = self.up4(x, skip4)
        x = self.up3(x, skip3)
        x = self.up2(x, skip2)
        x = self.up1(x, skip1)
        x = self.head(x)
        return x
