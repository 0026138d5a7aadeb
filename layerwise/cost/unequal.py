"""The weights that unequal devices may get: the part of a layer that each computes."""

from __future__ import annotations

import numpy as np

from layerwise.config import MAX_WEIGHT
from layerwise.geometry.arrays import Floats, Ints
from layerwise.machine import DeviceGraph

FINEST = 100  # whole numbers of a weight that stand for the least of them: 1 % of the slowest device's part
SIXTEENTHS = (16, 32, 8)  # of which cuts that are halved again and again stay cuts, the first that can be
ANOTHER = 0.1  # by how much bandwidths must be in another proportion than speeds to be weights of their own


def weight_vectors(whole_s: Floats, part_s: Floats, parts: int, devices: DeviceGraph) -> tuple[tuple[int, ...], ...]:
    """The vectors of weights, one a device each, the one that balances the sum of all layers first.

    whole_s, part_s: (K,) seconds of a step's layers on a device of each kind, for all samples and for one of `parts`.
    The others: as near to it in 16ths, whose cuts of 64, 32, 16 positions are at the same place, so that pooling sends
    nothing; and by the bandwidth of memory, where kinds differ in that otherwise than in speed.
    """
    kind_of = np.array(devices.kind_of)
    counts: Ints = np.bincount(kind_of, minlength=len(whole_s)).astype(np.int64)
    fair = balanced(whole_s, part_s, parts, counts)
    bandwidth = np.array([kind.processor.memory_bandwidth_bytes_per_s for kind in devices.kinds])
    found = [_whole(fair)]
    for denominator in SIXTEENTHS:
        rounded = np.maximum(np.rint(fair * denominator), 1).astype(np.int64)
        if rounded[kind_of].sum() == denominator:
            found.append(rounded)
            break
    if np.ptp(bandwidth / fair) > ANOTHER * (bandwidth / fair).min():
        found.append(_whole(bandwidth))
    vectors = (vector // np.gcd.reduce(vector) for vector in found)
    return tuple(dict.fromkeys(tuple(vector[kind_of].tolist()) for vector in vectors))


def balanced(whole_s: Floats, part_s: Floats, parts: int, counts: Ints) -> Floats:
    """(K,) the part of the work for a device of each kind such that all end together.

    Time is a constant plus a term proportional to the part, from two points for each kind. If the constant alone takes
    longer, parts are proportional to the speeds for all of the work, as for one sample.
    """
    slope = (whole_s - part_s) * parts / max(parts - 1, 1)
    fixed = whole_s - slope
    if (slope > 0).all() and (fixed > 0).all():
        end_s = (1 + (counts * fixed / slope).sum()) / (counts / slope).sum()
        fair: Floats = (end_s - fixed) / slope
        if (fair > 0).all():
            return fair
    by_speed: Floats = 1 / whole_s / (counts / whole_s).sum()
    return by_speed


def _whole(parts: Floats) -> Ints:
    unit = max(parts.min() / FINEST, parts.max() / MAX_WEIGHT)
    whole: Ints = np.maximum(np.rint(parts / unit), 1).astype(np.int64)
    return whole
