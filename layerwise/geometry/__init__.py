"""Boxes, grids of boxes, and the maps between them: integer arithmetic on numpy arrays only.

`Box` is a region of a tensor, `Grid` cuts a tensor into one box a device, and `AxisMap` maps an interval of an output
dimension to the interval of an input dimension that it needs.
"""

from layerwise.geometry.axis import AxisMap, fixed, identity, interval_overlap, needed, scaled, whole, window
from layerwise.geometry.box import Box
from layerwise.geometry.grid import Grid, boundaries, chunks, nests, prime_factors

__all__ = [
    "AxisMap",
    "Box",
    "Grid",
    "boundaries",
    "chunks",
    "fixed",
    "identity",
    "interval_overlap",
    "needed",
    "nests",
    "prime_factors",
    "scaled",
    "whole",
    "window",
]
