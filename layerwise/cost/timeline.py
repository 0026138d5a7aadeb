"""timeline_s: a step simulated device by device, with the overlap that the runtime has.

Layers run forward in plan order, then backward in reverse; a transfer waits for the devices that send and holds the
ones that receive. Gradients are all-reduced in buckets beside the backward pass; a transfer in between takes the port
from them. The optimizer steps when both are done.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from layerwise.config import BUCKET_BYTES, Config
from layerwise.cost.price import complete
from layerwise.cost.sync import Group, replicas, sync_s
from layerwise.cost.tables import CostModel, Edge, Strategy
from layerwise.graph.layer import Layer
from layerwise.ops.ends import Tied

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Timeline:
    """Seconds of a step: all of it, and of the slowest device's forward, backward and exposed synchronisation."""

    total_s: float
    forward_s: float
    backward_s: float
    exposed_sync_s: float


@dataclass
class _Bucket:
    group: Group
    members: NDArray[np.bool_]
    bytes: float = 0.0


def timeline(model: CostModel, strategy: Strategy) -> Timeline:
    """Simulates one training step of a strategy."""
    strategy = complete(model, strategy)
    devices = model.devices
    clock = np.zeros(devices.count)  # each device's compute stream
    port = np.zeros(devices.count)  # until when its port is busy with gradients
    layers = model.graph.layers
    for layer in layers:
        _receive(model, layer, strategy, clock, port, forward=True)
        _compute(model, layer, strategy, clock, forward=True)
    forward_s = float(clock.max())
    buckets: dict[bytes, _Bucket] = {}
    for layer in reversed(layers):
        _compute(model, layer, strategy, clock, forward=False)
        _receive(model, layer, strategy, clock, port, forward=False)
        _collect(model, layer, strategy[layer.name], buckets, clock, port)
    backward_s = float(clock.max()) - forward_s
    for bucket in buckets.values():
        _send(model, bucket, clock, port)
    update = np.zeros(devices.count)
    for layer in layers:
        config = strategy[layer.name]
        update[_active(model, layer, config)] += float(model.node_cost(layer, (config,)).compute.update[0])
    total = float((np.maximum(clock, port) + update).max())
    return Timeline(total, forward_s, backward_s, float(np.maximum(port - clock, 0.0).max()))


def _active(model: CostModel, layer: Layer, config: Config) -> NDArray[np.bool_]:
    active: NDArray[np.bool_] = model.layout(layer, (config,)).active[0]
    return active


def _compute(model: CostModel, layer: Layer, strategy: Strategy, clock: Floats, *, forward: bool) -> None:
    config = strategy[layer.name]
    cost = model.node_cost(layer, (config,))
    active = _active(model, layer, config)
    time = float(cost.compute.forward[0] if forward else cost.compute.backward[0])
    clock[active] += time
    blocking = (float(cost.statistics[0]) + float(cost.reduction[0])) / 2  # each direction has half
    if blocking:  # the cells of the layer wait for each other
        clock[active] = clock[active].max() + blocking


def _receive(model: CostModel, layer: Layer, strategy: Strategy, clock: Floats, port: Floats, *, forward: bool) -> None:
    """Transfers of all inputs of a layer, one after the other as the runtime does them."""
    for slot, source in enumerate(layer.inputs):
        edge: Edge = (source, layer.name, slot)
        times = model.directions(edge)
        if times < (1 if forward else 2):
            continue
        ends = ((strategy[source],), (strategy[layer.name],))
        time = float(model.edge_cost(edge, *ends)[0, 0]) / times
        if time == 0.0:
            continue
        involved = _active(model, model.graph[source], strategy[source]) | _active(model, layer, strategy[layer.name])
        clock[involved] = clock[involved].max() + time
        port[involved & (port > clock - time)] += time  # gradients on the wire wait meanwhile


def _collect(
    model: CostModel, layer: Layer, config: Config, buckets: dict[bytes, _Bucket], clock: Floats, port: Floats
) -> None:
    """Adds a layer's gradients to the buckets of those who share them; a full bucket is sent."""
    lay = model.layout(layer, (config,))
    for c in model.gradients_of(layer, lay):
        if c.groups[0].size == 1:
            continue
        row = replicas(lay, c.keys, c.late)[0]
        if isinstance(layer.op, Tied) and config.total == 1:  # replicated
            row = np.zeros_like(row)
        bucket = buckets.setdefault(row.tobytes(), _Bucket(c.groups[0], row >= 0))
        bucket.bytes += float(c.size_bytes[0])
        if bucket.bytes >= BUCKET_BYTES:
            _send(model, buckets.pop(row.tobytes()), clock, port)


def _send(model: CostModel, bucket: _Bucket, clock: Floats, port: Floats) -> None:
    """All-reduces a bucket as soon as its members have computed and their ports are free."""
    start = np.maximum(clock, port)[bucket.members].max()
    port[bucket.members] = start + sync_s(bucket.bytes, bucket.group, model.devices, model.options.sync)
