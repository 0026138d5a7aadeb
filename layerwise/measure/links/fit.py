"""From measured points to a curve of few straight lines, with the sizes at which it switches from one to the next."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.geometry.arrays import Floats

TOLERANCE = 0.05  # of the time: what a line may miss a point by
Point = tuple[float, float]  # bytes, seconds


def knots(points: Sequence[Point]) -> tuple[Point, ...]:
    """The fewest of these points that lines can be drawn through so that none is off by more than `TOLERANCE`.

    Points by size, at least two. Times that fall as sizes grow are noise: they are raised to the one before.
    """
    sizes, seconds = np.array(points).T
    seconds = np.maximum.accumulate(seconds)
    best: list[tuple[int, float, int]] = [(0, 0.0, -1)]  # lines up to a point, how far they are off, the point before
    for end in range(1, len(sizes)):
        choices = []
        for start in range(end):
            off = _off(sizes[start : end + 1], seconds[start : end + 1])
            if off <= TOLERANCE or start == end - 1:
                choices.append((best[start][0] + 1, best[start][1] + off, start))
        best.append(min(choices))
    kept, last = [len(sizes) - 1], len(sizes) - 1
    while last > 0:
        last = best[last][2]
        kept.insert(0, last)
    return tuple((float(sizes[i]), float(seconds[i])) for i in kept)


def _off(sizes: Floats, seconds: Floats) -> float:
    """The largest relative distance of points from the line between the first and the last."""
    line = np.interp(sizes, sizes[[0, -1]], seconds[[0, -1]])
    return float((np.abs(line - seconds) / seconds).max())
