"""Hockney's model of collectives, as ParaDL has it: a message of m bytes takes alpha + m beta.

Sources: Kahira et al., HPDC 2021, section 4.3 (ring), and its footnote (tree, in k chunks).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import ceil, log2, sqrt

from layerwise.machine import DeviceGraph


@dataclass(frozen=True, slots=True)
class Hop:
    """The slowest link of a ring: seconds a message, seconds a byte."""

    alpha_s: float
    beta_s_per_byte: float

    def shared(self, flows: float) -> Hop:
        """Contention: `flows` (phi, at least 1) streams share the link, and its bandwidth."""
        return replace(self, beta_s_per_byte=self.beta_s_per_byte * max(1.0, flows))


def hop(devices: DeviceGraph, members: int, stride: int = 1) -> Hop:
    """The slowest link of a ring over `members` devices, every `stride`-th one, from device 0 on.

    One stream through each port: a NIC inside a rack, and beyond it the slower of NIC and uplink.
    """
    outer = devices.level_between(0, (members - 1) * stride)
    inside = stride < devices.devices_per_node  # some links of the ring stay in a node
    used = [level for number, level in enumerate(devices.levels[: outer + 1]) if number or outer == 0 or inside]
    return Hop(used[-1].alpha_s, max(level.beta_s_per_byte for level in used))


def message_s(size_bytes: float, link: Hop) -> float:
    """Point to point."""
    return link.alpha_s + size_bytes * link.beta_s_per_byte


def all_gather_s(each_bytes: float, members: int, link: Hop) -> float:
    """Ring; every member contributes `each_bytes`. Its adjoint, the reduce-scatter, takes as long."""
    return (members - 1) * (link.alpha_s + each_bytes * link.beta_s_per_byte)


def ring_all_reduce_s(size_bytes: float, members: int, link: Hop) -> float:
    """A buffer of `size_bytes` on every member."""
    return 2 * (members - 1) * (link.alpha_s + size_bytes / members * link.beta_s_per_byte)


def tree_all_reduce_s(size_bytes: float, members: int, link: Hop, chunks: float | None = None) -> float:
    """Double binary tree, pipelined in `chunks` (k; default: the best number). Never less than all bytes take."""
    if members == 1:
        return 0.0
    depth = ceil(log2(members))
    if chunks is None:
        chunks = max(1.0, sqrt(depth * size_bytes * link.beta_s_per_byte / (2 * link.alpha_s)))
    tree = 2 * (depth + chunks) * (link.alpha_s + size_bytes / (2 * chunks) * link.beta_s_per_byte)
    return max(tree, 2 * (members - 1) / members * size_bytes * link.beta_s_per_byte)


def all_reduce_s(size_bytes: float, members: int, link: Hop) -> float:
    """Ring for large messages, tree for small ones: a message is small where the tree is the faster."""
    return min(ring_all_reduce_s(size_bytes, members, link), tree_all_reduce_s(size_bytes, members, link))
