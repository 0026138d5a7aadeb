"""Windows: their positions in a sample that is too large for all devices together, and their weights.

The steps are those of nnU-Net (Isensee et al., Nature Methods 18, 2021); the Gaussian is that of MONAI's
`sliding_window_inference`, so that results can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil

import numpy as np

from layerwise.geometry.arrays import Floats

SIGMA = 1 / 8  # of the Gaussian, relative to the window's extent
LEAST = 1e-3  # the least weight: in a corner only one window covers a position


def starts(shape: Sequence[int], window: Sequence[int], overlap: float) -> list[tuple[int, ...]]:
    """Returns where each window begins, by dimension: evenly spaced; neighbours overlap by at least `overlap` of one.

    >>> starts((10, 4), (4, 4), 0.5)
    [(0, 0), (2, 0), (4, 0), (6, 0)]
    """
    along = []
    for extent, size in zip(shape, window, strict=True):
        room = max(0, extent - size)
        count = ceil(room / max(1.0, size * (1 - overlap))) + 1
        along.append([round(i * room / max(1, count - 1)) for i in range(count)])
    return list(product(*along))


def profile(size: int) -> Floats:
    """Returns the weights of a window along one dimension, (size,), symmetric about its middle."""
    distance = (np.arange(size) - (size - 1) / 2) / max(1.0, size * SIGMA)
    weights: Floats = np.exp(-0.5 * distance**2)
    return weights
