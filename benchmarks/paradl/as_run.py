"""The closed forms as our runtime runs a strategy: the adjoint of an all-gather is a reduce-scatter, not an all-reduce.

Compute is the cost model's, of the local shapes that the strategy leaves on a device. Communication is Hockney's, of
the messages that the runtime sends: where splits are even, links uniform and halos interior, the cost tables say the
same. Elsewhere they know more: uneven cells, busy ports, hierarchical collectives, batch norm's statistics.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from benchmarks.paradl.case import Case
from benchmarks.paradl.collectives import Hop, all_gather_s, all_reduce_s, hop
from benchmarks.paradl.facts import LayerFacts
from benchmarks.paradl.halos import halo_messages
from benchmarks.paradl.memory import memory_bytes
from layerwise.config import Config
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.oracle.limits import flows_per_port
from layerwise.oracle.phases import Phases
from layerwise.oracle.pipeline import pipeline_phases, pipeline_stages
from layerwise.oracle.strategies import SPATIAL, strategy
from layerwise.partition.buckets import BUCKET_BYTES

Plan = Mapping[str, Config]


def as_run(case: Case) -> Phases:
    """The phases of an iteration."""
    facts, model = case.facts, case.model
    if case.strategy == "pipeline":
        pipelined = pipeline_phases(
            pipeline_stages(model, case.shape.devices, case.segments), case.segments, model.devices
        )
        return Phases(
            compute_s=pipelined.compute_s * facts.scale,
            update_s=pipelined.update_s,
            passing_s=pipelined.passing_s,
            memory_bytes=pipelined.memory_bytes,
        )
    plan, link = strategy(model.graph, case.strategy, case.shape), hop(model.devices, case.shape.inside)
    times = [model.node_cost(layer, (plan[layer.name],)).compute for layer in model.graph.inner]
    gather_s = reduce_s = halo_s = 0.0
    if case.cut == "c":
        gather_s = reduce_s = _gathers_s(case, plan, link)
    elif case.cut == "k":
        gather_s = reduce_s = _reductions_s(case, plan, link)
    elif case.shape.grid:
        cut = [layer for layer in case.spatial[0] if not (layer.fed and model.options.io == "free")]
        halo_s = sum(_halo_s(case, layer, link) for layer in cut)  # of what is not fed: of that every device has all
        split = {name for name, config in plan.items() if any(config[d] > 1 for d in SPATIAL)}
        whole = plan.keys() - split
        gather_s = 2 * sum(case.spread_s(items, link) for items in _crossing(case, split, whole))  # and back
    return Phases(
        compute_s=facts.scale * sum(float(t.forward[0] + t.backward[0]) for t in times),
        update_s=sum(float(t.update[0]) for t in times),
        gather_s=gather_s,
        reduce_s=reduce_s,
        halo_s=halo_s,
        gradient_s=_gradients_s(case, plan),
        memory_bytes=_memory_bytes(case),
    )


def _crossing(case: Case, sources: Collection[str], targets: Collection[str]) -> Iterator[float]:
    """Items a sample of what goes from layers of one set to layers of another."""
    graph = case.facts.graph
    for layer in case.facts.layers:
        if layer.name in targets:
            yield from (graph[s].out.volume / case.facts.batch for s in graph[layer.name].inputs if s in sources)


def _gathers_s(case: Case, plan: Plan, link: Hop) -> float:
    """One way: what each cut layer needs whole of other cut layers."""
    members = case.shape.inside
    share = case.batch * case.facts.activation_bytes / members
    cut = (layer for layer in case.facts.layers if plan[layer.name]["c"] > 1)
    return sum(all_gather_s(share * items, members, link) for layer in cut for items in layer.gathered)


def _reductions_s(case: Case, plan: Plan, link: Hop) -> float:
    """One way: the sums of each layer cut by its input channels, and what goes from the uncut first layer to them."""
    members = case.shape.inside
    share = case.batch * case.facts.activation_bytes / members
    summed = [layer.outputs for layer in case.facts.layers if plan[layer.name]["k"] > 1]
    uncut = {name for name, config in plan.items() if config.total == 1}
    scattered = _crossing(case, uncut, plan.keys() - uncut)
    return sum((sum(all_gather_s(share * items, members, link) for items in rows) for rows in (summed, scattered)), 0.0)


def _halo_s(case: Case, layer: LayerFacts, link: Hop) -> float:
    """Forward, and backward unless the layer reads the network's input: m(alpha + B·halo(x)·delta·beta) each."""
    sample_bytes = case.batch * case.facts.activation_bytes
    messages = halo_messages(layer, case.grid)
    once = sum(link.alpha_s + sample_bytes * items * link.beta_s_per_byte for items in messages)
    return once if layer.fed else 2 * once


def _gradients_s(case: Case, plan: Plan) -> float:
    """All-reduces in buckets, among the devices that hold the same parameters."""
    total, shape = 0.0, case.shape
    for layer in case.facts.layers:
        config = plan[layer.name]
        shards = config["c"] * config["k"]
        uncut = layer.name in case.model.graph.unfed and config.total == 1  # computed by all
        members = shape.devices if uncut else config.total // shards
        if members == 1 or not layer.parameters:
            continue
        apart = shards * (shape.devices // config.total if config.placement == "strided" else 1)
        link = hop(case.devices, members, apart)
        link = link.shared(flows_per_port(case.devices, shards))
        rate = all_reduce_s(BUCKET_BYTES, members, link) / BUCKET_BYTES
        total += layer.parameters * case.facts.item_bytes / shards * rate
    return total


def _memory_bytes(case: Case) -> float:
    facts, batch = case.facts, case.batch
    copies, share = OPTIMIZERS[case.model.options.optimizer], 1 / case.shape.inside
    if case.cut == "c":  # inputs gathered whole
        return memory_bytes(facts, batch, outputs=share, weights=share, copies=copies)
    if case.cut == "k":  # partial sums of the whole output
        return memory_bytes(facts, batch, inputs=share, weights=share, copies=copies)
    if case.shape.grid:
        before, after = case.spatial
        cut = memory_bytes(facts, batch, inputs=share, outputs=share, copies=copies, layers=before)
        return cut + memory_bytes(facts, batch, copies=copies, layers=after)
    return memory_bytes(facts, batch, copies=copies)
