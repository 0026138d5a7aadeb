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
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.machine import Curve, DeviceGraph
from layerwise.partition.edge import Edge, are_gathers, coincide, driven, needers

CHUNK = 1 << 15  # elements of the largest temporary array: bounds the memory, and stays in the cache


@dataclass(frozen=True, slots=True)
class Traffic:
    """The traffic of the ports of each level in one direction, for C_u x C_v pairs of configurations."""

    bytes: Floats  # (C_u, C_v, levels) through the busiest port
    # (C_u, C_v, levels) through it. Where the port is not measured, those of an outer level count as the ratio of the
    # two levels' alpha.
    messages: Floats
    total_bytes: Floats  # (C_u, C_v, levels) all that is sent
    received_bytes: Floats  # (C_u, C_v) the most that one device receives


def seconds(load: Traffic, graph: DeviceGraph, link_model: str) -> Floats:
    """(C_u, C_v) time of one direction. `sum`: all bytes over bandwidth (Jia et al.); else the busiest port."""
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
    """The traffic of moving an edge's tensor in one direction."""
    pairs, levels = edge.pairs, len(graph.levels)
    busiest, messages, total = (np.empty((*pairs, levels)) for _ in range(3))
    received_bytes = np.empty(pairs)
    everyone = range(graph.count)
    for rows, received, sent in _sweep(edge, graph, tuple(everyone)):
        received_bytes[rows] = reduce(np.add, received)[0].max(1) * edge.item_bytes
        for number, level in enumerate(graph.levels):
            total[rows, :, number] = received[number][0].sum(1) * edge.item_bytes
            passing, share = _passing(number, graph), level.devices_per_port
            loads = [
                (
                    _by_port(reduce(np.add, [way[m][0] for m in passing]) * edge.item_bytes, share, everyone),
                    _by_port(
                        reduce(np.add, [way[m][1] * _messages(m, number, graph) for m in passing]), share, everyone
                    ),
                )
                for way in (received, sent)
            ]
            size, count = (np.concatenate(parts, axis=1) for parts in zip(*loads, strict=True))
            worst = _port_time(size, count, number, graph).argmax(1)[:, None]
            busiest[rows, :, number] = np.take_along_axis(size, worst, 1)[:, 0]
            messages[rows, :, number] = np.take_along_axis(count, worst, 1)[:, 0]
    return Traffic(busiest, messages, total, received_bytes)


def port_seconds(edge: Edge, graph: DeviceGraph, watched: tuple[int, ...] | None = None) -> Floats:
    """(C_u, C_v): `seconds(traffic(...), graph, "port")` alone, for large tables.

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
    passing, share = _passing(number, graph), graph.levels[number].devices_per_port
    if _curve(number, graph) is None:  # additive
        beta = item_bytes * graph.levels[number].beta_s_per_byte
        parts = [way[m][0] * beta + way[m][1] * graph.levels[m].alpha_s for m in passing]
        return _by_port(reduce(np.add, parts), share, watched)
    both = reduce(np.add, [way[m] for m in passing])
    loads = _by_port(both[0] * item_bytes, share, watched), _by_port(both[1], share, watched)
    return _port_time(*loads, number, graph)


def _port_time(size_bytes: Floats, messages: Floats, number: int, graph: DeviceGraph) -> Floats:
    """Seconds of ports of a level with these loads."""
    curve, level = _curve(number, graph), graph.levels[number]
    if curve is None:
        return size_bytes * level.beta_s_per_byte + messages * level.alpha_s
    return curve.ports_seconds(size_bytes, messages)


def _messages(m: int, number: int, graph: DeviceGraph) -> float:
    """How many messages of a port of level `number` one message of level `m` counts as."""
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
    if link_model == "sum":
        return directions * seconds(traffic(edge, graph), graph, link_model)
    travelling = _travelling_s(edge, graph, directions, watched)
    copy_s = 0.0 if setting.measurements is None else sum(setting.measurements.copy_s[:directions])
    if copy_s == 0:
        return travelling
    return np.where(travelling > 0, travelling + copy_s * kept_bytes(edge, graph, watched), 0.0)


def _travelling_s(edge: Edge, graph: DeviceGraph, directions: int, watched: tuple[int, ...] | None) -> Floats:
    messages: Floats = directions * _messages_s(edge, graph, watched)
    if not graph.collectives:
        return messages
    gathers = _gathers(edge, watched is not None)
    columns = np.flatnonzero(gathers.any(0))  # few
    if len(columns):
        collective = gather_s(edge, columns, graph, directions)
        if watched is not None:  # some of them may be none
            collective = np.minimum(collective, messages[:, columns])
        messages[:, columns] = np.where(gathers[:, columns], collective, messages[:, columns])
    return messages


@lru_cache(maxsize=1)  # of an edge both directions are asked for, and then one once more: what is recomputed
def _messages_s(edge: Edge, graph: DeviceGraph, watched: tuple[int, ...] | None) -> Floats:
    return port_seconds(edge, graph, watched)


@lru_cache(maxsize=1)
def _gathers(edge: Edge, roughly: bool) -> Mask:
    return are_gathers(edge, roughly=roughly)


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
