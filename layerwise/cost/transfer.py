"""t_X: bytes, messages and seconds of a transfer, for all pairs of configurations of its two ends at once.

A device needs a box and owns a box; the overlap of boxes is a product over dimensions. So everything that a port
carries is a product of one-dimensional sums: what device q receives from its group is the overlap of q's box with the
group's cells, what device p sends to its group is p's box summed over the group's cells. The one-dimensional sums
depend only on two degrees and two ranges of cells, of which there are few patterns: they are tabulated once
(`_Dimension`) and then gathered for every pair of configurations and every device.

A port takes what was measured of it, by its bytes and messages; where nobody has, bytes · beta + messages · alpha.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise

import numpy as np

from layerwise.cost.selections import Selections, selections
from layerwise.geometry import AxisMap, boundaries, interval_overlap
from layerwise.geometry.arrays import Floats, Ints
from layerwise.machine import Curve, DeviceGraph
from layerwise.ops.base import Dim
from layerwise.partition.edge import Edge

CHUNK = 1 << 17  # elements of the largest temporary array: bounds the memory, and stays in the cache


@dataclass(frozen=True, slots=True)
class Traffic:
    """What the ports of each level carry in one direction, for C_u x C_v pairs of configurations."""

    bytes: Floats  # (C_u, C_v, levels) through the busiest port
    # (C_u, C_v, levels) through it. Where the port is not measured, those of an outer level count as the ratio of the
    # two levels' alpha.
    messages: Floats
    total_bytes: Floats  # (C_u, C_v, levels) all that is sent
    received_bytes: Floats  # (C_u, C_v) the most that one device receives


def seconds(load: Traffic, graph: DeviceGraph, link_model: str) -> Floats:
    """(C_u, C_v) time of one direction. `port`: the busiest port; `sum`: all bytes over bandwidth (Jia et al.)."""
    beta = np.array([level.beta_s_per_byte for level in graph.levels])
    if link_model == "sum":
        total: Floats = load.total_bytes @ beta
        return total
    levels = range(len(graph.levels))
    times = [_port_time(load.bytes[..., number], load.messages[..., number], number, graph) for number in levels]
    slowest: Floats = np.max(times, axis=0)
    return slowest


@lru_cache(maxsize=1)  # its bytes and its messages are asked for one after the other
def traffic(edge: Edge, graph: DeviceGraph) -> Traffic:
    """Load of moving an edge's tensor in one direction."""
    pairs, levels = edge.pairs, len(graph.levels)
    busiest, messages, total = (np.empty((*pairs, levels)) for _ in range(3))
    received_bytes = np.empty(pairs)
    everyone = range(graph.count)
    for rows, received, sent in _sweep(edge, graph, tuple(everyone)):
        received_bytes[rows] = reduce(np.add, received)[..., 0].max(-1) * edge.item_bytes
        for number, level in enumerate(graph.levels):
            total[rows, :, number] = received[number][..., 0].sum(-1) * edge.item_bytes
            passing, share = _passing(number, graph), level.devices_per_port
            loads = [
                (
                    _by_port(reduce(np.add, [way[m][..., 0] for m in passing]) * edge.item_bytes, share, everyone),
                    _by_port(
                        reduce(np.add, [way[m][..., 1] * _messages(m, number, graph) for m in passing]), share, everyone
                    ),
                )
                for way in (received, sent)
            ]
            size, count = (np.concatenate(parts, axis=-1) for parts in zip(*loads, strict=True))
            worst = _port_time(size, count, number, graph).argmax(-1)[..., None]
            busiest[rows, :, number] = np.take_along_axis(size, worst, -1)[..., 0]
            messages[rows, :, number] = np.take_along_axis(count, worst, -1)[..., 0]
    return Traffic(busiest, messages, total, received_bytes)


def port_seconds(edge: Edge, graph: DeviceGraph, watched: tuple[int, ...] | None = None) -> Floats:
    """(C_u, C_v): `seconds(traffic(...), graph, "port")`, without the rest: what large tables are made of.

    With only some devices `watched` it is a lower bound: the busiest of their ports, by their own share of its load.
    """
    slowest = np.zeros(edge.pairs)
    seen = tuple(range(graph.count)) if watched is None else watched
    for rows, *ways in _sweep(edge, graph, seen):
        for number in range(len(graph.levels)):
            for way in ways:
                times = _ports(way, number, graph, edge.item_bytes, seen).max(-1)
                np.maximum(slowest[rows], times, out=slowest[rows])
    return slowest


