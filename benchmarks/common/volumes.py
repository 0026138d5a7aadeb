"""Networks of volumes that are in no package: CosmoFlow, a U-Net of volumes, and one of the weather on a globe."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from layerwise.models import find
from torch import Tensor, nn

from benchmarks.zoo.example import Build, Example, volumes


class Around(nn.Module):
    """A convolution of a globe's fields (levels, latitude, longitude): longitude goes on at the other side.

    Latitude ends at the poles, where the last row is repeated; levels end, too.
    """

    def __init__(self, inputs: int, outputs: int, dilation: int = 1) -> None:
        super().__init__()
        self.conv, self.reach = nn.Conv3d(inputs, outputs, 3, dilation=dilation), dilation

    def forward(self, x: Tensor) -> Tensor:
        r = self.reach
        x = F.pad(x, (r, r, 0, 0, 0, 0), mode="circular")
        x = F.pad(x, (0, 0, r, r, 0, 0), mode="replicate")
        x = self.conv(F.pad(x, (0, 0, 0, 0, r, r)))
        return x


class Weather(nn.Module):
    """A U-Net that steps fields on: two levels, group norms, trilinear upsampling, and the change added to the input.

    In the manner of CubeSphere and SFNO baselines, which pad a latitude-longitude grid in this way.
    """

    def __init__(self, fields: int = 3, width: int = 8) -> None:
        super().__init__()
        self.first = nn.Sequential(Around(fields, width), nn.GroupNorm(4, width), nn.GELU())
        self.down = nn.Sequential(nn.AvgPool3d((1, 2, 2)), Around(width, 2 * width, 2), nn.GroupNorm(4, 2 * width))
        self.deep = nn.Sequential(Around(2 * width, 2 * width), nn.LeakyReLU(0.3))
        self.up = nn.Upsample(scale_factor=(1, 2, 2), mode="trilinear")
        self.last = Around(3 * width, fields)

    def forward(self, x: Tensor) -> Tensor:
        high = self.first(x)
        deep = self.up(self.deep(self.down(high)))
        return x + self.last(torch.cat([high, deep], 1))


def _globe() -> Example:
    return Example(Weather(), (torch.randn(2, 3, 6, 16, 32),))


def _built_in(name: str, size: int, channels: int, **options: float) -> Callable[[], Example]:
    return lambda: volumes(find(name).build(**options), size, channels)


NETWORKS: dict[str, Build] = {
    "U-Net 3D": _built_in("unet3d", 16, 1, width=0.1),
    "CosmoFlow": _built_in("cosmoflow:58", 58, 4, width=0.1),
    "weather U-Net": _globe,
}
