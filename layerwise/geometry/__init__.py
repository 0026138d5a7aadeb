"""Boxes, grids of boxes, and the maps between them: integer arithmetic on numpy arrays only.

`Box` is a region of a tensor, `Grid` cuts a tensor into one box a device, and `AxisMap` maps an interval of an output
dimension to the interval of an input dimension that it needs.
"""

from layerwise.geometry.axis import AxisMap, fixed, identity, interval_overlap, needed, scaled, whole, window
from layerwise.geometry.box import Box
from layerwise.geometry.grid import (
    WEIGHTED,
    Grid,
    boundaries,
    chunks,
    cut,
    degree_of,
    in_proportion,
    nests,
    one_cell,
    prime_factors,
)

__all__ = [
    "WEIGHTED",
    "AxisMap",
    "Box",
    "Grid",
    "boundaries",
    "chunks",
    "cut",
    "degree_of",
    "fixed",
    "identity",
    "in_proportion",
    "interval_overlap",
    "needed",
    "nests",
    "one_cell",
    "prime_factors",
    "scaled",
    "whole",
    "window",
]
