"""Resampling: a tensor of which ranks have boxes becomes one on another grid of positions, box by box."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.geometry import Box
from layerwise.inference.blend import move, slab
from layerwise.partition.place import Each

Indices = NDArray[np.int64]


def taps(extent: int, wanted: int, order: int) -> tuple[Indices, Indices, NDArray[Any]]:
    """Returns the two positions that each of `wanted` new ones is between, and the second's weight.

    Positions are the middles of equal cells, as scipy.ndimage.zoom(grid_mode=True, mode="nearest") has them. order: 1,
    linear, or 0, the nearest.

    >>> [values.tolist() for values in taps(2, 4, 1)]
    [[0, 0, 0, 1], [0, 1, 1, 1], [0.0, 0.25, 0.75, 0.0]]
    """
    places = np.clip((np.arange(wanted) + 0.5) * (extent / wanted) - 0.5, 0, extent - 1)
    low = np.floor(places + (0.5 if order == 0 else 0)).astype(np.int64).clip(max=extent - 1)
    weights = np.zeros(wanted) if order == 0 else places - low
    return low, low + (weights > 0), weights


def resampled(
    comm: Comm, boxes: Each, x: Tensor | None, like: Tensor, shape: Sequence[int], orders: Sequence[int]
) -> tuple[Each, Tensor | None]:
    """Returns slabs of a tensor (classes, ...) at `shape` positions: every rank's box, and what is in this one's.

    No rank has more than its slab and what that is interpolated from. Every rank calls it.

    Args:
        comm: The ranks.
        boxes: By rank, its box of the tensor.
        x: This rank's.
        like: Has the device and the element type.
        shape: The extents that are wanted, for all dimensions but the first.
        orders: By dimension, 1 (linear) or 0 (the nearest).
    """
    owned = [box for box in boxes if box is not None]
    extents = tuple(max(box.hi[dim] for box in owned) for dim in range(len(owned[0].hi)))
    full = Box.full((extents[0], *shape))
    targets = tuple(slab(full, rank, comm.size, 1) for rank in range(comm.size))
    along = [taps(n, wanted, order) for n, wanted, order in zip(extents[1:], shape, orders, strict=True)]

    def source(box: Box | None) -> Box | None:
        if box is None:
            return None
        first = [int(low[lo]) for (low, _, _), lo in zip(along, box.lo[1:], strict=True)]
        last = [int(high[hi - 1]) + 1 for (_, high, _), hi in zip(along, box.hi[1:], strict=True)]
        return Box((0, *first), (extents[0], *last))

    needed = tuple(map(source, targets))
    x = move(comm, x, boxes, needed, like, "what is resampled")
    target, read = targets[comm.rank], needed[comm.rank]
    if x is None or target is None or read is None:
        return targets, None
    for dim, (low, high, weight) in enumerate(along, 1):
        here, begin = slice(target.lo[dim], target.hi[dim]), read.lo[dim]
        if extents[dim] == full.hi[dim]:
            continue
        lower, upper = (torch.from_numpy(index[here] - begin).to(x.device) for index in (low, high))
        part = torch.from_numpy(weight[here]).to(x).reshape(-1, *(1,) * (x.dim() - 1 - dim))
        x = torch.lerp(x.index_select(dim, lower), x.index_select(dim, upper), part)
    return targets, x
