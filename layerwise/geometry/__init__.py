"""Boxes, grids of boxes, and the maps between them: integer arithmetic on numpy arrays, nothing else.

`Box` is a region of a tensor, `Grid` cuts a tensor into one box a device, `AxisMap` says which interval of
an input dimension an interval of an output dimension needs, `Lattice` which positions of one are read at all, and
`pieces` is the transfer that follows.
"""

from layerwise.geometry.axis import AxisMap, fixed, identity, needed, scaled, whole, window
from layerwise.geometry.box import Box
from layerwise.geometry.grid import Grid, boundaries, chunks, nests, prime_factors
from layerwise.geometry.lattice import Lattice, Lattices, numbering, slices, through
from layerwise.geometry.overlap import Piece, interval_overlap, pieces

__all__ = [
    "AxisMap",
    "Box",
    "Grid",
    "Lattice",
    "Lattices",
    "Piece",
    "boundaries",
    "chunks",
    "fixed",
    "identity",
    "interval_overlap",
    "needed",
    "nests",
    "numbering",
    "pieces",
    "prime_factors",
    "scaled",
    "slices",
    "through",
    "whole",
    "window",
]
