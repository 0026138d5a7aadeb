"""The fullest cell of a layer under each configuration: the one that the slowest device computes, and what to call it.

Cells of equal shapes of equal operators take equal time, whatever network, batch or number of devices they come from:
`signature` names the operator, `extents` the shapes. A time measured under these two is a time of all such cells.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Layout
from layerwise.geometry import Box, boundaries, needed
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.base import Maps, Space

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Fullest:
    """A cell for each of C configurations: bounds in the iteration space (C, D), and of what it owns of the output."""

    lo: Ints
    hi: Ints
    own_lo: Ints
    own_hi: Ints

    def cell(self, row: int) -> Box:
        """The cell of one configuration, a box of the iteration space."""
        return _box(self.lo[row], self.hi[row])

    def owned(self, row: int, rank: int) -> Box:
        """The box of the output, of `rank` dimensions, that lies on the cell's device afterwards."""
        return _box(self.own_lo[row, :rank], self.own_hi[row, :rank])


def fullest(layer: Layer, lay: Layout) -> Fullest:
    """In every dimension the interval that is longest and needs most of what it drives (the middle of a halo)."""
    where = layer.space
    scalar = not where.out.shape  # counted as one dimension by layouts
    count, dims = len(lay.degrees), where.dims
    bounds = np.zeros((2, count, len(dims)), np.int64)
    own = np.zeros((2, count, lay.own_degrees.shape[1]), np.int64)
    if scalar:
        own[1] = 1
    part = np.zeros(count, np.int64)  # of the reduction: which part of the cell it owns once that is scattered
    for i in reversed(range(len(dims))):  # reductions come last, and are needed first
        column = lay.degrees[:, i + scalar]
        for degree in np.unique(column).tolist():
            rows = column == degree
            index, cuts = _index(where, i, degree)
            bounds[:, rows, i] = cuts[index : index + 2, None]
            if i in where.reductions:
                part[rows] = index
            elif not scalar:
                finer = lay.own_degrees[:, i] // degree
                for split, j in {(int(finer[row]), int(part[row])) for row in np.flatnonzero(rows)}:
                    fine = boundaries(dims[i].extent, degree * split, dims[i].unit)
                    first = index * split + (j if split > 1 else 0)
                    within = rows & (finer == split) & ((part == j) | (split == 1))
                    own[:, within, i] = fine[first : first + 2, None]
    return Fullest(bounds[0], bounds[1], own[0], own[1])


@lru_cache(maxsize=65536)
def _index(where: Space, dim: int, degree: int) -> tuple[int, Ints]:
    """Which interval of one dimension is the fullest, and the cuts of that dimension."""
    d = where.dims[dim]
    cuts = boundaries(d.extent, degree, d.unit)
    lengths = np.diff(cuts).astype(np.float64)
    need = np.zeros(degree)
    for maps in (*where.needs, *(p.maps for p in where.parameters)):
        for axis in maps:
            if axis.source == dim:
                lo, hi = axis(cuts[:-1], cuts[1:])
                need += (hi - lo) / max(1, int((hi - lo).max()))
    return int(np.lexsort((-need, -lengths))[0]), cuts


def signature(layer: Layer, wanted: Sequence[bool], uses: int) -> str:
    """What a layer computes, whatever its sizes: its operators, the types of its inputs, and the gradients it makes.

    wanted: whether the gradient of each of its inputs is; uses: how many gradients of its output are added up.
    """
    chains = (chain for stage in layer.stages for chain in stage.views if chain)
    named = {
        "op": layer.main.rows(),
        "views": [[view.kind for view in chain] for chain in chains],
        "followers": [[stage.op.rows(), stage.slot, len(stage.views)] for stage in layer.stages[1:]],
        "inputs": [spec.dtype for spec in layer.specs],
        "gradients": [int(w) for w in wanted],
        "uses": uses,
        "frozen": [i for i, name in enumerate(layer.parameters) if name in layer.frozen],
    }
    usual = {"views": [], "followers": [], "uses": 1, "frozen": []}
    return json.dumps({k: v for k, v in named.items() if usual.get(k) != v}, default=str, separators=(",", ":"))


def extents(layer: Layer, lay: Layout, cells: Fullest, *, local_batch_norm: bool) -> list[tuple[int, ...]]:
    """Every configuration's shapes: of the cell, what it owns, its inputs and parameters; whether statistics are."""
    columns = [cells.hi - cells.lo, cells.own_hi - cells.own_lo]
    where = layer.space
    needs = [(maps, late) for maps, late in zip(where.needs, where.late_inputs, strict=True)]
    for maps, late in [*needs, *((p.maps, p.late) for p in where.parameters)]:
        columns.append(_lengths(maps, *((cells.own_lo, cells.own_hi) if late else (cells.lo, cells.hi))))
    shared = [s[:, None] for s in shared_statistics(layer, lay, local_batch_norm=local_batch_norm)]
    rows: list[list[int]] = np.concatenate([*columns, *shared], axis=1).tolist()
    return [tuple(row) for row in rows]


def shared_statistics(layer: Layer, lay: Layout, *, local_batch_norm: bool) -> list[Ints]:
    """For each stage with statistics (C,): whether a cell shares them with others (else a plain kernel does)."""
    found = []
    for stage in layer.stages:
        statistics = stage.statistics()
        if statistics is None:
            continue
        degrees = lay.own_degrees if stage.epilogue else lay.degrees
        among = degrees[:, list(statistics.over)].prod(1)
        local = stage.statistics(local_batch_norm=local_batch_norm) is None
        found.append(((among > 1) & (not local)).astype(np.int64))
    return found


def sizes(layer: Layer, cells: Fullest) -> list[tuple[int, ...]]:
    """Every configuration's elements of each parameter that the cell's device updates (not of tied ones)."""
    rows = [
        _lengths(p.maps, *((cells.own_lo, cells.own_hi) if p.late else (cells.lo, cells.hi))).prod(1)
        for _, p in layer.own_parameters()
        if p.trainable
    ]
    return [tuple(row) for row in np.stack(rows, axis=1).tolist()] if rows else [()] * len(cells.lo)


def gradient_uses(graph: LayerGraph) -> dict[str, int]:
    """How many gradients of each layer's output come back, and are added up."""
    flows, sink = graph.has_gradient, graph.layers[-1].name
    result = dict.fromkeys(graph.by_name, 0)
    for source, target, _ in graph.edges():
        result[source] += flows[source] and (flows[target] or target == sink)
    return result


def _lengths(maps: Maps, lo: Ints, hi: Ints) -> Ints:
    """(C, dimensions of the tensor) extents of what boxes need."""
    first, last = needed(maps, lo, hi)
    return last - first


def _box(lo: Ints, hi: Ints) -> Box:
    return Box(tuple(lo.tolist()), tuple(hi.tolist()))
