"""LayerRows: what one layer adds to the rows of `memory.rows`, as bytes of device 0 under each of its V variants."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from layerwise.config import Config, distinct_cells
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.sizes import BEFORE, stages_of
from layerwise.cost.model import CostModel
from layerwise.geometry import boundaries
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.ops.facts import Dim, Parameter
from layerwise.partition.layout import LayoutCells
from layerwise.partition.place import Boxes, Place, input_maps
from layerwise.partition.sharding import shardings, states_of


class Read(NamedTuple):
    """An input of a layer; arrays are (V,)."""

    need: Floats  # bytes if it lies on this device already
    travels: Floats  # bytes if it is received, with its padding
    padded: Floats  # bytes of a padded copy, which is made if it lies on this device
    saves: Mask  # whether the backward pass reads it


@dataclass(slots=True)
class LayerRows:
    """A layer on device 0; arrays are (V,), in bytes."""

    place: Place  # boxes of the W watched devices under each of C cells, in row c * W + w
    everywhere: Mask  # (C,) whether every device has all that it needs
    dims: tuple[Dim, ...]  # of the iteration space
    computed: Ints  # (C, D) the degree of each dimension when it is computed
    owned: Ints  # (C, R) the degree of each dimension of the output
    rows: Ints  # (V,) the index of each variant's cells
    own: Floats  # the output
    saved: Floats  # what the layer allocates and its backward pass reads
    keeps: Mask  # whether the output is part of `saved`
    held: Floats  # the peak of its own storages in its backward pass, as long as its inputs are held
    gone: Floats  # the same at any time of its backward pass
    # Of parameters, their gradients and states:
    steady: Floats  # held throughout the step
    begin: Floats  # while sharded parameters are gathered for the step
    after: Floats  # from the layer's backward pass on
    end: Floats  # at the end of the backward pass
    update: Floats  # while the optimizer steps
    reads: dict[int, Read] = field(default_factory=dict)  # by slot

    def read(self, slot: int) -> Read:
        """An input's bytes; all are 0 if the backward pass does not read it."""
        none = np.zeros(len(self.own))
        return self.reads.get(slot, Read(none, none, none, np.zeros(len(none), np.bool_)))


def layer_rows(
    model: CostModel, layer: Layer, configs: tuple[Config, ...], watched: Ints, constants: tuple[int, ...]
) -> LayerRows:
    """A layer's rows. watched: device 0, and other devices that tell whether an input is transferred. constants: the
    inputs that are constants of which it alone reads a box.
    """
    maker = _Maker(model, layer, configs, watched)
    made = maker.made()
    made.steady = sum((maker.need(slot) for slot in constants), made.steady)
    return made


