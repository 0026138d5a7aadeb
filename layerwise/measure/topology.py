"""The topology of the ranks: which communicate at the same time, and the shapes of groups that plans form."""

from __future__ import annotations

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass

from layerwise.comm.base import Comm, Group
from layerwise.errors import LayerwiseError
from layerwise.machine.curves import trimmed


@dataclass(frozen=True, slots=True)
class Topology:
    """Equal nodes, whose ranks are numbered node by node."""

    nodes: int
    local: int  # ranks of a node

    @property
    def size(self) -> int:
        return self.nodes * self.local


@dataclass(frozen=True, slots=True)
class RankGroups:
    """Groups of ranks that are active at the same time."""

    fan: tuple[int, ...]  # members of a group at each level
    load: int  # groups behind each node's port
    groups: tuple[Group, ...]

    def of(self, rank: int) -> Group | None:
        """The group that a rank is in, or None."""
        return next((group for group in self.groups if rank in group), None)


def find_topology(comm: Comm) -> Topology:
    """The topology by the ranks' host names, or by LOCAL_WORLD_SIZE if all are the same (emulated nodes).

    Every rank must call this. Raises LayerwiseError if nodes differ in size or their ranks are not consecutive.
    """
    local = [platform.node(), os.environ.get("LOCAL_WORLD_SIZE", "")]
    facts = comm.all_gather_object(local)
    hosts = [host for host, _ in facts]
    if len(set(hosts)) == 1 and facts[0][1].isdecimal() and 0 < int(facts[0][1]) < comm.members.world:
        hosts = [f"node {rank // int(facts[0][1])}" for rank in comm.members.ranks]
    return topology_of(hosts)


def topology_of(hosts: Sequence[str]) -> Topology:
    """The topology from the name of each rank's node."""
    names = list(dict.fromkeys(hosts))
    local = hosts.count(names[0])
    if list(hosts) != [name for name in names for _ in range(local)]:
        counts = ", ".join(f"{hosts.count(name)} on {name}" for name in names)
        raise LayerwiseError(
            f"the ranks do not fill equal nodes one after another ({counts}): start the same number on each node, with "
            "torchrun"
        )
    return Topology(len(names), local)


def shapes(where: Topology) -> list[RankGroups]:
    """Every kind of group that a grid of cells forms: divisors of a node's ranks times divisors of the nodes.

    All groups of a kind are active at once, as in a step; if several then share a node's port, one of them alone is
    included too.
    """
    result = []
    for outer in _divisors(where.nodes):
        for inner in _divisors(where.local):
            if inner * outer == 1:
                continue
            groups = []
            for first_node in range(0, where.nodes, outer):
                nodes = range(first_node, first_node + outer)
                for first in range(0, where.local, inner):
                    groups.append(tuple(n * where.local + first + i for n in nodes for i in range(inner)))
            fan = trimmed((inner, outer))
            load = where.local // inner if outer > 1 else 1
            result.append(RankGroups(fan, load, tuple(groups)))
            if load > 1:
                result.append(RankGroups(fan, 1, tuple(groups[::load])))
    return result


def pairs(where: Topology) -> list[RankGroups]:
    """Pairs of ranks at each level: all at once, and between nodes also one pair for each port."""
    result = []
    if where.local > 1:
        starts = [n * where.local + i for n in range(where.nodes) for i in range(0, where.local - 1, 2)]
        result.append(RankGroups((2,), 1, tuple((r, r + 1) for r in starts)))
    if where.nodes > 1:
        starts = [n * where.local + i for n in range(0, where.nodes - 1, 2) for i in range(where.local)]
        result.append(RankGroups((1, 2), where.local, tuple((r, r + where.local) for r in starts)))
        if where.local > 1:
            result.append(RankGroups((1, 2), 1, tuple((r, r + where.local) for r in starts[:: where.local])))
    return result


def _divisors(number: int) -> list[int]:
    return [d for d in range(1, number + 1) if number % d == 0]
