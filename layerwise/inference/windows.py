"""Windows: where they lie in a sample that is too large for all devices together, and what their numbers weigh.

The steps and the Gaussian are those of nnU-Net (Isensee et al., Nature Methods 18, 2021) and of MONAI's
`sliding_window_inference`, so that results can be compared.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import ceil
from typing import Literal

import numpy as np

from layerwise.geometry.arrays import Floats

SIGMA = 1 / 8  # of the Gaussian, in extents of the window
LEAST = 1e-3  # weight of a number: in a corner, where no other window is, there must be one
LEAST_OF_NNUNET = 2.0**-24 / 10  # its weights are ten times as large, and of float16
Gaussian = Literal["monai", "nnunet"]


def starts(shape: Sequence[int], window: Sequence[int], overlap: float) -> list[tuple[int, ...]]:
    """Returns where each window begins, by dimension: evenly spaced, neighbours share at least `overlap` of it.

    >>> starts((10, 4), (4, 4), 0.5)
    [(0, 0), (2, 0), (4, 0), (6, 0)]
    """
    along = []
    for extent, size in zip(shape, window, strict=True):
        room = max(0, extent - size)
        count = ceil(room / max(1.0, size * (1 - overlap))) + 1
        along.append([round(i * room / max(1, count - 1)) for i in range(count)])
    return list(product(*along))


def profile(size: int, gaussian: Gaussian = "monai") -> Floats:
    """Returns the weights of a window along one dimension, (size,), around its middle; nnU-Net's is a number."""
    middle = size // 2 if gaussian == "nnunet" else (size - 1) / 2
    distance = (np.arange(size) - middle) / max(1.0, size * SIGMA)
    weights: Floats = np.exp(-0.5 * distance**2)
    return weights
