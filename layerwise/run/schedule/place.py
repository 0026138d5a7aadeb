"""Places: which boxes of every layer each rank computes and owns under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

import numpy as np

from layerwise.config import States
from layerwise.errors import LayerwiseError
from layerwise.geometry import boundaries
from layerwise.graph.layer import LayerGraph
from layerwise.partition.place import Each, Place, data_parallel, place, read
from layerwise.partition.sharding import Sharding, sharded, states_of
from layerwise.plan import Plan


def places(graph: LayerGraph, plan: Plan) -> dict[str, Place]:
    """The place of every layer of the plan's graph by rank, at whatever batch the graph has."""
    ranks, result = np.argsort(plan.device_order), {}  # the device that each rank is
    for layer in graph.layers:
        config = data_parallel(layer, plan.gpus) if layer.end else plan.strategy[layer.name]
        unfed = layer.name in graph.unfed
        result[layer.name] = place(layer, config, plan.gpus, plan.io, unfed=unfed).on(ranks)
    return result | read(graph, result) if plan.io == "boxes" else result


def samples(plan: Plan, batch: int) -> tuple[slice, ...]:
    """Which samples of a global batch each rank feeds: cell i of min(N, batch), by the plan's order of devices."""
    if plan.io != "sample":
        return (slice(0, batch),) * plan.gpus
    cuts = boundaries(batch, min(plan.gpus, batch)).tolist()
    shares = [slice(a, b) for a, b in pairwise(cuts)]
    shares += [slice(batch, batch)] * (plan.gpus - len(shares))
    return tuple(shares[device] for device in np.argsort(plan.device_order).tolist())


def shardings(graph: LayerGraph, plan: Plan) -> dict[str, tuple[Sharding, States]]:
    """Returns, by the model's name, the parameters that ranks with the same box share out, and how."""
    ranks, found = np.argsort(plan.device_order), dict[str, tuple[Sharding, States]]()
    for layer in graph.inner:
        config = plan.strategy[layer.name]
        for name, p in layer.own_parameters():
            if (one := sharded(layer, p, config, plan.gpus, unfed=layer.name in graph.unfed)) is not None:
                found[name] = one.on(ranks), states_of(layer, config)
    return found


def parameter_boxes(graph: LayerGraph, by_layer: Mapping[str, Place]) -> dict[str, Each]:
    """Returns, by the model's name, the box of each parameter and buffer that every rank computes with."""
    boxes: dict[str, Each] = {}
    for layer in graph.layers:
        for name, p in layer.own_parameters():
            if name in boxes:
                raise LayerwiseError(
                    f"layer {layer.name!r} uses buffer {name!r} that another layer has, too, such as a batch norm that "
                    "is called twice: give each use a module of its own"
                )
            boxes[name] = by_layer[layer.name].holds(p).each
    return boxes
