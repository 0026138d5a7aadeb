"""t_X: bytes, messages and seconds of a transfer, for all pairs of configurations of its two ends at once.

A device needs a box and owns a box; the overlap of boxes is a product over dimensions. So everything that a port
carries is a product of one-dimensional sums: what device q receives from its group is the overlap of q's box with the
group's cells, what device p sends to its group is p's box summed over the group's cells. The one-dimensional sums
depend only on two degrees and two ranges of cells, of which there are few patterns: they are tabulated once
(`_Dimension`) and then gathered for every pair of configurations and every device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerwise.config import Layout
from layerwise.cost.cells import Cells, cells
from layerwise.geometry import AxisMap, boundaries, interval_overlap, whole
from layerwise.machine import DeviceGraph
from layerwise.ops.base import Dim, Maps
from layerwise.tensor import TensorSpec

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
CHUNK = 1 << 21  # elements of the largest temporary array: bounds the memory, and stays near the cache


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the ports of each level carry in one direction, for C_u x C_v pairs of configurations.

    bytes, messages: (C_u, C_v, levels), the busiest port's; messages that come from further up count as alpha_there /
    alpha_here. total_bytes: (C_u, C_v, levels), all that is sent at each level. received_bytes: (C_u, C_v), the most
    that one device receives.
    """

    bytes: Floats
    messages: Floats
    total_bytes: Floats
    received_bytes: Floats


def seconds(load: Traffic, graph: DeviceGraph, link_model: str) -> Floats:
    """(C_u, C_v) time of one direction. `port`: the busiest port; `sum`: all bytes over their bandwidth (Jia et al.)."""
    beta = np.array([level.beta_s_per_byte for level in graph.levels])
    if link_model == "sum":
        total: Floats = load.total_bytes @ beta
        return total
    alpha = np.array([level.alpha_s for level in graph.levels])
    slowest: Floats = (load.bytes * beta + load.messages * alpha).max(-1)
    return slowest


