"""Place: the boxes of a layer that every device computes and owns."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from layerwise.config import Config, fewer
from layerwise.geometry import Box, boundaries, interval_overlap, needed
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.ops.base import Role
from layerwise.ops.facts import Dim, Maps, Parameter, Space
from layerwise.partition.layout import LayoutCells, layout

Each = tuple[Box | None, ...]  # by device; None: no box


@dataclass(frozen=True, eq=False)
class Boxes:
    """The box [lo, hi) of each of N devices in a tensor of D dimensions."""

    lo: Ints  # (N, D)
    hi: Ints
    active: Mask  # (N,) devices that have a box
    cuts: tuple[Ints, ...] = ()  # for each dimension, the boundaries between a grid's cells

    @staticmethod
    def whole(shape: tuple[int, ...], devices: int) -> Boxes:
        """The full tensor, on every device."""
        hi = np.tile(np.array(shape, np.int64), (devices, 1))
        cuts = tuple(np.array([0, extent], np.int64) for extent in shape)
        return Boxes(np.zeros_like(hi), hi, np.ones(devices, np.bool_), cuts)

    @cached_property
    def each(self) -> Each:
        """The boxes one by one, by device."""
        boxes = map(Box, map(tuple, self.lo.tolist()), map(tuple, self.hi.tolist()))
        return tuple(box if active else None for box, active in zip(boxes, self.active.tolist(), strict=True))

    @property
    def volume(self) -> Floats:
        """(N,) elements."""
        volume: Floats = np.where(self.active, (self.hi - self.lo).astype(np.float64).prod(-1), 0.0)
        return volume

    def on(self, devices: Ints) -> Boxes:
        """The boxes of these devices, in this order."""
        return Boxes(self.lo[devices], self.hi[devices], self.active[devices], self.cuts)

    def needs(self, maps: Maps) -> Boxes:
        """The boxes of a tensor that `maps` need for these boxes."""
        return Boxes(*needed(maps, self.lo, self.hi), self.active)

    def overlap(self, other: Boxes) -> Floats:
        """(N,) elements in both of a device's two boxes."""
        lengths = interval_overlap(self.lo, self.hi, other.lo, other.hi)
        overlap: Floats = np.where(self.active & other.active, lengths.astype(np.float64).prod(-1), 0.0)
        return overlap

    def hull(self, other: Boxes) -> Boxes:
        """The smallest boxes that contain both; if a device has only one, that one."""
        lo = np.where(other.active[:, None], other.lo, self.lo)
        hi = np.where(other.active[:, None], other.hi, self.hi)
        both = (self.active & other.active)[:, None]
        lo, hi = np.where(both, np.minimum(lo, self.lo), lo), np.where(both, np.maximum(hi, self.hi), hi)
        return Boxes(lo, hi, self.active | other.active)

    def filled(self) -> Boxes:
        """The same, with empty boxes for devices that have none."""
        lo, hi = (np.where(self.active[:, None], side, 0) for side in (self.lo, self.hi))
        return Boxes(lo, hi, np.ones_like(self.active))

    def shared(self) -> Mask:
        """(N,) whether another device has the same box."""
        rows = np.concatenate([self.lo, self.hi, self.active[:, None]], axis=1)
        # Counted as bytes: np.unique would sort them, which takes ten times as long.
        each = np.ascontiguousarray(rows).view(np.dtype((np.void, rows.strides[0]))).ravel().tolist()
        counts = Counter(each)
        alike: Mask = self.active & np.array([counts[row] > 1 for row in each])
        return alike


@dataclass(frozen=True, slots=True, eq=False)
class Place:
    """The boxes of every device in one layer. Computed and owned boxes differ if k is split."""

    computed: Boxes  # of the iteration space, computed by the device
    owned: Boxes  # of the output, held afterwards
    # Every device holds the full tensor (unfed and not split, a constant, or an input with io "free"), so nothing is
    # sent forward.
    everywhere: bool = False

    def at(self, epilogue: bool) -> Boxes:
        """The boxes that an input's or a parameter's needs depend on: the epilogue follows the reduction."""
        return self.owned if epilogue else self.computed

    def holds(self, p: Parameter) -> Boxes:
        """The box of a parameter that every device holds; none if it computes nothing of the layer."""
        return self.at(p.epilogue).needs(p.maps)

    def on(self, devices: Ints) -> Place:
        """The place on these devices, in this order."""
        return Place(self.computed.on(devices), self.owned.on(devices), self.everywhere)


