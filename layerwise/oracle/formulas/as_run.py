"""The closed forms as our runtime runs a strategy: the adjoint of an all-gather is a reduce-scatter, not an all-reduce.

Compute is the cost model's, of the local shapes that the strategy leaves on a device. Communication is Hockney's, of
the messages that the runtime sends: where splits are even, links uniform and halos interior, the cost tables say the
same. Elsewhere they know more: uneven cells, busy ports, hierarchical collectives, batch norm's statistics.
"""

from __future__ import annotations

from collections.abc import Mapping

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.oracle.formulas.collectives import Hop, all_gather_s, all_reduce_s, flows_per_port, hop
from layerwise.oracle.formulas.facts import Facts, LayerFacts
from layerwise.oracle.formulas.halos import halo_messages
from layerwise.oracle.formulas.memory import memory_bytes, optimizer_copies
from layerwise.oracle.formulas.phases import Phases
from layerwise.oracle.formulas.published import split_at
from layerwise.oracle.formulas.stages import pipeline_phases, stages
from layerwise.oracle.strategies import CUT, SPATIAL, Shape, strategy
from layerwise.partition.buckets import BUCKET_BYTES


def as_run(facts: Facts, name: str, shape: Shape, model: CostModel, *, segments: int = 1, gamma: float = 1.0) -> Phases:
    """The phases of an iteration of the strategy `name` on the model's devices, with the model's batch."""
    if name == "pipeline":
        found = pipeline_phases(stages(model, shape.devices, segments), segments, model.devices)
        return Phases(
            compute_s=found.compute_s * facts.scale,
            update_s=found.update_s,
            passing_s=found.passing_s,
            memory_bytes=gamma * found.memory_bytes,
        )
    plan, batch = strategy(model.graph, name, shape), model.graph.batch / shape.groups
    times = [model.node_cost(layer, (plan[layer.name],)).compute for layer in model.graph.inner]
    link = hop(model.devices, shape.inside)
    gather_s = reduce_s = halo_s = 0.0
    if CUT.get(name) == "c":
        gather_s = reduce_s = _gathers(facts, plan, batch, shape.inside, link)
    elif CUT.get(name) == "k":
        gather_s = reduce_s = _reductions(facts, plan, batch, shape.inside, link)
    elif shape.grid:
        before, _ = split_at(facts.layers, shape.gather_after)
        cut = [layer for layer in before if not (layer.fed and model.options.io == "free")]  # else every device has it
        halo_s = sum(_halo_s(layer, batch * facts.item_bytes, dict(shape.grid), link) for layer in cut)
        gather_s = 2 * _collects(facts, plan, batch, shape.inside, link)  # to one device, and back
    return Phases(
        compute_s=facts.scale * sum(float(t.forward[0] + t.backward[0]) for t in times),
        update_s=sum(float(t.update[0]) for t in times),
        gather_s=gather_s,
        reduce_s=reduce_s,
        halo_s=halo_s,
        gradient_s=_gradients(facts, plan, shape, model),
        memory_bytes=gamma * _memory(facts, name, shape, batch, model.options.optimizer),
    )


def _gathers(facts: Facts, plan: Mapping[str, Config], batch: float, members: int, link: Hop) -> float:
    """One way: what each cut layer needs whole of other cut layers."""
    share = batch * facts.item_bytes / members
    return sum(
        all_gather_s(share * items, members, link)
        for layer in facts.layers
        if plan[layer.name]["c"] > 1
        for items in layer.gathered
    )


def _reductions(facts: Facts, plan: Mapping[str, Config], batch: float, members: int, link: Hop) -> float:
    """One way: the sums of each layer cut by its input channels, and what goes from the uncut first layer to them."""
    share = batch * facts.item_bytes / members
    sums = sum(all_gather_s(share * y.outputs, members, link) for y in facts.layers if plan[y.name]["k"] > 1)
    scattered, inner = 0.0, {layer.name for layer in facts.layers}
    for layer in facts.layers:
        if plan[layer.name].total > 1:
            for source in facts.graph[layer.name].inputs:
                if source in inner and plan[source].total == 1:
                    items = facts.graph[source].out.volume / facts.batch
                    scattered += all_gather_s(share * items, members, link)
    return sums + scattered


def _collects(facts: Facts, plan: Mapping[str, Config], batch: float, members: int, link: Hop) -> float:
    """One way: from layers that are cut in space to layers that are not."""
    total, cut = 0.0, {name for name, config in plan.items() if any(config[d] > 1 for d in SPATIAL)}
    for layer in facts.layers:
        if layer.name not in cut:
            for source in facts.graph[layer.name].inputs:
                if source in cut:
                    items = facts.graph[source].out.volume / facts.batch
                    total += all_gather_s(batch * items / members * facts.item_bytes, members, link)
    return total


def _halo_s(layer: LayerFacts, sample_bytes: float, grid: Mapping[str, int], link: Hop) -> float:
    """Forward, and backward unless the layer reads the network's input: m(alpha + B·halo(x)·delta·beta) each."""
    messages = halo_messages(layer, grid)
    once = sum(link.alpha_s + sample_bytes * items * link.beta_s_per_byte for items in messages)
    return once if layer.fed else 2 * once


def _gradients(facts: Facts, plan: Mapping[str, Config], shape: Shape, model: CostModel) -> float:
    """All-reduces in buckets, among the devices that hold the same parameters."""
    total = 0.0
    for layer in facts.layers:
        config = plan[layer.name]
        spatial = any(config[d] > 1 for d in SPATIAL)
        members = shape.devices if spatial else shape.groups
        if members == 1 or not layer.parameters:
            continue
        shards = config["c"] * config["k"]
        link = hop(model.devices, members, 1 if spatial else shape.inside)
        link = link.shared(flows_per_port(model.devices, shards))
        rate = all_reduce_s(BUCKET_BYTES, members, link) / BUCKET_BYTES
        total += layer.parameters * facts.item_bytes / shards * rate
    return total


def _memory(facts: Facts, name: str, shape: Shape, batch: float, optimizer: str) -> float:
    copies, share = optimizer_copies(optimizer), 1 / shape.inside
    if CUT.get(name) == "c":  # inputs gathered whole
        return memory_bytes(facts, batch, outputs=share, weights=share, copies=copies)
    if CUT.get(name) == "k":  # partial sums of the whole output
        return memory_bytes(facts, batch, inputs=share, weights=share, copies=copies)
    if shape.grid:
        before, after = split_at(facts.layers, shape.gather_after)
        cut = memory_bytes(facts, batch, inputs=share, outputs=share, copies=copies, layers=before)
        return cut + memory_bytes(facts, batch, copies=copies, layers=after)
    return memory_bytes(facts, batch, copies=copies)
