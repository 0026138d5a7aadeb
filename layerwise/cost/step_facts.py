"""Facts of a strategy that the program of its step depends on, from the cost model."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from layerwise.config import Config, States
from layerwise.cost.collectives import GroupShape
from layerwise.cost.model import CostModel, Strategy
from layerwise.cost.terms import Collective, ParameterKind, gradients_of, shares_of
from layerwise.geometry.arrays import Ints
from layerwise.graph.layer import Layer
from layerwise.partition.ahead import begun_before
from layerwise.partition.buckets import BUCKET_BYTES
from layerwise.partition.groups import replicas
from layerwise.partition.sharding import states_of
from layerwise.program import Gradient, StrategyFacts, gradient_order


@dataclass(frozen=True, slots=True, eq=False)
class GradientSum:
    """The gradient sum of one layer over the same groups of devices."""

    row: Ints  # (N,) devices with the same number sum together; -1: in none
    group: GroupShape
    size_bytes: float
    states: States
    kind: ParameterKind


def step_facts(
    model: CostModel, strategy: Strategy, bucket_bytes: float = BUCKET_BYTES
) -> tuple[StrategyFacts, list[GradientSum]]:
    """The facts that a complete strategy's program depends on, and the sums of its gradients."""
    graph, gradients, sums = model.graph, list[Gradient](), list[GradientSum]()
    for layer in gradient_order(graph):
        for one in gradient_sums(model, layer, strategy[layer.name]):
            gradients.append(Gradient(layer.name, one.row.tobytes(), one.row >= 0, one.size_bytes, one.states))
            sums.append(one)
    early = [end for ends in begun_before(graph, model.options.io).values() for end in ends]
    facts = StrategyFacts(
        travels={(name, slot) for name, slot in early if transfer_s(model, strategy, graph[name], slot) > 0},
        recomputed={name for name, config in strategy.items() if config.recompute},
        gathered=[layer.name for layer in graph.layers if gathered_alone(model, layer, strategy[layer.name])],
        gradients=gradients,
        bucket_bytes=bucket_bytes,
    )
    return facts, sums


def transfer_s(model: CostModel, strategy: Strategy, layer: Layer, slot: int, *, forward: bool = True) -> float:
    """Seconds to transfer a layer's input one way; 0 if nothing is sent this way."""
    source = layer.inputs[slot]
    name = source, layer.name, slot
    times = model.directions(name)
    if times < (1 if forward else 2):
        return 0.0
    return model.pair_s(name, (strategy[source].cells, strategy[layer.name].cells)) / times


def gradient_sums(model: CostModel, layer: Layer, config: Config) -> list[GradientSum]:
    """The sums of a layer's gradients, in the order in which they become complete."""

    def made() -> list[GradientSum]:
        layout = model.layout(layer, (config,))
        return [*gathers(model, layer, config), *_sums(gradients_of(model, layer, layout), "replicated")]

    return model.once((gradient_sums, model.kind(layer), config), made)


def gathers(model: CostModel, layer: Layer, config: Config) -> list[GradientSum]:
    """Who gathers a layer's parameters from the shards that each device keeps, and sums their gradients."""

    def made() -> list[GradientSum]:
        shared = shares_of(model, layer, model.layout(layer, (config,)))
        return list(_sums(shared, states_of(layer, config)))

    return model.once((gathers, model.kind(layer), config), made)


def gathered_alone(model: CostModel, layer: Layer, config: Config) -> bool:
    """True if a layer's parameters are full only while it computes."""
    return states_of(layer, config) == "gathered" and bool(gathers(model, layer, config))


def _sums(collectives: list[Collective], states: States) -> Iterator[GradientSum]:
    for c in reversed(collectives):  # the last parameter first: a bias, then its weight
        if c.group_shapes[0].size > 1 and c.size_bytes[0]:
            row = replicas(c.cells, c.keys)[0]
            yield GradientSum(row, c.group_shapes[0], float(c.size_bytes[0]), states, (c.keys, c.epilogue))
