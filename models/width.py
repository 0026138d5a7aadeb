"""Reduced width: the same network with fewer channels, for quick runs and tests."""

import math
from collections.abc import Callable

from layerwise.errors import LayerwiseError


def scaling(width: float) -> Callable[[int], int]:
    """Return the function that scales a number of channels by `width`; at least one channel is left."""
    if not 0 < width < math.inf:
        raise LayerwiseError(f"width is {width}: it multiplies the channels of a network, so give a positive number")
    return lambda channels: max(1, round(channels * width))
