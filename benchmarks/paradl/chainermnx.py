"""The closed forms as ChainerMNX runs them: the software that ParaDL's measurements were taken with.

Read off its source (ankahira/chainermnx at c0449255): no fusion, and only convolutions and linear layers are split, so
that a filter or channel split repeats all element-wise work on every device. Filter: NCCL all-gather of y, then a
concatenation; backward the pieces are stacked and summed, and an all-reduce of the device's own share of y follows.
Channel: NCCL all-reduce of y; backward an all-gather of dL/dx and a concatenation. Spatial: halos, for kernels above
1, by blocking MPI messages one after the other, then concatenated. Gradients: one ring all-reduce after the backward
pass; data+spatial first inside the node, then among leaders. Times of one device include the update.

Each call of a layer's collective opens a log file on every rank: the likely reason why hybrids on many GPUs take longer
than this says, by layers times GPUs and not by bytes. `Framework.growth_s` is that, where it is given.
"""

from __future__ import annotations

from collections.abc import Mapping

from benchmarks.paradl.case import Case
from benchmarks.paradl.collectives import Hop, all_gather_s, hop, message_s, ring_all_reduce_s
from benchmarks.paradl.facts import Facts, LayerFacts
from benchmarks.paradl.framework import Framework
from benchmarks.paradl.halos import published_halo
from benchmarks.paradl.memory import memory_bytes
from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.oracle.limits import flows_per_port
from layerwise.oracle.phases import Phases
from layerwise.oracle.strategies import HYBRID

FILTER_PASSES = 5  # over y: a concatenation reads and writes, so does a stack, a sum reads (and writes y/p)
NOT_RUN = ("pipeline", "layerwise")
CHANNEL_PASSES = 2  # over x: a concatenation
HALO_PASSES = (6, 4)  # over x/p, y/p: two concatenations each, and a slice of dL/dx


def chainermnx(case: Case, chainer: Framework) -> Phases:
    """The phases of an iteration. The case's facts are of the network as it stands, without fusion."""
    if case.strategy in NOT_RUN:
        raise not_run(case.strategy)
    facts, p1, p2 = case.facts, case.shape.groups, case.shape.inside
    w_bytes = facts.parameters * facts.item_bytes
    spatial, cut = case.strategy in ("spatial", "ds"), case.cut
    gather_s = reduce_s = halo_s = 0.0
    compute_s = case.batch * facts.compute_s
    gradient_s = _gradient_s(case, w_bytes, p1, p2, chainer)
    if p2 > 1 and cut is not None:
        compute_s, gather_s, reduce_s = _channels(case, cut, chainer)
        # As the paper and ChainerMNX's layers have it; ParaDL's tool lets all weights travel in each of the p2 rings.
        gradient_s = _gradient_s(case, w_bytes / p2, p1, p2, chainer, flows_per_port(case.devices, p2))
    elif p2 > 1 and spatial:
        compute_s = _spatial_compute_s(case, chainer)
        link = _mpi(facts, chainer)
        halo_s = _halos_s(case, link)
        gather_s = reduce_s = case.gather_after_s(link)
        gradient_s += _gradient_s(case, w_bytes, p2, 1, chainer)
    if case.strategy in HYBRID and p2 > 1:
        gather_s += chainer.growth_s * len(facts.weighted()) * p1 * p2
    weights, share = (1 / p2 if holds else 1.0 for holds in (cut is not None, spatial))
    return Phases(
        compute_s=compute_s,
        gather_s=gather_s,
        reduce_s=reduce_s,
        halo_s=halo_s,
        gradient_s=gradient_s,
        memory_bytes=memory_bytes(facts, case.batch, inputs=share, outputs=share, weights=weights),
    )


def not_run(strategy: str) -> LayerwiseError:
    """For a strategy that ChainerMNX has not."""
    return LayerwiseError(f"{strategy} is no strategy of ChainerMNX")


def _gradient_s(
    case: Case, size_bytes: float, members: int, stride: int, chainer: Framework, flows: float = 1.0
) -> float:
    """A ring (NCCL 2.3.5 has no trees), at the rate that its all-reduces of gradients have, shared by `flows`."""
    if members == 1:
        return 0.0
    inside = case.devices.level_between(0, (members - 1) * stride) == 0
    rate = chainer.gradient_node_bytes_per_s if inside else chainer.gradient_bytes_per_s
    link = Hop(hop(case.devices, members, stride).alpha_s, 1 / rate).shared(flows)
    return ring_all_reduce_s(size_bytes, members, link)


def _group(case: Case) -> CostModel:
    """The cost model of one group alone."""
    return case.facts.model(case.shape.inside, round(case.batch), case.devices.devices_per_node)


def _local_s(facts: Facts, layer: LayerFacts, group: CostModel, config: Mapping[str, int]) -> float:
    cost = group.node_cost(group.graph[layer.name], (Config.of(config),)).compute
    return facts.scale * float(cost.forward[0] + cost.backward[0])


def _channels(case: Case, cut: str, chainer: Framework) -> tuple[float, float, float]:
    """Compute, all-gather and all-reduce s of a split of the output (`c`) or input (`k`) channels."""
    facts, members, group = case.facts, case.shape.inside, _group(case)
    link = hop(group.devices, members)
    if group.devices.nodes == 1:
        link = Hop(link.alpha_s, 1 / chainer.collective_node_bytes_per_s)
    split = facts.weighted() if cut == "c" else facts.weighted()[1:]
    names = {layer.name for layer in split}
    compute_s = gather_s = reduce_s = 0.0
    for layer in facts.layers:
        compute_s += _local_s(facts, layer, group, {cut: members} if layer.name in names else {})
    for layer in split:
        x, y = (case.batch * items * facts.item_bytes for items in (layer.inputs, layer.outputs))
        if cut == "c":
            copied, pieces = (FILTER_PASSES + 1 / members) * y, 2 * members
            gathered, summed = y / members, y / members
        else:
            copied, pieces = CHANNEL_PASSES * x, members
            gathered, summed = x / members, y
        gather_s += all_gather_s(gathered, members, link)
        reduce_s += ring_all_reduce_s(summed, members, link)
        compute_s += copied / chainer.copy_bytes_per_s + pieces * chainer.piece_s
    return compute_s, gather_s, reduce_s


def _spatial_compute_s(case: Case, chainer: Framework) -> float:
    facts, group, grid, before = case.facts, _group(case), case.grid, case.spatial[0]
    total = case.batch * chainer.feed_s_per_sample
    for layer in facts.layers:
        degrees = {label: grid.get(label, 1) for label, _ in layer.places} if layer in before else {}
        total += _local_s(facts, layer, group, degrees)
    for layer in before:
        if layer.weighted and published_halo(layer, grid)[0]:
            moved = HALO_PASSES[0] * layer.inputs + HALO_PASSES[1] * layer.outputs
            total += case.batch * moved / case.shape.inside * facts.item_bytes / chainer.copy_bytes_per_s
    return total


def _halos_s(case: Case, link: Hop) -> float:
    """Both ways."""
    total = 0.0
    for layer in case.spatial[0]:
        halos = published_halo(layer, case.grid)
        if layer.weighted and halos[0]:
            total += 2 * sum(message_s(case.batch * items * case.facts.item_bytes, link) for items in halos)
    return total


def _mpi(facts: Facts, chainer: Framework) -> Hop:
    link = facts.mpi_link
    if link is None:
        raise LayerwiseError(f"profile {facts.profile.name} has no link 'pcie', through which ChainerMNX sends halos")
    return Hop(chainer.mpi_latency_s, 1 / link.bandwidth_bytes_per_s)
