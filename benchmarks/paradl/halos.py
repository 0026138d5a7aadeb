"""Halos: what a spatial cell exchanges with its neighbours, as published and as our runtime needs it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from math import prod

from benchmarks.paradl.facts import LayerFacts


def published_halo(layer: LayerFacts, grid: Mapping[str, int]) -> tuple[float, float]:
    """halo(x), halo(dL/dy): items a sample and side. C · sum over split i of floor(K_i/2) · prod over j≠i of X_j/p_j;
    backward with F and Y."""
    halos = []
    for channels, extents in (
        (layer.in_channels, {w.label: w.extent for w in layer.windows}),
        (layer.out_channels, {w.label: w.out for w in layer.windows}),
    ):
        total = 0.0
        for window in layer.windows:
            if grid.get(window.label, 1) > 1:
                across = prod(x / grid.get(d, 1) for d, x in extents.items() if d != window.label)
                total += window.kernel // 2 * across
        halos.append(channels * total)
    return halos[0], halos[1]


def halo_messages(layer: LayerFacts, grid: Mapping[str, int]) -> Iterator[float]:
    """Items a sample that an interior cell receives from each neighbour that has something for it.

    With two cells in a dimension there is one neighbour only. Corners are left out.
    """
    for window in layer.windows:
        degree = grid.get(window.label, 1)
        if degree > 1:
            across = prod(w.extent / grid.get(w.label, 1) for w in layer.windows if w.label != window.label)
            sides = [max(window.low, window.high)] if degree == 2 else [window.low, window.high]
            yield from (layer.in_channels * side * across for side in sides if side)
