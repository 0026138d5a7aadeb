"""All-gathers: the twin of `partition.transfer` for all pairs of configurations at once (tests hold them equal).

Transfers that the runtime runs as one collective where the network has them (NCCL): all members of a group need the
same box, and each owns an equal part of it. The way back is a reduce-scatter. All other transfers are messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Layout
from layerwise.cost.collectives import all_gather_s, group_of, reduce_scatter_s
from layerwise.cost.compute.roofline import largest_box
from layerwise.geometry import boundaries, identity, whole
from layerwise.machine import DeviceGraph
from layerwise.ops.base import Dim, Maps
from layerwise.tensor import TensorSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Mask = NDArray[np.bool_]
PAIRS = 256  # of configurations that are compared at once on all devices: bounds the memory
IDLE, NEVER = -1, -2  # in place of a number of elements: of a device without a part; of one whose part cannot be equal


def are_gathers(source: TensorSpec, u: Layout, maps: Maps, dims: Sequence[Dim], v: Layout, late: bool) -> Mask:
    """(C_u, C_v): whether every device that takes part is in an all-gather. Arguments as of `transfer.traffic`.

    What owners have is disjoint: where the members' parts fill what they need, nobody else has anything of it.
    """
    maps = maps or (whole(1),)
    own, need = _owned(source, u), _boxes(maps, dims, *((v.own_degrees, v.own_index) if late else (v.degrees, v.index)))
    has, needs = u.own_index[..., 0] >= 0, v.active
    members = np.array([np.bincount(row + 1)[row + 1] for row in _needers(maps, dims, v, late)])
    wanted = (need[1] - need[0]).prod(-1)
    gathers = needs & (members > 1) & (wanted > 0) & (wanted % members == 0)
    share = np.where(gathers, wanted // members, np.where(needs, NEVER, IDLE))

    def fit(i: Ints, j: Ints, device: int | Ints) -> Mask:
        """Whether these pairs are gathers as far as these devices can tell, which own a share of what they need."""
        part = np.ones(1, np.int64)
        for axis in range(len(maps)):
            (a, b), (c, d) = ([ends[k, device, axis] for ends in box] for box, k in ((own, i), (need, j)))
            part = part * np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
        found: Mask = np.where(has[i, device], part, IDLE) == share[j, device]
        return found

    count = has.shape[1]
    found = fit(np.arange(len(has))[:, None], np.arange(len(needs))[None], 0)  # few are left by device 0
    rows, columns = np.nonzero(found)
    for device in {1 % count, count // 3, count - 1}:
        kept = fit(rows, columns, device)
        rows, columns = rows[kept], columns[kept]
    everyone = np.arange(count)
    starts = range(0, len(rows), PAIRS)
    fits = [fit(rows[at : at + PAIRS, None], columns[at : at + PAIRS, None], everyone).all(1) for at in starts]
    kept = np.concatenate(fits) if fits else np.zeros(0, bool)
    found[:] = False
    found[rows[kept], columns[kept]] = True
    return found


def gather_s(
    source: TensorSpec, maps: Maps, dims: Sequence[Dim], v: Layout, late: bool, graph: DeviceGraph, directions: int
) -> Floats:
    """(C_v,) seconds of an all-gather of what the devices need, and of the reduce-scatter back in two directions."""
    degrees = v.own_degrees if late else v.degrees
    size_bytes = (largest_box(maps, dims, degrees) * source.item_bytes).tolist()
    pairs = [(size, group_of(row, graph)) for size, row in zip(size_bytes, _needers(maps, dims, v, late), strict=True)]
    back = [reduce_scatter_s(*pair, graph) if directions == 2 else 0.0 for pair in pairs]
    return np.array([all_gather_s(*pair, graph) for pair in pairs]) + back


def _needers(maps: Maps, dims: Sequence[Dim], v: Layout, late: bool) -> Ints:
    """(C, N): devices that need the same box have the same number, also where their cells differ; -1: none."""
    degrees, index = (v.own_degrees, v.own_index) if late else (v.degrees, v.index)
    number = np.zeros(index.shape[:2], np.int64)
    for axis in maps:
        if axis.source is not None:
            dim = dims[axis.source]
            for degree in np.unique(degrees[:, axis.source]).tolist():
                cuts = boundaries(dim.extent, degree, dim.unit)
                rows, ends = degrees[:, axis.source] == degree, np.stack(axis(cuts[:-1], cuts[1:]))
                same = np.unique(ends, axis=1, return_inverse=True)[1].reshape(-1)
                number[rows] = number[rows] * degree + same[index[rows, :, axis.source]]
    return np.where(v.active, number, -1)


def _owned(source: TensorSpec, u: Layout) -> tuple[Ints, Ints]:
    """(C, N, J) what each device owns; see `_boxes`."""
    shape, units = source.shape or (1,), source.units or (1,)
    dims = [Dim(None, extent, unit) for extent, unit in zip(shape, units, strict=True)]
    same = tuple(identity(dim.extent, j) for j, dim in enumerate(dims))
    return _boxes(same, dims, u.own_degrees, u.own_index)


def _boxes(maps: Maps, dims: Sequence[Dim], degrees: Ints, index: Ints) -> tuple[Ints, Ints]:
    """lo, hi (C, N, J) of what `maps` make of each device's cell; empty where it has none."""
    shape = (*index.shape[:2], len(maps))
    lo, hi = np.zeros(shape, np.int64), np.zeros(shape, np.int64)
    for j, axis in enumerate(maps):
        if axis.source is None:
            ends = axis(np.zeros(1, np.int64), np.ones(1, np.int64))
            lo[..., j], hi[..., j] = int(ends[0][0]), int(ends[1][0])
            continue
        dim = dims[axis.source]
        for degree in np.unique(degrees[:, axis.source]).tolist():
            cuts = boundaries(dim.extent, degree, dim.unit)
            rows, (start, stop) = degrees[:, axis.source] == degree, axis(cuts[:-1], cuts[1:])
            lo[rows, :, j], hi[rows, :, j] = (ends[index[rows, :, axis.source]] for ends in (start, stop))
    idle = index[..., 0] < 0
    hi[idle] = lo[idle]
    return lo, hi
