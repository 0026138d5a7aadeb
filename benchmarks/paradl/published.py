"""The closed forms as published: Kahira et al., HPDC 2021, table 3 and appendix A, an iteration of them.

What the tables leave out and the text has is here too: the gather after the last spatial layer, behind which every
device of a group computes the whole of the group's batch; data+spatial with its leaders; contention.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import ceil, log2

from benchmarks.paradl.case import Case
from benchmarks.paradl.collectives import Hop, all_gather_s, hop, message_s, ring_all_reduce_s
from benchmarks.paradl.facts import LayerFacts
from benchmarks.paradl.halos import published_halo
from benchmarks.paradl.memory import memory_bytes
from layerwise.oracle.limits import flows_per_port
from layerwise.oracle.phases import Phases
from layerwise.oracle.pipeline import balanced, crossing_bytes


def published(case: Case) -> Phases:
    """The phases of an iteration."""
    facts, devices, p1, p2 = case.facts, case.devices, case.shape.groups, case.shape.inside
    if case.strategy == "pipeline":
        return _pipeline(case)
    if case.strategy in ("spatial", "ds"):
        return _spatial(case)
    rings = flows_per_port(devices, p2 if case.strategy == "df" else 1)
    between = hop(devices, p1, p2).shared(rings) if p1 > 1 else Hop(0.0, 0.0)
    gather_s, reduce_s = _layerwise(case) if case.cut else (0.0, 0.0)
    return Phases(
        compute_s=case.model.graph.batch / (p1 * p2) * facts.compute_s,
        update_s=facts.update_s(facts.weights) / p2,
        gather_s=gather_s,
        reduce_s=reduce_s,
        gradient_s=ring_all_reduce_s(facts.weights * facts.item_bytes / p2, p1, between),
        memory_bytes=memory_bytes(facts, case.batch, weights=1 / p2),
    )


def _layerwise(case: Case) -> tuple[float, float]:
    """All-gathers and all-reduces of the layers before the last: (p-1)(alpha + B|y|/p·delta·beta), one and two of it.

    Filter gathers y forward and reduces dL/dx backward; channel reduces y forward and gathers dL/dx backward.
    """
    members = case.shape.inside
    share, link = case.batch * case.facts.activation_bytes / members, hop(case.devices, members)
    once = sum(all_gather_s(share * layer.outputs, members, link) for layer in case.facts.weighted()[:-1])
    return once, 2 * once


def _spatial(case: Case) -> Phases:
    facts, devices, p1, p2 = case.facts, case.devices, case.shape.groups, case.shape.inside
    link, (before, after) = _mpi(case), case.spatial
    halo_s = 0.0
    for layer in before:
        forward, backward = published_halo(layer, case.grid)
        if forward:
            halo_s += 2 * (
                2 * link.alpha_s + case.batch * (forward + backward) * facts.activation_bytes * link.beta_s_per_byte
            )
    gather_s = case.gather_after_s(link)
    w_bytes = facts.weights * facts.item_bytes
    if p1 == 1:
        gradient_s = ring_all_reduce_s(w_bytes, p2, hop(devices, p2))
    else:  # to a leader in each group and back, by a tree; leaders in a ring
        inner, outer = hop(devices, p2), hop(devices, p1, p2)
        gradient_s = 2 * ceil(log2(p2)) * message_s(w_bytes, inner) + ring_all_reduce_s(w_bytes, p1, outer)
    return Phases(
        compute_s=case.batch * (_seconds(before) / p2 + _seconds(after)),
        update_s=facts.update_s(facts.weights),
        gather_s=gather_s,
        reduce_s=gather_s,  # the gather's adjoint
        halo_s=halo_s,
        gradient_s=gradient_s,
        memory_bytes=memory_bytes(facts, case.batch, inputs=1 / p2, outputs=1 / p2),
    )


def _pipeline(case: Case) -> Phases:
    """GPipe: p + S - 1 turns of the slowest stage; the stages balanced by FW + BW."""
    facts, stages, batch, segments = case.facts, case.shape.devices, case.model.graph.batch, case.segments
    cuts = balanced([layer.compute_s for layer in facts.layers], stages)
    groups = [facts.layers[first:end] for first, end in pairwise(cuts)]
    passed = crossing_bytes(facts.graph)  # of the facts' batch
    passing_s = 0.0
    for number, group in enumerate(groups[:-1]):
        link = case.devices.levels[case.devices.level_between(number, number + 1)]
        size = passed[group[-1].name] / facts.batch * batch / segments
        passing_s = max(passing_s, message_s(size, Hop(link.alpha_s, link.beta_s_per_byte)))
    slowest = max(sum(y.forward_s for y in g) for g in groups) + max(sum(y.backward_s for y in g) for g in groups)
    return Phases(
        compute_s=batch / segments * (stages + segments - 1) * slowest,
        update_s=max(facts.update_s(sum(y.weights for y in g)) for g in groups),
        passing_s=2 * (stages + segments - 2) * passing_s,
        memory_bytes=max(memory_bytes(facts, batch, layers=g) for g in groups),
    )


def _seconds(layers: Sequence[LayerFacts]) -> float:
    return sum(layer.compute_s for layer in layers)


def _mpi(case: Case) -> Hop:
    """The link of halos: the profile's for MPI inside a node, where it has one."""
    link, members = case.facts.mpi_link, case.shape.inside
    if link is not None and case.devices.level_between(0, members - 1) == 0:
        return Hop(link.latency_s, 1 / link.bandwidth_bytes_per_s)
    return hop(case.devices, members)