def place(layer: Layer, config: Config, devices: int, io: str, *, unfed: bool = False) -> Place:
    """The boxes of a layer on `devices` devices under a configuration; io: as in a plan (see `read`, too).

    unfed: whether no input of the network leads to it (`LayerGraph.unfed`). If it is not split either, every device
    computes it, as with DistributedDataParallel.
    """
    if layer.role is Role.CONSTANT or (layer.end and io != "sample"):
        whole = Boxes.whole(layer.out.shape, devices)
        return Place(whole, whole, everywhere=True)
    return place_in(layer.space, config, devices, everywhere=unfed and config.total == 1)


def read(graph: LayerGraph, places: Mapping[str, Place], io: str) -> dict[str, Place]:
    """The box that every device reads of each constant, and with io boxes of each input: the hull of what its layers
    need of it.

    places: of all layers. A device that needs nothing reads an empty box. A constant that is returned is read in full.
    """
    found: dict[str, Place] = {}
    roles = (Role.INPUT, Role.CONSTANT) if io == "boxes" else (Role.CONSTANT,)
    returned = {name for name in graph.layers[-1].inputs if graph[name].role is Role.CONSTANT}
    for layer in graph.layers:
        for slot, source in enumerate(layer.inputs):
            if graph[source].role in roles and layer.role is not Role.SINK and source not in returned:
                maps, epilogue = input_maps(layer, slot)
                need = places[layer.name].at(epilogue).needs(maps)
                hull = need if source not in found else found[source].owned.hull(need)
                found[source] = Place(hull, hull, everywhere=True)
    return {name: replace(one, computed=one.owned.filled(), owned=one.owned.filled()) for name, one in found.items()}


def place_in(space: Space, config: Config, devices: int, *, everywhere: bool = False) -> Place:
    """The place of a layer with this iteration space that is neither an input nor the sink."""
    rank, dims, cells = len(space.out.shape), space.dims, layout((config,), space, devices)
    if everywhere:
        cells = cells.everywhere()
    computed, owned = _boxes(cells.computed, dims, not rank), _boxes(cells.owned, dims[:rank], not rank)
    return Place(computed, owned, everywhere)


def _boxes(cells: LayoutCells, dims: Sequence[Dim], skip: int) -> Boxes:
    """The cells of the first configuration. skip: 1 for a scalar, which layouts count as one dimension."""
    index, active, numbers = cells.index[0, :, skip:], cells.active[0], cells.cuts[0, skip:].tolist()
    cuts = tuple(boundaries(d.extent, number, d.unit) for d, number in zip(dims, numbers, strict=True))
    lo, hi = np.zeros((2, len(active), len(dims)), np.int64)
    for i, ends in enumerate(cuts):
        lo[active, i], hi[active, i] = ends[index[active, i]], ends[index[active, i] + 1]
    return Boxes(lo, hi, active, cuts)


def data_parallel(layer: Layer, devices: int, weights: tuple[int, ...] = ()) -> Config:
    """Samples over all devices that can have one: the only configuration of an input and of the sink."""
    having = min(devices, layer.space.max_degree("n"))
    config = Config.of({"n": having})
    return config.weighted(fewer(weights, having)) if weights else config


def input_maps(layer: Layer, slot: int) -> tuple[Maps, bool]:
    """The maps to the box of input `slot`, and whether it depends on the owned box (epilogue)."""
    space = layer.space
    if slot < len(layer.specs):
        return space.needs[slot], space.epilogue_inputs[slot]
    parameter = space.parameters[layer.tied[slot - len(layer.specs)]]
    return parameter.maps, parameter.epilogue
