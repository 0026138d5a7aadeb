"""All-gathers: `partition.transfer` for all pairs of configurations at once (tests/partition/test_gathers.py: equal).

Transfers that the runtime runs as one collective where the network has them (NCCL): all members of a group need the
same box, and each owns an equal part of it. The way back is a reduce-scatter. All other transfers are messages.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.geometry import boundaries, identity
from layerwise.geometry.arrays import Ints, Mask
from layerwise.ops.base import Dim, Maps
from layerwise.partition.edge import Edge
from layerwise.partition.layout import Cells

PAIRS = 256  # of configurations that are compared at once on all devices: bounds the memory
IDLE, NEVER = -1, -2  # in place of a number of elements: of a device without a part; of one whose part cannot be equal


def are_gathers(edge: Edge) -> Mask:
    """(C_u, C_v): whether every device that takes part is in an all-gather.

    What owners have is disjoint: where the members' parts fill what they need, nobody else has anything of it.
    """
    own, need = _owned(edge), _boxes(edge.maps, edge.dims, edge.needers)
    has, needs = edge.owners.active, edge.needers.active
    members = np.array([np.bincount(row + 1)[row + 1] for row in needers(edge)])
    wanted = (need[1] - need[0]).prod(-1)
    gathers = needs & (members > 1) & (wanted > 0) & (wanted % members == 0)
    share = np.where(gathers, wanted // members, np.where(needs, NEVER, IDLE))

    def fit(i: Ints, j: Ints, device: int | Ints) -> Mask:
        """Whether these pairs are gathers as far as these devices can tell, which own a share of what they need."""
        part = np.ones(1, np.int64)
        for axis in range(len(edge.maps)):
            (a, b), (c, d) = ([ends[k, device, axis] for ends in box] for box, k in ((own, i), (need, j)))
            part = part * np.maximum(np.minimum(b, d) - np.maximum(a, c), 0)
        result: Mask = np.where(has[i, device], part, IDLE) == share[j, device]
        return result

    count = has.shape[1]
    result = fit(np.arange(len(has))[:, None], np.arange(len(needs))[None], 0)  # few are left by device 0
    rows, columns = np.nonzero(result)
    for device in {1 % count, count // 3, count - 1}:
        kept = fit(rows, columns, device)
        rows, columns = rows[kept], columns[kept]
    everyone = np.arange(count)
    starts = range(0, len(rows), PAIRS)
    fits = [fit(rows[i : i + PAIRS, None], columns[i : i + PAIRS, None], everyone).all(1) for i in starts]
    kept = np.concatenate(fits) if fits else np.zeros(0, bool)
    result[:] = False
    result[rows[kept], columns[kept]] = True
    return result


def needers(edge: Edge) -> Ints:
    """(C_v, N): devices that need the same box have the same number, also where their cells differ; -1: none."""
    degrees, index = edge.needers.degrees, edge.needers.index
    number = np.zeros(index.shape[:2], np.int64)
    for axis in edge.maps:
        if axis.source is not None:
            dim = edge.dims[axis.source]
            for degree in np.unique(degrees[:, axis.source]).tolist():
                cuts = boundaries(dim.extent, degree, dim.unit)
                rows, ends = degrees[:, axis.source] == degree, np.stack(axis(cuts[:-1], cuts[1:]))
                same = np.unique(ends, axis=1, return_inverse=True)[1].reshape(-1)
                number[rows] = number[rows] * degree + same[index[rows, :, axis.source]]
    return np.where(edge.needers.active, number, -1)


def _owned(edge: Edge) -> tuple[Ints, Ints]:
    """(C_u, N, J) what each device owns; see `_boxes`."""
    dims = [Dim(None, extent, unit) for extent, unit in zip(edge.shape, edge.units, strict=True)]
    return _boxes(tuple(identity(dim.extent, j) for j, dim in enumerate(dims)), dims, edge.owners)


def _boxes(maps: Maps, dims: Sequence[Dim], cells: Cells) -> tuple[Ints, Ints]:
    """lo, hi (C, N, J) of what `maps` make of each device's cell; empty where it has none."""
    degrees, index = cells.degrees, cells.index
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
