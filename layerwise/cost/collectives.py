"""t_S and the collectives inside a layer: who takes part, and how long it takes.

Devices with the same parameter box form a group. A group is described by its members at each level of the links and the
number of such groups that share a port. Times are as measured if the profile has a group of that shape, else from
Hockney's alpha-beta model (ring, tree, hierarchical: docs/explanation/cost_model.md, equations 14 to 18).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import ceil, log2, sqrt
from typing import Literal

import numpy as np

from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.machine import DeviceGraph, Overlap
from layerwise.machine.curves import Operation
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.partition.groups import replicas
from layerwise.partition.layout import SCATTERED, LayoutCells


@dataclass(frozen=True, slots=True)
class GroupShape:
    """The shape of the groups of one collective, all alike (the largest if they differ)."""

    size: int  # members
    fan: tuple[int, ...]  # members at each level, innermost first (in a node, nodes in a rack, ...)
    rings: tuple[int, ...]  # at each level, streams through one port if each group is a ring
    members: tuple[int, ...]  # at each level, devices of such groups behind one port
    server_s_per_byte: float  # sum of the betas of the other members' links to the first; the largest of all groups
    server_link_s_per_byte: float  # the largest of these betas
    even: bool  # whether all groups, and in each group all members of a level, have equally many members inside


def group_shape(row: Ints, graph: DeviceGraph) -> GroupShape:
    """The groups of devices with equal `row` (N,); -1 takes no part."""
    return _group_shape(tuple(row.tolist()), graph)


@lru_cache(maxsize=65536)
def _group_shape(row: tuple[int, ...], graph: DeviceGraph) -> GroupShape:
    ids = np.array(row, np.int64)
    devices = np.nonzero(ids >= 0)[0]
    ids = ids[devices]
    size = int(np.bincount(ids).max(initial=1))
    if size == 1:
        ones = (1,) * len(graph.levels)
        return GroupShape(1, ones, ones, ones, 0.0, 0.0, even=True)
    fan, rings, members = list[int](), list[int](), list[int]()
    spans = list[Mask]()  # at each level, the devices in a group with several members there
    alone, even = np.bincount(ids) == 1, True
    inner = devices  # what counts as one member at this level: the groups of the level below
    for level in graph.levels:
        outer = devices // level.devices
        part = ids * (int(outer.max()) + 1) + outer  # a group's share of a node, rack, ...
        inside = np.unique(part * (int(inner.max()) + 1) + inner) // (int(inner.max()) + 1)
        parts, counts = np.unique(inside, return_counts=True)  # the members of each
        fan.append(int(counts.max()))
        even = even and bool((counts[~alone[parts // (int(outer.max()) + 1)]] == counts.max()).all())
        spans.append((counts > 1)[parts.searchsorted(part)])
        inner = outer
    for number, level in enumerate(graph.levels):
        port = devices // level.devices_per_port
        passing = [s for m, s in enumerate(spans) if number in graph.ports_passed(m)]
        sending = np.any(passing, axis=0)
        members.append(_most(port[sending]))
        # Outside the node a ring passes a port once; inside, each hop leaves through its sender's port.
        streams = np.unique(port[sending] * (int(ids.max()) + 1) + ids[sending]) // (int(ids.max()) + 1)
        rings.append(_most(streams) if number else members[0])
    _, first, group = np.unique(ids, return_index=True, return_inverse=True)
    betas = np.array([level.beta_s_per_byte for level in graph.levels])
    servers = devices[first][group]
    to_server = np.where(devices == servers, 0.0, betas[graph.level_between(servers, devices)])
    server = float(np.bincount(group, to_server).max()), float(to_server.max())
    return GroupShape(size, tuple(fan), tuple(rings), tuple(members), *server, even)


def _most(values: Ints) -> int:
    return int(np.bincount(values).max(initial=1)) if len(values) else 1


def _beta(graph: DeviceGraph, number: int, load: Sequence[int]) -> float:
    """Seconds a byte of one stream at level `number`, if `load` streams share each port that it passes."""
    return max(graph.levels[p].beta_s_per_byte * load[p] for p in graph.ports_passed(number))


def all_reduce_s(size_bytes: float, group: GroupShape, graph: DeviceGraph) -> float:
    """The fastest of ring, double binary tree (in chunks) and hierarchical (reduce-scatter inwards, all-gather
    outwards).

    The tree's published time tends to size·beta for small messages. But all members together send at least 2(r-1) times
    the buffer, whatever the algorithm: the tree saves latency, not bandwidth.
    """
    if group.size == 1 or size_bytes == 0:
        return 0.0
    measured = _measured_s("all_reduce", size_bytes, group, graph)
    if measured is not None:
        return measured
    alpha, beta = _slowest(group, graph)
    depth = ceil(log2(group.size))
    chunks = max(1.0, sqrt(depth * size_bytes * beta / (2 * alpha)))
    tree = 2 * (depth + chunks) * (alpha + size_bytes / (2 * chunks) * beta)
    least = 2 * (group.size - 1) / group.size * size_bytes * beta
    return min(max(tree, least), 2 * _scatter_s(size_bytes, group, graph))


def reduce_scatter_s(
    size_bytes: float, group: GroupShape, graph: DeviceGraph, operation: Operation = "reduce_scatter"
) -> float:
    """Seconds for a buffer of `size_bytes` on every member; its adjoint, the all-gather, takes the same by the
    formulas.
    """
    if group.size == 1:
        return 0.0
    measured = _measured_s(operation, size_bytes, group, graph)
    return _scatter_s(size_bytes, group, graph) if measured is None else measured


def all_gather_s(size_bytes: float, group: GroupShape, graph: DeviceGraph) -> float:
    """Seconds for a buffer of `size_bytes` on every member afterwards."""
    return reduce_scatter_s(size_bytes, group, graph, "all_gather")


def _scatter_s(size_bytes: float, group: GroupShape, graph: DeviceGraph) -> float:
    """Seconds by the formulas: the faster of ring and hierarchical."""
    alpha, beta = _slowest(group, graph)
    ring = (group.size - 1) * (alpha + size_bytes / group.size * beta)
    return min(ring, _hierarchical_s(size_bytes, group, graph)) if group.even else ring  # otherwise shards are unequal


def _measured_s(operation: Operation, size_bytes: float, group: GroupShape, graph: DeviceGraph) -> float | None:
    """Measured seconds; None if groups of this shape were not measured."""
    if graph.links is None or not group.even:
        return None
    curve = graph.links.curve(operation, group.fan, groups_per_port(group))
    return None if curve is None else float(curve.seconds(np.array(size_bytes)))


def groups_per_port(group: GroupShape) -> int:
    """The number of such groups that share a port of the outermost level that they span."""
    return next((rings for fan, rings in zip(group.fan[::-1], group.rings[::-1], strict=True) if fan > 1), 1)


def overlap(group: GroupShape, graph: DeviceGraph, operation: Operation = "all_reduce") -> Overlap:
    """The fractions of their speeds at which an operation and computation run concurrently; 1 if not measured."""
    measured = None if graph.links is None else graph.links.overlap(group.fan, groups_per_port(group), operation)
    return measured or Overlap(group.fan, 1, 1.0, 1.0)


@lru_cache(maxsize=65536)
def _slowest(group: GroupShape, graph: DeviceGraph) -> tuple[float, float]:
    """Alpha and beta of a step of a ring or tree: it uses links of every level at which the group
    has several members.
    """
    used = [number for number, f in enumerate(group.fan) if f > 1]
    return graph.levels[used[-1]].alpha_s, max(_beta(graph, number, group.rings) for number in used)


def _hierarchical_s(size_bytes: float, group: GroupShape, graph: DeviceGraph) -> float:
    """Seconds of one direction of the hierarchical algorithm: a ring in each node, then rings of equal shards across
    nodes, and so on outwards.
    """
    total, shard = 0.0, size_bytes
    for number, fan in enumerate(group.fan):
        if fan > 1:
            shard /= fan
            total += (fan - 1) * (graph.levels[number].alpha_s + shard * _beta(graph, number, group.members))
    return total


def wire_bytes(total_bytes: float, group: GroupShape) -> float:
    """Bytes that all members of an all-reduce together send: each sends 2(r-1)/r of its buffer."""
    return 2 * (group.size - 1) * (total_bytes / group.size)  # in this order, integers stay exact


Before = tuple[int, ...] | None  # of `LayoutCells`
# digits of a cell's number, outermost first: number of values, and whether it is in keys
Runs = tuple[tuple[int, bool], ...]


@dataclass(frozen=True, slots=True, eq=False)
class Groups:
    """The groups of each of C configurations; few differ."""

    shapes: tuple[GroupShape, ...]
    which: Ints  # (C,)

    def __getitem__(self, row: int) -> GroupShape:
        return self.shapes[int(self.which[row])]

    def each(self, cost: Callable[[GroupShape], float]) -> Floats:
        """(C,) a number that depends on the shape."""
        return np.array([cost(shape) for shape in self.shapes])[self.which]


@lru_cache(maxsize=4096)
def group_shapes(cells: LayoutCells, keys: tuple[int, ...], graph: DeviceGraph) -> Groups:
    """For each configuration, the groups of devices whose cells agree in the dimensions `keys`."""
    numbers: dict[tuple[Runs, bool, bool, Before], int] = {}
    before = [None] * len(cells.total) if cells.before is None else map(tuple, cells.before.tolist())
    patterns = zip(_runs(cells, keys), cells.strided.tolist(), cells.copies.tolist(), before, strict=True)
    which = np.array([numbers.setdefault(pattern, len(numbers)) for pattern in patterns], np.int64)
    return Groups(tuple(_group_shape_of(*pattern, graph) for pattern in numbers), which)


def _runs(cells: LayoutCells, keys: tuple[int, ...]) -> list[Runs]:
    """Each configuration's runs of dimensions, all in keys or none; merged, so that there are few patterns."""
    dims = np.where(np.array(cells.counts_in) == SCATTERED, cells.scattered[:, None], cells.counts_in)
    found = list[Runs]()
    for sizes, inside in zip(cells.digits.tolist(), np.isin(dims, keys).tolist(), strict=True):
        runs = list[tuple[int, bool]]()
        for size, key in zip(sizes, inside, strict=True):
            if runs and runs[-1][1] == key:
                runs[-1] = (runs[-1][0] * size, key)
            elif size > 1:
                runs.append((size, key))
        found.append(tuple(runs))
    return found


