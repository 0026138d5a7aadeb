"""CosmoFlow's layers on a cube of any side, of which the module is made, and the graph that is planned; no torch."""

from collections.abc import Iterator
from typing import NamedTuple

# (channels, kernel, stride) of each convolution.
CONVOLUTIONS = ((16, 3, 1), (32, 3, 1), (64, 3, 2), (128, 3, 1), (256, 2, 1), (256, 2, 1), (128, 2, 1))
HIDDEN = (2048, 256)  # widths of the linear layers before the last one
SLOPE = 0.2  # of the leaky ReLU: the default of Chainer, in which ParaDL ran


class Convolution(NamedTuple):
    """One convolution, and whether it is pooled by 2."""

    channels: int
    kernel: int
    stride: int
    padding: int
    pooled: bool


def convolutions(side: int) -> Iterator[Convolution]:
    """Those of a cube of `side` voxels."""
    for number, (channels, kernel, stride) in enumerate(CONVOLUTIONS, start=1):
        # Small cubes shrink to one voxel before the last convolutions: those are padded, to have a 2-cube to read.
        padding = 1 if kernel == 2 and side == 1 else 0
        side = (side + 2 * padding - kernel) // stride + 1
        pooled = number < len(CONVOLUTIONS) and side > 1
        side //= 1 + pooled
        yield Convolution(channels, kernel, stride, padding, pooled)
