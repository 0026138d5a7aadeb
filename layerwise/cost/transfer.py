"""t_X: bytes, messages and seconds of a transfer, for all pairs of configurations of its two ends at once.

A device needs a box and owns a box, and the overlap of boxes is a product over dimensions. So everything that a port
carries is a product of one-dimensional sums: device q receives from its group the overlap of q's box with the group's
cells, and device p sends to its group p's box summed over the group's cells. The one-dimensional sums depend only on
two degrees and two ranges of cells, which have few patterns: they are tabulated once (`overlaps`) and then looked up
for every pair of configurations and every device.

A port takes its measured time for its bytes and messages, or if not measured, bytes · beta + messages · alpha. t_X is
the busiest port's time, or an all-gather's if the edge is one.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce
from itertools import pairwise

import numpy as np

from layerwise.cost.collectives import all_gather_s, group_shape, group_shapes, reduce_scatter_s
from layerwise.cost.overlaps import Overlaps
from layerwise.cost.setting import Setting
from layerwise.geometry.arrays import Floats, Ints
from layerwise.machine import DeviceGraph
from layerwise.partition.edge import Edge, are_gathers, coincide, driven, needers

CHUNK = 1 << 15  # elements of the largest temporary array: bounds the memory, and stays in the cache


@dataclass(frozen=True, slots=True)
class Traffic:
    """The bytes of one direction, for C_u x C_v pairs of configurations."""

    total_bytes: Floats  # (C_u, C_v, levels) all that is sent
    received_bytes: Floats  # (C_u, C_v) the most that one device receives


@lru_cache(maxsize=1)  # both of an edge are asked for one after the other
def traffic(edge: Edge, graph: DeviceGraph) -> Traffic:
    """The bytes of moving an edge's tensor in one direction."""
    total, most = np.empty((*edge.pairs, len(graph.levels))), np.empty(edge.pairs)
    for rows, received, _ in _sweep(edge, graph, tuple(range(graph.count))):
        most[rows] = reduce(np.add, received)[0].max(1) * edge.item_bytes
        for number, level in enumerate(received):
            total[rows, :, number] = level[0].sum(1) * edge.item_bytes
    return Traffic(total, most)


def port_seconds(edge: Edge, graph: DeviceGraph, watched: tuple[int, ...] | None = None) -> Floats:
    """(C_u, C_v) seconds of one direction: the busiest port's.

    With only some devices `watched` it is a lower bound: the busiest of their ports, by their own part of its load.
    """
    slowest = np.zeros(edge.pairs)
    seen = tuple(range(graph.count)) if watched is None else watched
    for rows, *ways in _sweep(edge, graph, seen):
        for number in range(len(graph.levels)):
            for way in ways:
                times = _ports(way, number, graph, edge.item_bytes, seen).max(1)
                np.maximum(slowest[rows], times, out=slowest[rows])
    return slowest


def kept_bytes(edge: Edge, graph: DeviceGraph, watched: tuple[int, ...] | None = None) -> Floats:
    """(C_u, C_v): the most that one of these devices already owns of what it needs."""
    seen = tuple(range(graph.count)) if watched is None else watched
    overlaps, most = Overlaps(edge, graph, seen), np.empty(edge.pairs)
    for rows in _chunks(edge, seen):
        most[rows] = overlaps.between(0, 0, rows)[0].max(1)
    return most * edge.item_bytes


