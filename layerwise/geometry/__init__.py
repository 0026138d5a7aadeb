"""Boxes, grids of boxes, and the maps between them: integer arithmetic on numpy arrays, nothing else.

`Box` is a region of a tensor, `Grid` cuts a tensor into one box a device, `AxisMap` says which interval of
an input dimension an interval of an output dimension needs, `Lattice` which positions of one are read at all.
"""

from layerwise.geometry.axis import AxisMap, fixed, identity, interval_overlap, needed, scaled, whole, window
from layerwise.geometry.box import Box
from layerwise.geometry.grid import Grid, boundaries, chunks, nests, prime_factors
from layerwise.geometry.lattice import Lattice, Lattices, numbering, slices, through

__all__ = [
    "AxisMap",
    "Box",
    "Grid",
    "Lattice",
    "Lattices",
    "boundaries",
    "chunks",
    "fixed",
    "identity",
    "interval_overlap",
    "needed",
    "nests",
    "numbering",
    "prime_factors",
    "scaled",
    "slices",
    "through",
    "whole",
    "window",
]
