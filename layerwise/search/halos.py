"""Halos of the inputs: read by every device that needs them, or sent by the one that reads their cell.

Where each device reads boxes (io boxes), its first layers need more of an input than a cell of it. Two plans are
searched for: of the network as it is, in which a device reads all that its layers need of each input, and of the
network with a layer of the inputs' cells (`graph.cells`), which reads these alone and sends the rest as any layer does.
A step takes its timeline, before which the busiest device reads its boxes, at a device's reading rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np

from layerwise.config import Config
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats
from layerwise.graph.cells import with_cells
from layerwise.partition.place import place, read
from layerwise.search.result import Halos, SearchResult, timeline_s


def search_halos(model: CostModel, search: Callable[[CostModel], SearchResult]) -> tuple[CostModel, SearchResult]:
    """The result of `search` for the network that the cheaper plan is for: with cells where halos are sent.

    Halos are read where the profile says nothing of reading, where no plan of the first search reads any, and where
    both cost the same. Of two plans one that fits into memory is cheaper than one that does not.
    """
    result, rate = search(model), model.devices.processor.read_bytes_per_s
    if model.options.io != "boxes" or rate is None:
        return model, result
    inputs = overlapping(model, *(c.strategy for c in result.simulated))
    if not inputs:
        return model, result
    other = CostModel(with_cells(model.original, inputs), model.devices, model.asked)
    instead = search(other)
    most = most_read_bytes(model, result.best.strategy), most_read_bytes(other, instead.best.strategy)
    read_s, sent_s = timeline_s(result.best), timeline_s(instead.best)
    sent = (not instead.best.fits, sent_s) < (not result.best.fits, read_s)
    halos = Halos(inputs, sent, read_s, sent_s, *most)
    return (other, replace(instead, halos=halos)) if sent else (model, replace(result, halos=halos))


def overlapping(model: CostModel, *strategies: Mapping[str, Config]) -> tuple[str, ...]:
    """The inputs of which devices together read more than there is, under one of these. Of whole numbers, none."""
    found = set()
    for strategy in strategies:
        elements = read_elements(model, strategy)
        specs = {name: model.graph[name].out for name in elements}
        found |= {n for n, read in elements.items() if specs[n].differentiable and read.sum() > specs[n].volume}
    return tuple(layer.name for layer in model.graph.layers if layer.name in found)


def reading_s(model: CostModel, strategy: Mapping[str, Config]) -> float:
    """Seconds until the busiest device has read its boxes; 0 where the profile or the io says nothing of reading."""
    rate = model.devices.processor.read_bytes_per_s
    return 0.0 if model.options.io != "boxes" or rate is None else most_read_bytes(model, strategy) / rate


def read_elements(model: CostModel, strategy: Mapping[str, Config]) -> dict[str, Floats]:
    """The (N,) elements of each input that each device reads. strategy: of all layers."""
    graph, devices = model.graph, model.devices.count
    places = {
        layer.name: place(layer, strategy[layer.name], devices, "boxes", unfed=layer.name in graph.unfed)
        for layer in graph.layers
    }
    return {name: one.owned.volume for name, one in read(graph, places).items()}


def most_read_bytes(model: CostModel, strategy: Mapping[str, Config]) -> float:
    """Bytes of all inputs together, by the device that reads most. strategy: of all layers."""
    elements = read_elements(model, strategy)
    sizes = [read * model.graph[name].out.item_bytes for name, read in elements.items()]
    return float(np.sum(sizes, axis=0).max())
