"""Pieces: the boxes of keys and values that every device sees one after the other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from layerwise.geometry import Box, boundaries
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.facts import Pieces
from layerwise.ops.fused import needed_box, through_views
from layerwise.partition.place import Each, Place


@dataclass(frozen=True, slots=True)
class Round:
    """A round of messages: every device gets a piece, each another one, so that no device sends to all at once."""

    bounds: tuple[tuple[int, int], ...]  # of each device's piece
    needs: Mapping[int, Each]  # by input, the box of its source


def pieces_of(layer: Layer, *, viewed: bool = False) -> Pieces | None:
    """The pieces that a layer's main operator can read its inputs in, by the layer's inputs; None: it needs all.

    viewed: of the inputs as the operator sees them, else of their sources.
    """
    stage = layer.stages[0]
    found = stage.op.pieces(stage.specs, stage.space.out)
    if found is None or viewed:
        return found
    maps = {i: through_views(m, layer.specs[i], stage.views[i]) for i, m in found.maps.items()}
    return Pieces(maps, found.extent, found.unit, found.temporary)


def rounds(layer: Layer, place: Place) -> list[Round]:
    """The rounds in which the devices of a layer see all pieces; [] where it needs its inputs in full."""
    found, cells = pieces_of(layer), place.computed.each
    if found is None:
        return []
    count = _count(found, place)
    ends, rank = boundaries(found.extent, count, found.unit).tolist(), len(layer.stages[0].space.dims)
    result = []
    for number in range(count):
        at = [(device + number) % count for device in range(len(cells))]
        bounds = tuple((ends[i], ends[i + 1]) for i in at)
        needs = {
            slot: tuple(
                None if cell is None else needed_box(maps, Box((*cell.lo[:rank], lo), (*cell.hi[:rank], hi)))
                for cell, (lo, hi) in zip(cells, bounds, strict=True)
            )
            for slot, maps in found.maps.items()
        }
        result.append(Round(bounds, needs))
    return result


def largest_pieces(layer: Layer, found: Pieces, place: Place) -> dict[int, Floats]:
    """(N,) elements of each device's largest piece, by input."""
    boxes, rank = place.computed, len(layer.stages[0].space.dims)
    longest = longest_piece(found, place)
    beside = np.zeros((len(boxes.lo), 1), np.int64)
    lo, hi = np.hstack([boxes.lo[:, :rank], beside]), np.hstack([boxes.hi[:, :rank], beside + longest])
    return {slot: type(boxes)(lo, hi, boxes.active).needs(maps).volume for slot, maps in found.maps.items()}


def longest_piece(found: Pieces, place: Place) -> int:
    """The extent of the longest piece."""
    return int(np.diff(boundaries(found.extent, _count(found, place), found.unit)).max())


def _count(found: Pieces, place: Place) -> int:
    return int(min(place.computed.active.sum(), found.extent // found.unit))