@lru_cache(maxsize=65536)
def _group_shape_of(runs: Runs, strided: bool, copies: bool, before: Before, graph: DeviceGraph) -> GroupShape:
    """The group shape of a configuration of two dimensions: one in keys, one not."""
    digits = np.array([[size for size, _ in runs]], np.int64)
    inside = np.array([key for _, key in runs], np.bool_)
    degrees = np.stack([digits[:, ~inside].prod(1), digits[:, inside].prod(1)], axis=1)
    cells = LayoutCells(
        degrees,
        digits,
        tuple(inside.astype(int).tolist()),
        np.zeros(1, np.int64),
        np.array([strided]),
        np.array([copies]),
        graph.count,
        degrees,
        None if before is None else np.array([before], np.int64),
    )
    return group_shape(replicas(cells, (1,))[0], graph)


SyncMethod = Literal["all-reduce", "parameter-server", "connections to a parameter server"]


def bucket_s(
    size_bytes: float,
    group: GroupShape,
    graph: DeviceGraph,
    method: SyncMethod = "all-reduce",
    operation: Operation = "all_reduce",
) -> float:
    """Time to synchronize one bucket of gradients, or to reduce-scatter or gather one of sharded parameters.

    A parameter server is the first replica: 2(r-1) bytes/b if its port is serial, or 2 bytes/b of the slowest link if
    each replica's connection runs at its own bandwidth at the same time (two readings of Jia et al.).
    """
    if operation != "all_reduce":
        return reduce_scatter_s(size_bytes, group, graph, operation)
    if method == "parameter-server":
        return 2 * group.server_s_per_byte * size_bytes
    if method == "connections to a parameter server":
        return 2 * group.server_link_s_per_byte * size_bytes
    return all_reduce_s(size_bytes, group, graph)


@lru_cache(maxsize=65536)
def bucket_rate(
    group: GroupShape, graph: DeviceGraph, method: SyncMethod = "all-reduce", operation: Operation = "all_reduce"
) -> float:
    """Seconds a byte in a full bucket, whose members share the latency of its collective."""
    return bucket_s(BUCKET_BYTES, group, graph, method, operation) / BUCKET_BYTES


@lru_cache(maxsize=65536)
def least_rate(
    size_bytes: float, group: GroupShape, graph: DeviceGraph, operation: Operation, method: SyncMethod
) -> float:
    """A lower bound on seconds a byte in a bucket of at most `size_bytes`.

    By the formulas, larger buckets take less a byte; by a measured curve, the minimum is at one of its knots.
    """
    if group.size == 1 or not size_bytes:
        return 0.0
    curve = graph.links and graph.links.curve(operation, group.fan, groups_per_port(group))
    sizes = [size_bytes, *(size for size, _ in (curve.knots if curve else ()) if 0 < size < size_bytes)]
    return min(bucket_s(size, group, graph, method, operation) / size for size in sizes)