def telling_devices(graph: DeviceGraph) -> tuple[int, ...]:
    """A few devices that are likely to be the busiest, with those that share their NICs: for quick lower bounds.

    Devices 0 and 1 have cells of nearly every configuration. N/3 is interior in every dimension when the
    degrees are powers of two: the binary digits of 1/3 alternate, so no dimension's index is all zeros or all ones.
    """
    return with_ports((0, 1, graph.count // 3), graph)


def with_ports(devices: Iterable[int], graph: DeviceGraph) -> tuple[int, ...]:
    """These devices and all that share a NIC with them, in order."""
    share = graph.levels[min(1, len(graph.levels) - 1)].devices_per_port
    ports = {device // share for device in devices if device < graph.count}
    return tuple(d for port in sorted(ports) for d in range(port * share, min((port + 1) * share, graph.count)))


def busiest_device(edge: Edge, graph: DeviceGraph) -> int:
    """A device behind the slowest port, for one pair of configurations."""
    everyone = tuple(range(graph.count))
    ((_, *ways),) = _sweep(edge, graph, everyone)
    worst = np.zeros(graph.count)
    for number in range(len(graph.levels)):
        for way in ways:
            ports = _ports(way, number, graph, edge.item_bytes, everyone)[0, 0]
            worst = np.maximum(worst, ports[graph.port(number)])
    return int(worst.argmax())


def _ports(way: Sequence[Floats], number: int, graph: DeviceGraph, item_bytes: int, watched: Sequence[int]) -> Floats:
    """(rows, C_v, ports) seconds that the traffic of the watched devices through each port of a level takes."""
    passing, share = _passing(number, graph), graph.levels[number].devices_per_port
    if _curve(number, graph) is None:  # additive: a product first, then a sum, is the faster way
        rates = [
            np.array([item_bytes * graph.levels[number].beta_s_per_byte, graph.levels[m].alpha_s]) for m in passing
        ]
        return _by_port(reduce(np.add, [way[m] @ rate for m, rate in zip(passing, rates, strict=True)]), share, watched)
    both = reduce(np.add, [way[m] for m in passing])
    loads = _by_port(both[..., 0] * item_bytes, share, watched), _by_port(both[..., 1], share, watched)
    return _port_time(*loads, number, graph)


def _port_time(size_bytes: Floats, messages: Floats, number: int, graph: DeviceGraph) -> Floats:
    """Seconds of ports of a level with these loads."""
    curve, level = _curve(number, graph), graph.levels[number]
    if curve is None:
        return size_bytes * level.beta_s_per_byte + messages * level.alpha_s
    return curve.ports_seconds(size_bytes, messages)


def _messages(m: int, number: int, graph: DeviceGraph) -> float:
    """What a message of level `m` counts as at the ports of level `number`."""
    return graph.levels[m].alpha_s / graph.levels[number].alpha_s if _curve(number, graph) is None else 1.0


def _curve(number: int, graph: DeviceGraph) -> Curve | None:
    return None if graph.links is None else graph.links.port(number)


def _passing(number: int, graph: DeviceGraph) -> list[int]:
    """Levels whose messages pass the ports of level `number`: a NIC carries those of every level beyond the node."""
    return [m for m in range(len(graph.levels)) if number in graph.ports_passed(m)]


def _sweep(
    edge: Edge, graph: DeviceGraph, watched: tuple[int, ...]
) -> Iterator[tuple[slice, list[Floats], list[Floats]]]:
    """Rows of configurations of the producer, and what each watched device receives and sends at each level.

    Arrays of shape (rows, C_v, W, 2): elements and messages.
    """
    owned, needing = selections(edge.owners, graph, watched), selections(edge.needers, graph, watched)
    sources = [m.source for m in edge.maps if m.source is not None]
    assert len(set(sources)) == len(sources), "a dimension may drive only one dimension of an input"
    tables = [_Dimension(edge, j, owned, needing) for j in range(len(edge.shape))]
    spare = [i for i in range(needing.degrees.shape[1]) if i not in sources]  # along these the need is replicated
    step = max(1, CHUNK // (edge.pairs[1] * len(watched) * 2))
    for start in range(0, edge.pairs[0], step):
        rows = slice(start, start + step)
        own = _moved(tables, owned, needing, 0, 0, rows)
        inward, outward = [own], [own]
        for level in range(len(graph.levels)):
            inward.append(_moved(tables, owned, needing, level + 1, 0, rows))
            outward.append(_moved(tables, owned, needing, 0, level + 1, rows, spare))
        received, sent = ([b - a for a, b in pairwise(way)] for way in (inward, outward))
        yield rows, received, sent


def _moved(
    tables: Sequence[_Dimension],
    owned: Selections,
    needing: Selections,
    s: int,
    t: int,
    rows: slice,
    spare: Sequence[int] = (),
) -> Floats:
    """(rows, C_v, N, 2): elements and messages between each device's selection s of owners and t of needers."""
    total: Floats | None = None
    for m in range(len(owned.boxes[s])):
        for k in range(len(needing.boxes[t])):
            product: Floats | None = None
            for table in tables:
                values, row, column = table.patterns(s, m, t, k)
                index = row[rows, None] * values.shape[1] + column[None, :]
                factor = values.reshape(-1, *values.shape[2:])[index]
                product = factor if product is None else np.multiply(product, factor, out=product)
            assert product is not None
            for i in spare:
                lo, hi = needing.boxes[t][k]
                product *= (hi[..., i] - lo[..., i])[None, :, :, None]
            total = product if total is None else np.add(total, product, out=total)
    assert total is not None
    return total


def _by_port(load: Floats, share: int, watched: Sequence[int]) -> Floats:
    """(..., W) -> (..., ports): devices that share a port add up."""
    if share == 1:
        return load
    starts = [i for i, d in enumerate(watched) if i == 0 or d // share != watched[i - 1] // share]
    ports: Floats = np.add.reduceat(load, starts, axis=-1)
    return ports


@lru_cache(maxsize=1024)
def _overlap_sums(
    extent: int, unit: int, a_values: tuple[int, ...], axis: AxisMap, dim: Dim, b_values: tuple[int, ...]
) -> tuple[Floats, Ints]:
    """Lengths and numbers of overlaps, cumulated over the cells of both ends, for every pair of degrees.

    The (a + 1, b + 1, 2) arrays laid end to end, shape (all, 2), and where each begins, by [a, b].
    """
    offset = np.zeros((a_values[-1] + 1, b_values[-1] + 1), np.int64)
    flat, begin = [], 0
    for b in b_values:
        cuts = boundaries(dim.extent, b, dim.unit)
        lo, hi = axis(cuts[:-1], cuts[1:])
        for a in a_values:
            own = boundaries(extent, a, unit)
            overlap = interval_overlap(own[:-1, None], own[1:, None], lo, hi)
            sums = np.zeros((a + 1, b + 1, 2))
            sums[1:, 1:] = np.stack([overlap, overlap > 0], -1).cumsum(0).cumsum(1)
            offset[a, b] = begin
            flat.append(sums.reshape(-1, 2))
            begin += len(flat[-1])
    return np.concatenate(flat), offset


class _Dimension:
    """One-dimensional sums of one dimension of the tensor: lengths of overlaps, and how many cells overlap."""

    def __init__(self, edge: Edge, j: int, owned: Selections, needing: Selections) -> None:
        axis = edge.maps[j]
        self.owned, self.needing, self.j, self.source = owned, needing, j, axis.source
        a_values = tuple(np.unique(owned.degrees[:, j]).tolist())
        b_values = (1,) if axis.source is None else tuple(np.unique(needing.degrees[:, axis.source]).tolist())
        dim = Dim(None, 1) if axis.source is None else edge.dims[axis.source]
        self.flat, self.offset = _overlap_sums(edge.shape[j], edge.units[j], a_values, axis, dim, b_values)
        self._patterns: dict[tuple[int, int, int, int], tuple[Floats, Ints, Ints]] = {}

    def patterns(self, s: int, m: int, t: int, k: int) -> tuple[Floats, Ints, Ints]:
        """values (patterns_u, patterns_v, N, 2), and each configuration's pattern: row (C_u,), column (C_v,)."""
        key = (s, m, t, k)
        if key not in self._patterns:
            self._patterns[key] = self._tabulate(*key)
        return self._patterns[key]

    def _tabulate(self, s: int, m: int, t: int, k: int) -> tuple[Floats, Ints, Ints]:
        a, ul, uh, row = self.owned.patterns(s, m, self.j)
        b, vl, vh, column = self.needing.patterns(t, k, self.source)
        base = self.offset[a[:, None], b[None, :]][..., None]
        width = (b + 1)[None, :, None]
        low, high = base + ul[:, None, :] * width, base + uh[:, None, :] * width
        values: Floats = self.flat[high + vh] - self.flat[low + vh] - self.flat[high + vl] + self.flat[low + vl]
        return values, row, column
