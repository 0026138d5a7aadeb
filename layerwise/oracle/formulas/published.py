"""The closed forms as published: Kahira et al., HPDC 2021, table 3 and appendix A, an iteration of them.

What the tables leave out and the text tells is here too: the gather after the last spatial layer, behind which every
device of a group computes the whole of the group's batch; data+spatial with its leaders; contention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2

from layerwise.machine import DeviceGraph
from layerwise.oracle.formulas.collectives import Hop, all_gather_s, flows_per_port, hop, message_s, ring_all_reduce_s
from layerwise.oracle.formulas.facts import Facts, LayerFacts
from layerwise.oracle.formulas.halos import published_halo
from layerwise.oracle.formulas.memory import memory_bytes
from layerwise.oracle.formulas.phases import Phases
from layerwise.oracle.formulas.stages import balanced, crossing_bytes
from layerwise.oracle.strategies import Shape

MPI = "pcie"  # the profile's link, where it has one, of halos and spatial gathers that go through MPI and the host


def published(
    facts: Facts,
    strategy: str,
    shape: Shape,
    batch: int,
    devices: DeviceGraph,
    *,
    optimizer: str = "sgd",
    segments: int = 1,
    gamma: float = 1.0,
) -> Phases:
    """The phases of an iteration of `batch` samples. `shape` says how the strategy uses the devices."""
    p1, p2, w_bytes = shape.groups, shape.inside, facts.weights * facts.item_bytes
    p = p1 * p2
    update_s = facts.update_s(facts.weights, optimizer)
    if strategy == "pipeline":
        return _pipeline(facts, p, batch, devices, optimizer, segments, gamma)
    if strategy in ("spatial", "ds"):
        return _spatial(facts, shape, batch, devices, update_s, gamma)
    rings = flows_per_port(devices, p2 if strategy == "df" else 1)
    between = hop(devices, p1, p2).shared(rings) if p1 > 1 else Hop(0.0, 0.0)
    gather_s = reduce_s = 0.0
    if strategy in ("filter", "channel", "df"):
        gather_s, reduce_s = _layerwise(facts, batch / p1, p2, hop(devices, p2))
    return Phases(
        compute_s=batch / p * facts.compute_s,
        update_s=update_s / p2,
        gather_s=gather_s,
        reduce_s=reduce_s,
        gradient_s=ring_all_reduce_s(w_bytes / p2, p1, between),
        memory_bytes=gamma * memory_bytes(facts, batch / p1, weights=1 / p2),
    )


def _layerwise(facts: Facts, batch: float, members: int, link: Hop) -> tuple[float, float]:
    """All-gathers and all-reduces of the layers before the last: (p-1)(alpha + B|y|/p·delta·beta), one and two of it.

    Filter gathers y forward and reduces dL/dx backward; channel reduces y forward and gathers dL/dx backward.
    """
    share = batch * facts.item_bytes / members
    once = sum(all_gather_s(share * layer.outputs, members, link) for layer in facts.weighted()[:-1])
    return once, 2 * once


def _spatial(facts: Facts, shape: Shape, batch: int, devices: DeviceGraph, update_s: float, gamma: float) -> Phases:
    p1, p2 = shape.groups, shape.inside
    per_group, link, grid = batch / p1, _mpi(facts, devices, p2), dict(shape.grid)
    before, after = split_at(facts.layers, shape.gather_after)
    halo_s = gather_s = 0.0
    for layer in before:
        there, back = published_halo(layer, grid)
        if there:
            halo_s += 2 * (2 * link.alpha_s + per_group * (there + back) * facts.item_bytes * link.beta_s_per_byte)
    if after and p2 > 1:
        gather_s = all_gather_s(per_group * before[-1].outputs / p2 * facts.item_bytes, p2, link)
    w_bytes = facts.weights * facts.item_bytes
    if p1 == 1:
        gradient_s = ring_all_reduce_s(w_bytes, p2, hop(devices, p2))
    else:  # to a leader in each group and back, by a tree; leaders in a ring
        inner, outer = hop(devices, p2), hop(devices, p1, p2)
        gradient_s = 2 * ceil(log2(p2)) * message_s(w_bytes, inner) + ring_all_reduce_s(w_bytes, p1, outer)
    return Phases(
        compute_s=per_group * (_seconds(before) / p2 + _seconds(after)),
        update_s=update_s,
        gather_s=gather_s,
        reduce_s=gather_s,  # the gather's adjoint
        halo_s=halo_s,
        gradient_s=gradient_s,
        memory_bytes=gamma * memory_bytes(facts, per_group, inputs=1 / p2, outputs=1 / p2),
    )


def _pipeline(
    facts: Facts, stages: int, batch: int, devices: DeviceGraph, optimizer: str, segments: int, gamma: float
) -> Phases:
    """GPipe: p + S - 1 turns of the slowest stage; the stages balanced by FW + BW."""
    cuts = balanced([layer.compute_s for layer in facts.layers], stages)
    groups = [facts.layers[first:end] for first, end in pairwise(cuts)]
    passed = crossing_bytes(facts.graph)  # of the facts' batch
    passing_s = 0.0
    for at, group in enumerate(groups[:-1]):
        link = devices.levels[devices.level_between(at, at + 1)]
        size = passed[group[-1].name] / facts.batch * batch / segments
        passing_s = max(passing_s, message_s(size, Hop(link.alpha_s, link.beta_s_per_byte)))
    slowest = max(sum(y.forward_s for y in g) for g in groups) + max(sum(y.backward_s for y in g) for g in groups)
    return Phases(
        compute_s=batch / segments * (stages + segments - 1) * slowest,
        update_s=max(facts.update_s(sum(y.weights for y in g), optimizer) for g in groups),
        passing_s=2 * (stages + segments - 2) * passing_s,
        memory_bytes=gamma * max(memory_bytes(facts, batch, layers=g) for g in groups),
    )


def split_at(layers: Sequence[LayerFacts], last: str | None) -> tuple[tuple[LayerFacts, ...], tuple[LayerFacts, ...]]:
    """The layers up to the one that a spatial strategy gathers after, and the rest."""
    at = next((i for i, layer in enumerate(layers, start=1) if layer.name == last), 0)
    return tuple(layers[:at]), tuple(layers[at:])


def _seconds(layers: Sequence[LayerFacts]) -> float:
    return sum(layer.compute_s for layer in layers)


def _mpi(facts: Facts, devices: DeviceGraph, members: int) -> Hop:
    """The link of halos: the profile's for MPI inside a node, where it has one."""
    inside = devices.level_between(0, members - 1) == 0
    for link in facts.profile.other_links:
        if link.name == MPI and inside:
            return Hop(link.latency_s, 1 / link.bandwidth_bytes_per_s)
    return hop(devices, members)
