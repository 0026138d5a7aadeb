"""Networks for two cores: small images in front of a full-size classifier, and a volume that is one sample a step.

And one that is only planned for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from layerwise.models.resnet import Bottleneck, ResNet
from layerwise.models.unet3d import UNet3d
from torch import Tensor, nn

from layerwise.config import SearchSpace
from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.from_torch import from_torch

# Channels of the 3 x 3 convolutions, "M" a pooling. VGG: configuration A (VGG-11) of Simonyan and Zisserman, 2015.
ALEXNET = (64, "M", 192, "M", 384, 256, 256, "M")
VGG = (64, "M", 128, "M", 256, 256, "M", 512, 512, "M", 512, 512, "M")
HALF_VGG = (32, "M", 64, "M", 128, 128, "M", 256, 256, "M", 256, 256, "M")


def convolutional(stages: tuple[int | str, ...], stride: int, side: int, width: int = 4096) -> nn.Sequential:
    """Convolutions over images of 3 x 32 x 32 that leave `side` x `side` pixels, then linear layers of `width`."""
    layers: list[nn.Module] = []
    channels = 3
    for stage in stages:
        if isinstance(stage, str):
            layers.append(nn.MaxPool2d(2))
        else:
            layers += [nn.Conv2d(channels, stage, 3, stride if not layers else 1, padding=1), nn.ReLU()]
            channels = stage
    classifier = nn.Sequential(
        nn.Dropout(0.5), nn.Linear(channels * side * side, width), nn.ReLU(),
        nn.Dropout(0.5), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 10),
    )  # fmt: skip
    return nn.Sequential(nn.Sequential(*layers), nn.Flatten(), classifier)


def resnet101() -> tuple[nn.Module, tuple[Tensor, ...]]:
    """ResNet-101 (He et al., 2016), which is among PaSE's graphs, and images for it."""
    return ResNet(Bottleneck, (3, 4, 23, 3)), (torch.randn(2, 3, 224, 224),)


class Inception(nn.Module):
    """A block of Szegedy et al. (2015): convolutions of 1 x 1, 3 x 3 and twice 3 x 3, and a pooling, side by side."""

    def __init__(self, inputs: int, width: int) -> None:
        super().__init__()
        half = width // 2
        self.one = _normed(inputs, width, 1)
        self.three = nn.Sequential(_normed(inputs, half, 1), _normed(half, width, 3))
        self.twice = nn.Sequential(_normed(inputs, half, 1), _normed(half, width, 3), _normed(width, width, 3))
        self.pool = nn.Sequential(nn.AvgPool2d(3, 1, 1), _normed(inputs, half, 1))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.one(x), self.three(x), self.twice(x), self.pool(x)], 1)


def _normed(inputs: int, outputs: int, kernel: int) -> nn.Sequential:
    conv = nn.Conv2d(inputs, outputs, kernel, padding=kernel // 2, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(outputs), nn.ReLU())


def inception() -> nn.Sequential:
    """Two blocks on 16 x 16 and one on 8 x 8 pixels."""
    return nn.Sequential(
        _normed(3, 32, 3), nn.MaxPool2d(2), Inception(32, 32), Inception(112, 48), nn.MaxPool2d(2), Inception(168, 64),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(224, 10),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class Network:
    """A network, and the batch that it is trained with."""

    title: str
    build: Callable[[], nn.Module]
    input_shape: tuple[int, ...]  # one sample
    classes: int
    per_rank: int = 0  # samples a rank
    batch: int = 0  # or samples of all ranks together, however many these are
    dims: tuple[str, ...] = SearchSpace(1).dims  # that the search may split

    def global_batch(self, ranks: int) -> int:
        return self.batch or self.per_rank * ranks

    def graph(self, ranks: int) -> LayerGraph:
        """The fused layers at the batch of so many ranks, without values."""
        with torch.device("meta"):
            raw = from_torch(self.build(), (torch.empty(2, *self.input_shape),), name=self.title)
        return fuse(raw.rebatch(self.global_batch(ranks)))

    def data(self, batch: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets, the same on every rank: a class an image, or a class a voxel."""
        generator = torch.Generator().manual_seed(batch)
        x = torch.randn(batch, *self.input_shape, generator=generator)
        volume = self.input_shape[1:] if len(self.input_shape) == 4 else ()
        return x, torch.randint(self.classes, (batch, *volume), generator=generator)


# On a CPU PyTorch 2.13 computes a 3-D convolution of one sample by oneDNN only where channels x depth x height is more
# than 20,480 (else by im2col, 2 to 8 times as slow). A cell that is cut along n, d or h may lie below where the whole
# is above. The analytic cost model knows nothing of that:
# layers are measured.
def _unet() -> nn.Module:
    return UNet3d(width=0.25)


NETWORKS = {
    "alexnet": Network("AlexNet-like", lambda: convolutional(ALEXNET, 2, 2), (3, 32, 32), 10, per_rank=32),
    "vgg": Network("VGG-like", lambda: convolutional(VGG, 1, 1), (3, 32, 32), 10, per_rank=32),
    "unet": Network("3-D U-Net, batch 1", _unet, (1, 64, 64, 128), 3, batch=1),
    "unet256": Network("3-D U-Net, batch 1, 256 wide", _unet, (1, 64, 64, 256), 3, batch=1),
    "unet2": Network("3-D U-Net, batch 2", _unet, (1, 64, 64, 64), 3, batch=2),
}

# For predictions, where a rank has less than half a core: steps of 0.1 to 0.6 s.
SMALL = {
    "alexnet": Network("AlexNet-like", lambda: convolutional(ALEXNET, 2, 2, 1024), (3, 32, 32), 10, per_rank=32),
    "vgg": Network("VGG-like", lambda: convolutional(HALF_VGG, 1, 1, 1024), (3, 32, 32), 10, per_rank=16),
    "inception": Network("Inception-like", inception, (3, 32, 32), 10, per_rank=16),
}
