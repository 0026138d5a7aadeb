"""Price: a strategy's cost, term by term and layer by layer, with its bytes and its memory."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import numpy as np

from layerwise.config import Config, check
from layerwise.cost.collectives import wire_bytes
from layerwise.cost.compute.roofline import OPTIMIZERS, largest_box, largest_extents
from layerwise.cost.memory.step import peak_bytes
from layerwise.cost.model import CostModel, Strategy
from layerwise.errors import LayerwiseError
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.place import input_maps


@dataclass(frozen=True, slots=True)
class LayerPrice:
    """One layer of a strategy. Seconds of equation 1; bytes are sums over all devices and both directions."""

    config: Config
    compute_s: float
    transfer_s: float  # of all its inputs
    sync_s: float
    statistics_s: float
    reduction_s: float
    transfer_bytes: float
    sync_bytes: float
    statistics_bytes: float
    memory_bytes: float  # of the fullest device, all that the layer ever holds, as closed forms count it
    measured_s: float = 0.0  # of compute_s, what rests on measured times; fitted_s: on the fit to them
    fitted_s: float = 0.0

    @property
    def total_s(self) -> float:
        return self.compute_s + self.transfer_s + self.sync_s + self.statistics_s + self.reduction_s


@dataclass(frozen=True, slots=True)
class Price:
    """A strategy's cost: `step_time_s` is equation 1 and the sum of the layers'."""

    layers: dict[str, LayerPrice]
    step_time_s: float
    memory_bytes: float  # of the fullest device at the fullest instant of a step (cost.memory)

    @property
    def transfer_bytes(self) -> float:
        """Activations and their gradients, reductions over k included."""
        return sum(p.transfer_bytes for p in self.layers.values())

    @property
    def sync_bytes(self) -> float:
        """Gradients of parameters."""
        return sum(p.sync_bytes for p in self.layers.values())

    @property
    def statistics_bytes(self) -> float:
        """All-reduces inside layers (batch norm)."""
        return sum(p.statistics_bytes for p in self.layers.values())

    @property
    def bytes_moved(self) -> float:
        """All that is handed to communication calls in a step, summed over devices."""
        return self.transfer_bytes + self.sync_bytes + self.statistics_bytes


def price(model: CostModel, strategy: Strategy, *, memory_bytes: float | None = None) -> Price:
    """Prices one strategy. Raises LayerwiseError where layers are missing, unknown, or cannot be split so.

    memory_bytes: where it is known already.
    """
    strategy = complete(model, strategy)
    layers: dict[str, LayerPrice] = {}
    for layer in model.graph.layers:
        config = strategy[layer.name]
        cost = model.node_cost(layer, (config,))
        transfer_s = transfer_bytes = gathered_bytes = 0.0
        for slot, source in enumerate(layer.inputs):
            edge, ends = (source, layer.name, slot), ((strategy[source],), (config,))
            transfer_s += float(model.edge_cost(edge, *ends)[0, 0])
            replicated = model.graph[source].role is Role.TIED and strategy[source].total == 1
            times = 0 if replicated else model.directions(edge)
            load = model.traffic(edge, *ends)
            transfer_bytes += times * float(load.total_bytes.sum())
            if times and load.received_bytes[0, 0] > 0:
                gathered_bytes += _needed_bytes(model, layer, slot, config)
        collective = _collective_bytes(model, layer, config)
        layers[layer.name] = LayerPrice(
            config,
            float(cost.compute.total[0]),
            transfer_s,
            float(cost.sync[0]),
            float(cost.statistics[0]),
            float(cost.reduction[0]),
            transfer_bytes + collective["reduction"],
            collective["sync"],
            collective["statistics"],
            gathered_bytes + _held_bytes(model, layer, config),
            float(cost.compute.measured[0]),
            float(cost.compute.fitted[0]),
        )
    memory = float(peak_bytes(model, strategy).max()) if memory_bytes is None else memory_bytes
    return Price(layers, sum(p.total_s for p in layers.values()), memory)


def complete(model: CostModel, strategy: Strategy) -> dict[str, Config]:
    """The strategy with the configurations of inputs and sink added."""
    inner = {layer.name: layer for layer in model.graph.layers if not layer.end}
    unknown = sorted(set(strategy) - {layer.name for layer in model.graph.layers})
    missing = sorted(set(inner) - set(strategy))
    if unknown or missing:
        what = f"unknown layers {unknown[:3]}" if unknown else f"no configuration for {missing[:3]}"
        raise LayerwiseError(f"the strategy has {what}; the model's layers are those of `layerwise search --json`")
    for name, layer in inner.items():
        check(strategy[name], layer.space.dims, model.devices.count, name)
    return {
        layer.name: strategy[layer.name] if layer.name in inner else model.end_config(layer)
        for layer in model.graph.layers
    }


def _collective_bytes(model: CostModel, layer: Layer, config: Config) -> dict[str, float]:
    """Bytes that the layer's own collectives hand to the network, summed over devices."""
    result = {"sync": 0.0, "statistics": 0.0, "reduction": 0.0}
    if layer.end:
        return result
    lay = model.layout(layer, (config,))
    for kind, found, times in (
        ("sync", model.gradients_of(layer, lay), 1),
        ("statistics", model.statistics_of(layer, lay), 1),  # forward and backward are two of them
        # A reduce-scatter and, for the gradient, an all-gather: one all-reduce's worth.
        ("reduction", model.reductions_of(layer, lay), 1 if model.reduces_back(layer) else 0.5),
    ):
        for c in found:
            result[kind] += times * wire_bytes(float(c.total_bytes[0]), c.groups[0])
    return result


def _needed_bytes(model: CostModel, layer: Layer, slot: int, config: Config) -> float:
    maps, late = input_maps(layer, slot)
    lay = model.layout(layer, (config,))
    degrees = lay.own_degrees if late else lay.degrees
    return float(largest_box(maps, layer.space.dims, degrees)[0]) * model.graph[layer.inputs[slot]].out.item_bytes


def _parameter_bytes(model: CostModel, layer: Layer, config: Config) -> float:
    """Parameters, gradients and optimizer state."""
    lay = model.layout(layer, (config,))
    total = 0.0
    for _, p, item_bytes in layer.held():
        degrees = lay.own_degrees if p.late else lay.degrees
        copies = 2 + OPTIMIZERS[model.options.optimizer] if p.trainable else 1
        total += copies * float(largest_box(p.maps, layer.space.dims, degrees)[0]) * item_bytes
    return total


def _held_bytes(model: CostModel, layer: Layer, config: Config) -> float:
    """Parameters, gradients, optimizer state and what every stage makes, whether or not the backward pass needs it."""
    total = _parameter_bytes(model, layer, config)
    lay = model.layout(layer, (config,))
    if layer.role is Role.TIED:
        return total
    rank = len(layer.out.shape)
    for stage in layer.stages:
        extents = largest_extents(layer.space.dims[:rank], lay.own_degrees if stage.epilogue else lay.degrees)
        total += prod(np.ravel(extents).tolist()) * stage.space.out.item_bytes
    return total
