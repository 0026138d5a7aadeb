"""The closed forms as ChainerMNX runs them: the software that ParaDL's measurements were taken with.

Read off its source (ankahira/chainermnx at c0449255): no fusion, and only convolutions and linear layers are split, so
that a filter or channel split repeats all element-wise work on every device. Filter: NCCL all-gather of y, then a
concatenation; backward the pieces are stacked and summed, and an all-reduce of the device's own share of y follows.
Channel: NCCL all-reduce of y; backward an all-gather of dL/dx and a concatenation. Spatial: halos, for kernels above
1, by blocking MPI messages one after the other, then concatenated. Gradients: one ring all-reduce after the backward
pass; data+spatial first inside the node, then among leaders. Times of one device include the update.
"""

from __future__ import annotations

from collections.abc import Mapping

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.errors import LayerwiseError
from layerwise.oracle.formulas.collectives import Hop, all_gather_s, flows_per_port, hop, message_s, ring_all_reduce_s
from layerwise.oracle.formulas.facts import Facts, LayerFacts
from layerwise.oracle.formulas.halos import published_halo
from layerwise.oracle.formulas.memory import memory_bytes
from layerwise.oracle.formulas.phases import Phases
from layerwise.oracle.formulas.published import split_at
from layerwise.oracle.framework import Framework
from layerwise.oracle.strategies import CUT, Shape

FILTER_PASSES = 5  # over y: a concatenation reads and writes, so does a stack, a sum reads (and writes y/p)
NOT_RUN = ("pipeline", "layerwise")
CHANNEL_PASSES = 2  # over x: a concatenation
HALO_PASSES = (6, 4)  # over x/p, y/p: two concatenations each, and a slice of dL/dx


def chainermnx(
    facts: Facts, strategy: str, shape: Shape, model: CostModel, chainer: Framework, gamma: float = 1.0
) -> Phases:
    """The phases of an iteration of the model's batch. `facts` are of the network as it stands, without fusion."""
    if strategy in NOT_RUN:
        raise not_run(strategy)
    p1, p2, devices = shape.groups, shape.inside, model.devices
    batch, w_bytes = model.graph.batch / p1, facts.parameters * facts.item_bytes
    gather_s = reduce_s = halo_s = 0.0
    compute_s = batch * facts.compute_s
    gradient_s = _gradient_s(w_bytes, p1, p2, model, chainer)
    if p2 > 1 and strategy in CUT:
        cut = CUT[strategy]
        compute_s, gather_s, reduce_s = _channels(facts, cut, batch, p2, model, chainer)
        # As the paper and ChainerMNX's layers have it; ParaDL's tool lets all weights travel in each of the p2 rings.
        gradient_s = _gradient_s(w_bytes / p2, p1, p2, model, chainer, flows_per_port(devices, p2))
    elif p2 > 1 and strategy in ("spatial", "ds"):
        compute_s = _spatial_compute_s(facts, shape, batch, model, chainer)
        halo_s, gather_s = _spatial_messages(facts, shape, batch, chainer)
        reduce_s = gather_s
        gradient_s += _gradient_s(w_bytes, p2, 1, model, chainer)
    weights = 1 / p2 if strategy in CUT else 1.0
    share = 1 / p2 if strategy in ("spatial", "ds") else 1.0
    memory = memory_bytes(facts, batch, inputs=share, outputs=share, weights=weights)
    return Phases(
        compute_s=compute_s,
        gather_s=gather_s,
        reduce_s=reduce_s,
        halo_s=halo_s,
        gradient_s=gradient_s,
        memory_bytes=gamma * memory,
    )


def not_run(strategy: str) -> LayerwiseError:
    """For a strategy that ChainerMNX has not."""
    return LayerwiseError(f"{strategy} is no strategy of ChainerMNX: take other --formulas, or leave it out")


