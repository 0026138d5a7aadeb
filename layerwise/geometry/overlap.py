"""The pieces of a transfer: what one device needs and another owns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.geometry.arrays import Ints
from layerwise.geometry.box import Box


@dataclass(frozen=True, slots=True)
class Piece:
    """Destination cell `dst` needs `box`, which source cell `src` owns."""

    src: int
    dst: int
    box: Box


def pieces(needed: Sequence[Box], owned: Sequence[Box]) -> Iterator[Piece]:
    """All non-empty needed[dst] & owned[src], by dst, then src. Includes what a device needs of its own."""
    for dst, need in enumerate(needed):
        if need.volume:
            for src, own in enumerate(owned):
                box = need & own
                if box.volume:
                    yield Piece(src, dst, box)


def interval_overlap(lo: Ints, hi: Ints, other_lo: Ints, other_hi: Ints) -> Ints:
    """Length of [lo, hi) & [other_lo, other_hi), broadcast. Boxes overlap in the product of this over dimensions."""
    overlap: Ints = np.maximum(np.minimum(hi, other_hi) - np.maximum(lo, other_lo), 0)
    return overlap
