"""3-D U-Net (Cicek et al., 3D U-Net: Learning Dense Volumetric Segmentation from Sparse Annotation, MICCAI 2016).

Unlike the paper, convolutions are padded, so that output and input have one size, and volumes have one channel, not
three. Their sides are multiples of 8.
"""

import torch
from torch import Tensor, nn

from .width import scaling


def _double_conv(in_channels: int, mid_channels: int, out_channels: int) -> nn.Sequential:
    return nn.Sequential(
        nn.Conv3d(in_channels, mid_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm3d(mid_channels),
        nn.ReLU(),
        nn.Conv3d(mid_channels, out_channels, kernel_size=3, padding=1, bias=False),
        nn.BatchNorm3d(out_channels),
        nn.ReLU(),
    )


class Up(nn.Module):
    """Double the volume, keep the channels, and join what the other side of the U has of this size."""

    def __init__(self, in_channels: int, skip_channels: int) -> None:
        super().__init__()
        # Without bias: so the paper's count of 19,069,955 parameters comes out.
        self.up = nn.ConvTranspose3d(in_channels, in_channels, kernel_size=2, stride=2, bias=False)
        self.conv = _double_conv(skip_channels + in_channels, skip_channels, skip_channels)

    def forward(self, x: Tensor, skip: Tensor) -> Tensor:
        x = torch.cat([skip, self.up(x)], 1)
        x = self.conv(x)
        return x


class UNet3d(nn.Module):
    """Three poolings down, three transposed convolutions up; channels double before a pooling, not after it."""

    def __init__(self, width: float = 1.0, num_classes: int = 3, in_channels: int = 1) -> None:
        super().__init__()
        c = scaling(width)
        self.pool = nn.MaxPool3d(2)
        self.down1 = _double_conv(in_channels, c(32), c(64))
        self.down2 = _double_conv(c(64), c(64), c(128))
        self.down3 = _double_conv(c(128), c(128), c(256))
        self.bottom = _double_conv(c(256), c(256), c(512))
        self.up3 = Up(c(512), c(256))
        self.up2 = Up(c(256), c(128))
        self.up1 = Up(c(128), c(64))
        self.head = nn.Conv3d(c(64), num_classes, kernel_size=1)

    def forward(self, x: Tensor) -> Tensor:
        skip1 = self.down1(x)
        skip2 = self.down2(self.pool(skip1))
        skip3 = self.down3(self.pool(skip2))
        x = self.bottom(self.pool(skip3))
        x = self.up3(x, skip3)
        x = self.up2(x, skip2)
        x = self.up1(x, skip1)
        x = self.head(x)
        return x