def traffic(
    source: TensorSpec, u: Layout, maps: Maps, dims: Sequence[Dim], v: Layout, late: bool, graph: DeviceGraph
) -> Traffic:
    """Load of moving `source`, laid out as `u`, to a layer over `dims`, laid out as `v`, that needs `maps` of it.

    `late`: the needs follow the box that the layer owns, not the one it computes (see Space.late_inputs).
    """
    shape, units = source.shape or (1,), source.units or (1,)
    maps = maps or (whole(1),)
    owned, needing = cells(u, True, graph), cells(v, late, graph)
    sources = [m.source for m in maps if m.source is not None]
    assert len(set(sources)) == len(sources), "a dimension may drive only one dimension of an input"
    tables = [_Dimension(s, unit, m, dims, owned, needing, j) for j, (s, unit, m) in enumerate(zip(shape, units, maps, strict=True))]
    spare = [i for i in range(needing.degrees.shape[1]) if i not in sources]  # along these the need is replicated
    levels, pairs = len(graph.levels), (len(u.degrees), len(v.degrees))
    result = Traffic(*(np.empty((*pairs, levels)) for _ in range(3)), np.empty(pairs))
    step = max(1, CHUNK // (pairs[1] * graph.count * 2))
    for start in range(0, pairs[0], step):
        rows = slice(start, start + step)
        own = _exchanged(tables, owned, needing, 0, 0, rows)
        inward = [own] + [_exchanged(tables, owned, needing, s + 1, 0, rows) for s in range(levels)]
        outward = [own] + [_exchanged(tables, owned, needing, 0, s + 1, rows, spare) for s in range(levels)]
        _reduce(result, rows, inward, outward, graph, source.item_bytes)
    return result


def _exchanged(
    tables: Sequence[_Dimension], owned: Cells, needing: Cells, s: int, t: int, rows: slice, spare: Sequence[int] = ()
) -> Floats:
    """(rows, C_v, N, 2): elements and messages between each device's selection s of owners and t of needers."""
    total: Floats | None = None
    for m in range(len(owned.boxes[s])):
        for k in range(len(needing.boxes[t])):
            product: Floats | None = None
            for table in tables:
                values, row, column = table.patterns(s, m, t, k)
                at = row[rows, None] * values.shape[1] + column[None, :]
                factor = values.reshape(-1, *values.shape[2:])[at]
                product = factor if product is None else np.multiply(product, factor, out=product)
            assert product is not None
            for i in spare:
                lo, hi = needing.boxes[t][k]
                product *= (hi[..., i] - lo[..., i])[None, :, :, None]
            total = product if total is None else np.add(total, product, out=total)
    assert total is not None
    return total


def _reduce(
    result: Traffic, rows: slice, inward: list[Floats], outward: list[Floats], graph: DeviceGraph, item_bytes: int
) -> None:
    """From what each device exchanges with its groups, which contain each other, to the load of the busiest ports."""
    received, sent = ([b - a for a, b in zip(w, w[1:], strict=False)] for w in (inward, outward))
    result.received_bytes[rows] = (inward[-1] - inward[0])[..., 0].max(-1) * item_bytes
    alpha = [level.alpha_s for level in graph.levels]
    for at, level in enumerate(graph.levels):
        result.total_bytes[rows, :, at] = received[at][..., 0].sum(-1) * item_bytes
        # A NIC carries the messages of every level beyond the node, each at the latency of its own level.
        passing = [m for m in range(len(alpha)) if at in graph.ports_passed(m)]
        size, count = (
            np.concatenate(
                [_by_port(sum(way[m][..., i] * weight[m] for m in passing), level.devices_per_port) for way in (received, sent)],
                axis=-1,
            )
            for i, weight in ((0, [item_bytes] * len(alpha)), (1, [a / alpha[at] for a in alpha]))
        )
        worst = (size * level.beta_s_per_byte + count * level.alpha_s).argmax(-1)[..., None]
        result.bytes[rows, :, at] = np.take_along_axis(size, worst, -1)[..., 0]
        result.messages[rows, :, at] = np.take_along_axis(count, worst, -1)[..., 0]


def _by_port(load: Floats, share: int) -> Floats:
    """(..., N) -> (..., ports): devices that share a port add up."""
    pad = -load.shape[-1] % share
    padded = np.pad(load, (*((0, 0),) * (load.ndim - 1), (0, pad))) if pad else load
    ports: Floats = padded.reshape(*load.shape[:-1], -1, share).sum(-1)
    return ports


class _Dimension:
    """One-dimensional sums of one dimension of the tensor: lengths of overlaps, and how many cells overlap."""

    def __init__(
        self, extent: int, unit: int, axis: AxisMap, dims: Sequence[Dim], owned: Cells, needing: Cells, j: int
    ) -> None:
        self.owned, self.needing, self.j, self.source = owned, needing, j, axis.source
        a_values = np.unique(owned.degrees[:, j]).tolist()
        b_values = [1] if axis.source is None else np.unique(needing.degrees[:, axis.source]).tolist()
        # Cumulative sums over the cells of both ends for every pair of degrees, laid end to end.
        self.offset = np.zeros((a_values[-1] + 1, b_values[-1] + 1), np.int64)
        flat, at = [], 0
        for b in b_values:
            dim = Dim(None, 1) if axis.source is None else dims[axis.source]
            cuts = boundaries(dim.extent, b, dim.unit)
            lo, hi = axis(cuts[:-1], cuts[1:])
            for a in a_values:
                own = boundaries(extent, a, unit)
                overlap = interval_overlap(own[:-1, None], own[1:, None], lo, hi)
                sums = np.zeros((a + 1, b + 1, 2))
                sums[1:, 1:] = np.stack([overlap, overlap > 0], -1).cumsum(0).cumsum(1)
                self.offset[a, b] = at
                flat.append(sums.reshape(-1, 2))
                at += len(flat[-1])
        self.flat = np.concatenate(flat)

    def patterns(self, s: int, m: int, t: int, k: int) -> tuple[Floats, Ints, Ints]:
        """values (patterns_u, patterns_v, N, 2), and which pattern each configuration has: row (C_u,), column (C_v,)."""
        a, ul, uh, row = self.owned.patterns(s, m, self.j)
        b, vl, vh, column = self.needing.patterns(t, k, self.source)
        base = self.offset[a[:, None], b[None, :]][..., None]
        width = (b + 1)[None, :, None]

        def at(x: Ints, y: Ints) -> Floats:
            values: Floats = self.flat[base + x[:, None, :] * width + y[None, :, :]]
            return values

        values: Floats = at(uh, vh) - at(ul, vh) - at(uh, vl) + at(ul, vl)
        return values, row, column