def _gradient_s(
    size_bytes: float, members: int, stride: int, model: CostModel, chainer: Framework, flows: float = 1.0
) -> float:
    """A ring (NCCL 2.3.5 has no trees), at the rate that its all-reduces of gradients have, shared by `flows`."""
    if members == 1:
        return 0.0
    inside = model.devices.level_between(0, (members - 1) * stride) == 0
    rate = chainer.gradient_node_bytes_per_s if inside else chainer.gradient_bytes_per_s
    link = Hop(hop(model.devices, members, stride).alpha_s, 1 / rate).shared(flows)
    return ring_all_reduce_s(size_bytes, members, link)


def _local_s(facts: Facts, layer: LayerFacts, model: CostModel, config: Mapping[str, int]) -> float:
    cost = model.node_cost(model.graph[layer.name], (Config.of(config),)).compute
    return facts.scale * float(cost.forward[0] + cost.backward[0])


def _channels(
    facts: Facts, cut: str, batch: float, members: int, model: CostModel, chainer: Framework
) -> tuple[float, float, float]:
    """Compute, all-gather and all-reduce s of a split of the output (`c`) or input (`k`) channels."""
    group = facts.model(members, round(batch), model.devices.devices_per_node)
    link = hop(group.devices, members)
    if group.devices.nodes == 1:
        link = Hop(link.alpha_s, 1 / chainer.collective_node_bytes_per_s)
    heavy = facts.weighted()
    split = heavy if cut == "c" else heavy[1:]
    names = {layer.name for layer in split}
    compute_s = gather_s = reduce_s = 0.0
    for layer in facts.layers:
        compute_s += _local_s(facts, layer, group, {cut: members} if layer.name in names else {})
    for layer in split:
        x, y = (batch * items * facts.item_bytes for items in (layer.inputs, layer.outputs))
        if cut == "c":
            copied, pieces = (FILTER_PASSES + 1 / members) * y, 2 * members
            gather_s += all_gather_s(y / members, members, link)
            reduce_s += ring_all_reduce_s(y / members, members, link)
        else:
            copied, pieces = CHANNEL_PASSES * x, members
            gather_s += all_gather_s(x / members, members, link)
            reduce_s += ring_all_reduce_s(y, members, link)
        compute_s += copied / chainer.copy_bytes_per_s + pieces * chainer.piece_s
    return compute_s, gather_s, reduce_s


def _spatial_compute_s(facts: Facts, shape: Shape, batch: float, model: CostModel, chainer: Framework) -> float:
    group, grid = facts.model(shape.inside, round(batch), model.devices.devices_per_node), dict(shape.grid)
    before, _ = split_at(facts.layers, shape.gather_after)
    total = batch * chainer.feed_s_per_sample
    for layer in facts.layers:
        degrees = {label: grid.get(label, 1) for label, _ in layer.places} if layer in before else {}
        total += _local_s(facts, layer, group, degrees)
    for layer in before:
        if layer.weighted and published_halo(layer, grid)[0]:
            moved = HALO_PASSES[0] * layer.inputs + HALO_PASSES[1] * layer.outputs
            total += batch * moved / shape.inside * facts.item_bytes / chainer.copy_bytes_per_s
    return total


def _spatial_messages(facts: Facts, shape: Shape, batch: float, chainer: Framework) -> tuple[float, float]:
    """Halos both ways, and the gather after the last spatial layer one way."""
    link, grid = _mpi(facts, chainer), dict(shape.grid)
    before, after = split_at(facts.layers, shape.gather_after)
    halo_s = 0.0
    for layer in before:
        there, back = published_halo(layer, grid)
        if layer.weighted and there:
            halo_s += 2 * sum(message_s(batch * items * facts.item_bytes, link) for items in (there, back))
    if not after:
        return halo_s, 0.0
    return halo_s, all_gather_s(batch * before[-1].outputs / shape.inside * facts.item_bytes, shape.inside, link)


def _mpi(facts: Facts, chainer: Framework) -> Hop:
    for link in facts.profile.other_links:
        if link.name == "pcie":
            return Hop(chainer.mpi_latency_s, 1 / link.bandwidth_bytes_per_s)
    raise LayerwiseError(f"profile {facts.profile.name} has no link 'pcie', through which ChainerMNX sends halos")
