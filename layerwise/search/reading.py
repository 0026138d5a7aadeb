"""Reading: what each device reads of the inputs before a step, and how long that takes."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats
from layerwise.partition.place import place, read


def reading_s(model: CostModel, strategy: Mapping[str, Config]) -> float:
    """Seconds until the busiest device has read its boxes; 0 where the profile or the io says nothing of reading."""
    rate = model.devices.processor.read_bytes_per_s
    return 0.0 if model.options.io != "boxes" or rate is None else most_read_bytes(model, strategy) / rate


def read_elements(model: CostModel, strategy: Mapping[str, Config]) -> dict[str, Floats]:
    """By input, the (N,) elements that each device reads. strategy: of all layers."""
    graph, devices = model.graph, model.devices.count
    places = {
        layer.name: place(layer, strategy[layer.name], devices, "boxes", unfed=layer.name in graph.unfed)
        for layer in graph.layers
    }
    return {name: one.owned.volume for name, one in read(graph, places).items()}


def most_read_bytes(model: CostModel, strategy: Mapping[str, Config]) -> float:
    """Of all inputs together, by the device that reads most. strategy: of all layers."""
    elements = read_elements(model, strategy)
    sizes = [read * model.graph[name].out.item_bytes for name, read in elements.items()]
    return float(np.sum(sizes, axis=0).max())