class _Maker:
    """Computes the rows of one layer."""

    def __init__(self, model: CostModel, layer: Layer, configs: tuple[Config, ...], watched: Ints) -> None:
        self.model, self.layer, self.configs, self.watched = model, layer, configs, watched
        self.cells, which = distinct_cells(configs)
        self.rows = np.array(which, np.int64)
        self.none = np.zeros(len(configs))
        self.no = np.zeros(len(configs), np.bool_)
        self.place, self.everywhere, self.degrees = self._place()

    def first(self, sizes: Floats | Mask | float) -> Floats:
        """(V,) sizes on device 0, from sizes (C * W,) or one size for all."""
        count = len(self.watched)
        return np.broadcast_to(np.asarray(sizes, np.float64), len(self.cells) * count)[::count][self.rows]

    def made(self) -> LayerRows:
        """The layer's rows."""
        layer, none, io = self.layer, self.none, self.model.options.io
        own = self.first(self.place.owned.volume * layer.out.item_bytes)
        found = LayerRows(
            self.place, self.everywhere, layer.space.dims, *self.degrees, self.rows,
            own, none, self.no, none, none, none, none, none, none, none,
        )  # fmt: skip
        if layer.role in (Role.CONSTANT, Role.INPUT) or layer.end:
            # A constant's box is its readers'.
            if not (layer.role is Role.INPUT and io == "boxes") and layer.role not in (Role.SINK, Role.CONSTANT):
                found.steady = own
            found.keeps = ~self.no
            return found
        gradients, gathered = self._parameters(found)
        if layer.role is Role.COMPUTE:
            self._stages(found, gradients, gathered)
        return found

    def _place(self) -> tuple[Place, Mask, tuple[Ints, Ints]]:
        """The boxes of the watched devices, (C,) whether every device has the full tensor, and the degrees."""
        layer, model, rank = self.layer, self.model, len(self.layer.out.shape)
        count, dims = len(self.watched), layer.space.dims
        if layer.role is Role.CONSTANT or (layer.end and model.options.io != "sample"):
            boxes, ones = Boxes.whole(layer.out.shape, len(self.cells) * count), np.ones((len(self.cells), len(dims)))
            degrees = ones.astype(np.int64)
            return Place(boxes, boxes, everywhere=True), np.ones(len(self.cells), bool), (degrees, degrees[:, :rank])
        layout = model.layout(layer, self.cells)
        place = Place(
            _boxes(layout.computed, dims, self.watched, not rank),
            _boxes(layout.owned, dims[:rank], self.watched, not rank),
        )
        uncut = np.array([layer.name in model.graph.unfed and config.total == 1 for config in self.cells])
        computed, owned = (these.cuts[:, int(not rank) :] for these in (layout.computed, layout.owned))
        return place, uncut, (computed, owned)

    # ---- what the layer saves, and what its backward pass allocates ----

    def _stages(self, found: LayerRows, gradients: Floats, gathered: Floats) -> None:
        model, layer, none, first = self.model, self.layer, self.none, self.first
        stages = stages_of(layer, self.place, model.graph.flows_back(layer), False)
        size: dict[object, Floats] = {}  # bytes of the layer's own storages
        upto: list[dict[object, Mask]] = []  # by stage: what it and those before it hold, under which variants
        out: object = None
        for number, stage in enumerate(stages):
            held = dict(upto[-1]) if upto else {}
            before, out = out, (("given", stage.slots[0]) if not number else out) if stage.view else number
            size.setdefault(number, first(stage.made))
            if stage.tracked and model.has_gradient[layer.name]:
                where = first(np.asarray(stage.saved.inputs, np.float64)) > 0
                size[number, "extra"] = first(stage.extra - stage.padded) + first(stage.weights)
                held[number, "extra"] = ~self.no
                padded = first(stage.padded)
                for slot in stage.slots:
                    if slot not in stage.copies:
                        need, travels, pads, saves = found.reads.get(slot) or self._need(slot)
                        pads = np.maximum(pads, padded * (slot == 0))
                        found.reads[slot] = Read(need, np.maximum(travels, pads), pads, saves | where | (pads > 0))
                for slot, copied in stage.copies.items():
                    size[number, slot], held[number, slot] = first(copied), where
                if number and BEFORE not in stage.copies and before is not None:
                    held[before] = held.get(before, self.no) | where
                if stage.saved.output:
                    held[out] = ~self.no
            upto.append(held)
        for held in upto:
            for storage in [one for one in held if isinstance(one, tuple) and one[0] == "given"]:
                slot, where = int(storage[1]), held.pop(storage)
                if slot in found.reads:
                    found.reads[slot] = found.reads[slot]._replace(saves=found.reads[slot].saves | where)

        def bytes_of(number: int) -> Floats:
            return sum((size[one] * where for one, where in (upto[number] if number >= 0 else {}).items()), none)

        found.saved = bytes_of(len(stages) - 1)
        if isinstance(out, int):
            found.keeps = upto[-1].get(out, found.keeps)
        tracked = [number for number, stage in enumerate(stages) if stage.tracked]
        most, gone, flows = none, none, model.has_gradient
        for number in tracked:
            stage, start = stages[number], number == tracked[0]
            between, run = first(stage.between - stage.padded), size[number]
            new = none
            if not stage.saved.through:
                if start:
                    new = sum((self._need(s).need for s in stage.slots if flows[layer.inputs[s]]), none)
                elif stage.running:
                    new = size[number - 1]
            new = new + (gradients if start else none)
            both = bytes_of(number) + run + between
            # If the input lies on this device, the gradient of its padded copy comes before the input's own.
            padded = first(stage.padded)
            with_ = np.where(between > 0, both, both + np.where(padded > 0, np.minimum(new, padded), new))
            then = np.where(between > 0, bytes_of(number - 1) + between + new, 0)
            most, gone = np.maximum(most, with_), np.maximum(gone, np.maximum(with_, then))
            most = most if start else np.maximum(most, then)
        found.held, found.gone = most + gathered, gone + gathered

    def _need(self, slot: int) -> Read:
        """An input of which nothing is saved yet."""
        need = self.need(slot)
        return Read(need, need, self.none, self.no)

    def need(self, slot: int) -> Floats:
        """(V,) bytes of the box of an input that the layer needs."""
        maps, epilogue = input_maps(self.layer, slot)
        item_bytes = self.model.graph[self.layer.inputs[slot]].out.item_bytes
        return self.first(self.place.at(epilogue).needs(maps).volume * item_bytes)

    # ---- parameters ----

    def _parameters(self, found: LayerRows) -> tuple[Floats, Floats]:
        """Sets the bytes of parameters. Returns those of gradients, and of what is gathered for the layer alone."""
        model, layer, rows, first = self.model, self.layer, self.rows, self.first
        states, training = OPTIMIZERS[model.options.optimizer], model.options.kind == "training"
        spikes = model.options.optimizer == "adam" and model.devices.device_type != "cpu"
        gradients, gathered = np.zeros((2, len(rows)))
        for _, p, item_bytes in layer.held():
            size = first(self.place.holds(p).volume * item_bytes)
            may, kept, row, all_rows = self._shards(p, item_bytes)
            if not (p.trainable and training) and not may.any():
                found.steady = found.steady + size
                continue
            split = (may[rows] > 0) & np.array([config.states != "replicated" for config in self.configs])
            sooner = split & np.array([states_of(layer, config) == "gathered" for config in self.configs])
            stays, plain = split & ~sooner, ~split
            local, row, all_rows = np.where(split, kept[rows], size), row[rows] * split, all_rows[rows] * stays
            trained = training & (split | p.trainable)
            found.steady = found.steady + local + size * stays + trained * states * local
            alone = size * plain * trained
            found.after = found.after + alone + (all_rows + row * sooner) * training
            found.end = found.end + alone + (all_rows + row) * training
            found.update = found.update + alone + row * training + local * spikes * trained
            found.begin = found.begin + all_rows + row * stays
            gradients, gathered = gradients + (size + all_rows * training) * trained, gathered + size * sooner
        return gradients, gathered

    def _shards(self, p: Parameter, item_bytes: int) -> tuple[Floats, Floats, Floats, Floats]:
        """(C,) whether a parameter can be sharded; then bytes: a device's shard, the same as sent, and all shards."""
        found = np.zeros((4, len(self.cells)))
        if any(config.states != "replicated" for config in self.configs):
            unfed = self.layer.name in self.model.graph.unfed
            each = shardings(self.layer, p, self.cells, self.model.devices.count, unfed=unfed)
            for i, one in enumerate(each):
                if one is not None:
                    row = one.rows[0] * item_bytes
                    found[:, i] = 1, one.boxes.volume[0] * item_bytes, row, row * one.members
        may, kept, row, all_rows = found
        return may, kept, row, all_rows


def _boxes(cells: LayoutCells, dims: Sequence[Dim], devices: Ints, skip: int) -> Boxes:
    """The boxes of some devices under each of C cells. skip: 1 for a scalar, which layouts count as one dimension."""
    index, active = cells.at(devices), cells.numbers(devices) >= 0
    lo, hi = (np.zeros((*index.shape[:2], len(dims)), np.int64) for _ in range(2))
    for i, dim in enumerate(dims):
        column = cells.cuts[:, skip + i]
        for degree in np.unique(column).tolist():
            cuts, rows = boundaries(dim.extent, degree, dim.unit), column == degree
            here = np.maximum(index[rows, :, skip + i], 0)
            lo[rows, :, i], hi[rows, :, i] = cuts[here], cuts[here + 1]
    on = active.reshape(-1)
    lo, hi = (np.where(on[:, None], side.reshape(len(on), len(dims)), 0) for side in (lo, hi))
    return Boxes(lo, hi, on)
