"""t_X of an edge for all pairs of configurations: the busiest port's time, or an all-gather's where it is one."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from layerwise.cost.collectives import all_gather_s, group_shape, group_shapes, reduce_scatter_s
from layerwise.cost.setting import Setting
from layerwise.cost.transfer import kept_bytes, port_seconds, seconds, traffic
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.machine import DeviceGraph
from layerwise.partition.edge import Edge, are_gathers, coincide, driven, needers


def transfer_s(setting: Setting, edge: Edge, directions: int, watched: tuple[int, ...] | None) -> Floats:
    """(C_u, C_v) seconds in one direction or in both: the adjoint sends the same pieces the other way.

    Where the network has collectives, an all-gather is priced as one, everything else as messages. With `watched`
    devices only (see `port_seconds`): a lower bound. What a device keeps is copied to what arrives, and its gradient
    out of what is sent back: priced where that was measured.
    """
    graph, link_model = setting.devices, setting.options.link_model
    if link_model != "port":
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
    """All that devices send each other in all directions, of the first pair of configurations."""
    return directions * float(traffic(edge, setting.devices).total_bytes[0, 0].sum())


def gather_s(edge: Edge, columns: Ints, graph: DeviceGraph, directions: int) -> Floats:
    """Seconds of an all-gather of what the devices need, and of the reduce-scatter back in two directions.

    Of each of these configurations of the consumer.
    """
    shapes = group_shapes(edge.needers, driven(edge), graph)
    groups = [shapes[column] for column in columns.tolist()]
    meet = np.flatnonzero(coincide(edge)[columns])
    for at, row in zip(meet, needers(edge.to(columns[meet])) if len(meet) else (), strict=True):
        groups[at] = group_shape(row, graph)
    pairs = list(zip(edge.largest_bytes[columns].tolist(), groups, strict=True))
    back = [reduce_scatter_s(*pair, graph) if directions == 2 else 0.0 for pair in pairs]
    return np.array([all_gather_s(*pair, graph) for pair in pairs]) + back
