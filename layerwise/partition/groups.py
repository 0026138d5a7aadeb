"""Groups: which devices sum gradients, statistics and partial sums with each other."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.geometry import Box
from layerwise.geometry.arrays import Ints
from layerwise.graph.layer import Layer
from layerwise.partition.layout import LayoutCells
from layerwise.partition.place import Each, Place

Group = tuple[int, ...]


def sharing(boxes: Each, device: int, over: Sequence[int] = ()) -> Group:
    """The devices whose boxes differ from this one's along `over` only; () if it has none."""
    mine = boxes[device]
    if mine is None:
        return ()
    if not over:
        return tuple(r for r, box in enumerate(boxes) if box == mine)

    def rest(box: Box) -> list[tuple[int, int]]:
        return [ends for i, ends in enumerate(zip(box.lo, box.hi, strict=True)) if i not in over]

    same = rest(mine)
    return tuple(r for r, box in enumerate(boxes) if box is not None and rest(box) == same)


def replicas(cells: LayoutCells, keys: Sequence[int]) -> Ints:
    """`sharing` for all configurations and devices at once (tests/partition/test_layout.py compares them).

    (C, N): devices that need the same box, as driven by the dimensions `keys`, have the same number; -1: none.
    """
    number = np.zeros(cells.index.shape[:2], np.int64)
    for key in keys:
        number = number * cells.degrees[:, key, None] + cells.index[:, :, key]
    return np.where(cells.active, number, -1)


def statistics(layer: Layer, place: Place, device: int, *, local_batch_norm: bool) -> tuple[Group, ...]:
    """For each stage, the devices that share its statistics with this one; () if it needs no others."""
    groups = []
    for stage in layer.stages:
        summed = stage.statistics(local_batch_norm=local_batch_norm)
        group = () if summed is None else sharing(place.at(stage.epilogue).each, device, summed.over)
        groups.append(group if len(group) > 1 else ())
    return tuple(groups)