def telling_devices(graph: DeviceGraph) -> tuple[int, ...]:
    """A few devices that are likely to be the busiest, with those that share their NICs, for quick lower bounds.

    Devices 0 and 1 have cells in nearly every configuration. N/3 is interior in every dimension if the degrees are
    powers of two: the binary digits of 1/3 alternate, so no dimension's index is all zeros or all ones.
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
            ports = _ports(way, number, graph, edge.item_bytes, everyone)[0, :, 0]
            worst = np.maximum(worst, ports[graph.port(number)])
    return int(worst.argmax())


def _ports(way: Sequence[Floats], number: int, graph: DeviceGraph, item_bytes: int, watched: Sequence[int]) -> Floats:
    """(rows, ports, C_v) seconds that the traffic of the watched devices through each port of a level takes."""
    # A NIC carries what goes beyond the node at every level.
    passing = [m for m in range(len(graph.levels)) if number in graph.ports_passed(m)]
    share, curve = graph.levels[number].devices_per_port, None if graph.links is None else graph.links.port(number)
    if curve is None:  # additive
        beta = item_bytes * graph.levels[number].beta_s_per_byte
        parts = [way[m][0] * beta + way[m][1] * graph.levels[m].alpha_s for m in passing]
        return _by_port(reduce(np.add, parts), share, watched)
    size, messages = reduce(np.add, [way[m] for m in passing])
    return curve.ports_seconds(_by_port(size * item_bytes, share, watched), _by_port(messages, share, watched))


def _sweep(
    edge: Edge, graph: DeviceGraph, watched: tuple[int, ...]
) -> Iterator[tuple[slice, list[Floats], list[Floats]]]:
    """Rows of configurations of the producer, and what each watched device receives and sends at each level.

    Arrays of shape (2, rows, W, C_v): elements and messages.
    """
    overlaps = Overlaps(edge, graph, watched)
    for rows in _chunks(edge, watched):
        own = overlaps.between(0, 0, rows)
        inward, outward = [own], [own]
        for level in range(1, len(graph.levels) + 1):
            inward.append(overlaps.between(level, 0, rows))
            outward.append(overlaps.between(0, level, rows))
        received, sent = ([b - a for a, b in pairwise(way)] for way in (inward, outward))
        yield rows, received, sent


def _chunks(edge: Edge, watched: Sequence[int]) -> Iterator[slice]:
    """Slices of the producer's configurations, so many that arrays stay small."""
    step = max(1, CHUNK // (edge.pairs[1] * len(watched) * 2))
    return (slice(start, start + step) for start in range(0, edge.pairs[0], step))


def _by_port(load: Floats, share: int, watched: Sequence[int]) -> Floats:
    """(rows, W, C_v) -> (rows, ports, C_v): devices that share a port add up."""
    if share == 1:
        return load
    starts = [i for i, d in enumerate(watched) if i == 0 or d // share != watched[i - 1] // share]
    ports: Floats = np.add.reduceat(load, starts, axis=1)
    return ports


def transfer_s(setting: Setting, edge: Edge, directions: int, watched: tuple[int, ...] | None) -> Floats:
    """(C_u, C_v) seconds in one direction or in both: the adjoint sends the same pieces backward.

    On a network with collectives, an all-gather is priced as one, everything else as messages. With `watched` devices
    only (see `port_seconds`): a lower bound. A device copies its own part into what it receives, and its gradient out
    of what it sends back, which is priced if it was measured.
    """
    graph, link_model = setting.devices, setting.options.link_model
    if link_model == "sum":  # all bytes over bandwidth (Jia et al.)
        beta = np.array([level.beta_s_per_byte for level in graph.levels])
        all_s: Floats = directions * (traffic(edge, graph).total_bytes @ beta)
        return all_s
    travelling = _travelling_s(edge, graph, directions, watched)
    measured = [setting.measurements_in(setting.options.dtype, kind) for kind in range(len(graph.each_kind))]
    copy_s = max(0.0 if times is None else sum(times.copy_s[:directions]) for times in measured)
    if copy_s == 0:
        return travelling
    return np.where(travelling > 0, travelling + copy_s * kept_bytes(edge, graph, watched), 0.0)


def _travelling_s(edge: Edge, graph: DeviceGraph, directions: int, watched: tuple[int, ...] | None) -> Floats:
    messages: Floats = directions * _messages_s(edge, graph, watched)
    if not graph.collectives:
        return messages
    gathers = _gathers(edge, roughly=watched is not None)
    columns = np.flatnonzero(gathers.any(0))  # few
    if len(columns):
        collective = gather_s(edge, columns, graph, directions)
        if watched is not None:  # some of them may be none
            collective = np.minimum(collective, messages[:, columns])
        messages[:, columns] = np.where(gathers[:, columns], collective, messages[:, columns])
    return messages


# Of an edge both directions are asked for, and then one once more: what is recomputed.
_messages_s, _gathers = lru_cache(maxsize=1)(port_seconds), lru_cache(maxsize=1)(are_gathers)


def transfer_bytes(setting: Setting, edge: Edge, directions: int) -> float:
    """All that devices send each other in all directions, for the first pair of configurations."""
    return directions * float(traffic(edge, setting.devices).total_bytes[0, 0].sum())


def gather_s(edge: Edge, columns: Ints, graph: DeviceGraph, directions: int) -> Floats:
    """Seconds of an all-gather of what the devices need, and for two directions of the reduce-scatter back.

    For each of these configurations of the consumer.
    """
    shapes = group_shapes(edge.needers, driven(edge), graph)
    groups = [shapes[column] for column in columns.tolist()]
    meet = np.flatnonzero(coincide(edge)[columns])
    for at, row in zip(meet, needers(edge.to(columns[meet])) if len(meet) else (), strict=True):
        groups[at] = group_shape(row, graph)
    pairs = list(zip(edge.largest_bytes[columns].tolist(), groups, strict=True))
    back = [reduce_scatter_s(*pair, graph) if directions == 2 else 0.0 for pair in pairs]
    return np.array([all_gather_s(*pair, graph) for pair in pairs]) + back
