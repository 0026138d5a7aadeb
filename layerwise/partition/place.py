"""Place: which boxes of a layer every device computes and owns."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from layerwise.config import Config
from layerwise.geometry import Lattices
from layerwise.geometry.arrays import Ints
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.ops.base import Role
from layerwise.ops.facts import Dim, Maps, Parameter, Space
from layerwise.partition.boxes import Boxes
from layerwise.partition.layout import Cells, layout
from layerwise.tensor import TensorSpec


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """What every device has of a layer. The two boxes differ where k is split."""

    computed: Boxes  # of the iteration space, which a device computes
    owned: Boxes  # of the output, which it holds afterwards
    # Every device holds the whole (what is unfed and not cut, a constant, what is fed with io "free"): nothing of it
    # travels forward.
    everywhere: bool = False

    def at(self, epilogue: bool) -> Boxes:
        """What the needs of an input or a parameter follow from: the epilogue comes after the reduction over k."""
        return self.owned if epilogue else self.computed

    def holds(self, p: Parameter) -> Boxes:
        """The box of a parameter that every device holds; none where it computes nothing of the layer."""
        return self.at(p.epilogue).needs(p.maps)

    def on(self, devices: Ints) -> Place:
        """On these devices, in this order."""
        return Place(self.computed.on(devices), self.owned.on(devices), self.everywhere)


def place(layer: Layer, config: Config, devices: int, io: str, *, unfed: bool = False) -> Place:
    """What `devices` devices have of a layer under a configuration; io: as a plan has it (see `read`, too).

    unfed: whether no input of the network leads to it (`LayerGraph.unfed`). Where it is not cut either, every device
    computes it, as it does with DistributedDataParallel.
    """
    if layer.role is Role.CONSTANT or (layer.end and io != "sample"):
        whole = Boxes.whole(layer.out.shape, devices)
        return Place(whole, whole, everywhere=True)
    return place_in(layer.space, config, devices, everywhere=unfed and config.total == 1)


def read(graph: LayerGraph, places: Mapping[str, Place]) -> dict[str, Place]:
    """Of each input what every device reads where all read boxes (io boxes): the hull of what its layers need of it.

    places: of all layers. A device that needs nothing reads an empty box.
    """
    found: dict[str, Place] = {}
    for layer in graph.layers:
        for slot, source in enumerate(layer.inputs):
            if graph[source].role is Role.INPUT and layer.role is not Role.SINK:
                maps, epilogue = input_maps(layer, slot)
                need = places[layer.name].at(epilogue).needs(maps)
                hull = need if source not in found else found[source].owned.hull(need)
                found[source] = Place(hull, hull, everywhere=True)
    return {name: replace(one, computed=one.owned.filled(), owned=one.owned.filled()) for name, one in found.items()}


def place_in(space: Space, config: Config, devices: int, *, everywhere: bool = False) -> Place:
    """Of a layer with this iteration space, neither an input nor the sink."""
    rank, dims, cells = len(space.out.shape), space.dims, layout((config,), space, devices)
    if everywhere:
        cells = cells.everywhere()
    computed, owned = _boxes(cells.computed, dims, not rank), _boxes(cells.owned, dims[:rank], not rank)
    return Place(computed, owned, everywhere)


def _boxes(cells: Cells, dims: Sequence[Dim], skip: int) -> Boxes:
    """skip: 1 for a scalar, which layouts count as one dimension."""
    return Boxes.grid(dims, cells.degrees[0, skip:], cells.index[0, :, skip:], cells.active[0])


def data_parallel(layer: Layer, devices: int) -> Config:
    """Samples over all devices that can have one: the only configuration of an input and of the sink."""
    return Config.of({"n": min(devices, layer.space.max_degree("n"))})


def input_maps(layer: Layer, slot: int) -> tuple[Maps, bool]:
    """Which box of its input `slot` a layer needs, and whether that follows what it owns (epilogue) or computes."""
    space = layer.space
    if slot < len(layer.specs):
        return space.needs[slot], space.epilogue_inputs[slot]
    parameter = space.parameters[layer.tied[slot - len(layer.specs)]]
    return parameter.maps, parameter.epilogue


def lattices_of(layer: Layer, slot: int) -> Lattices:
    """Which positions of its input `slot` a layer reads at all: where it travels these do, and nothing else."""
    return layer.space.lattice(slot) if slot < len(layer.specs) else ()


def of_all_classes(owned: Boxes, spec: TensorSpec) -> Boxes:
    """What the devices get of the only output where each feeds the whole batch (io free): a box of all classes
    (dimension 1) for each different one, on the first device that has a part of it; the loss is computed there.
    """
    lo, hi = owned.lo.copy(), owned.hi.copy()
    lo[:, 1], hi[:, 1] = 0, np.where(owned.active, spec.shape[1], 0)
    wide = Boxes(lo, hi, owned.active)
    return Boxes(lo, hi, wide.first_of_each())
