"""A small network of volumes with its loss inside, and samples of it."""

import copy
from functools import cache

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from layerwise.graph.fuse import fuse
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network, network_of

EXTENT = 26  # so many voxels are reduced in parts


class Segments(nn.Module):
    """Two levels, as of a U-Net; a soft Dice and a cross entropy of three classes. Without a target: the logits."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Conv3d(1, 4, 3, padding=1), nn.InstanceNorm3d(4, affine=True)
        self.down, self.up = nn.Conv3d(4, 6, 2, stride=2), nn.ConvTranspose3d(6, 4, 2, stride=2)
        self.last = nn.Conv3d(8, 3, 1)

    def forward(self, x: Tensor, target: Tensor | None = None) -> Tensor:
        high = torch.relu(self.norm(self.first(x)))
        logits: Tensor = self.last(torch.cat([high, self.up(torch.relu(self.down(high)))], 1))
        if target is None:
            return logits
        p, axes = logits.softmax(1), (2, 3, 4)
        t = F.one_hot(target, 3).movedim(-1, 1).to(p.dtype)
        dice = (2 * (p * t).sum(axes) + 1) / (p.sum(axes) + t.sum(axes) + 1)
        return 1 - dice.mean() + F.cross_entropy(logits, target)


def samples(count: int, extent: int = EXTENT) -> tuple[NDArray[np.float64], NDArray[np.int64]]:
    """Volumes and their classes."""
    rng = np.random.default_rng(0)
    return rng.normal(size=(count, 1, *(extent,) * 3)), rng.integers(0, 3, (count, *(extent,) * 3))


@cache
def segments(batch: int, *, loss: bool = True) -> tuple[nn.Module, Network, LayerGraph]:
    torch.manual_seed(0)
    model = Segments().double()
    x, target = (torch.from_numpy(array) for array in samples(batch))
    network = network_of(copy.deepcopy(model), (x, target) if loss else (x,), batch, "segments")
    return model, network, fuse(network.graph)
