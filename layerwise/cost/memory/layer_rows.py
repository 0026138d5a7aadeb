"""LayerRows: what one layer adds to the rows of `memory.rows`, as bytes of device 0 under each of its V variants."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from layerwise.config import Config, distinct_cells
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.sizes import BEFORE, stages_of
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats, Ints, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.ops.facts import Dim, Parameter
from layerwise.partition.edge import boxes_on
from layerwise.partition.layout import LayoutCells
from layerwise.partition.place import Boxes, Place, input_maps
from layerwise.partition.sharding import shardings, states_of


class Read(NamedTuple):
    """An input of a layer; arrays are (V,)."""

    need: Floats  # bytes if it lies on this device already
    travels: Floats  # bytes if it is received, with its padding
    padded: Floats  # bytes of a padded copy, which is made if it lies on this device
    saves: Mask  # whether the backward pass reads it


class LayerRows:
    """A layer on device 0; arrays are (V,), in bytes."""

    place: Place  # boxes of the W watched devices under each of C cells, in row c * W + w
    everywhere: Mask  # (C,) whether every device has all that it needs
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
    reads: dict[int, Read]  # by slot, where the backward pass reads something

    def __init__(
        self, model: CostModel, layer: Layer, configs: tuple[Config, ...], watched: Ints, constants: tuple[int, ...]
    ) -> None:
        """watched: device 0, and other devices that tell whether an input is transferred. constants: the inputs that
        are constants of which it alone reads a box.
        """
        self.model, self.layer, self.configs, self.watched = model, layer, configs, watched
        self.dims = layer.space.dims  # of the iteration space
        self.cells, which = distinct_cells(configs)
        self.rows = np.array(which, np.int64)
        self.none, self.no = np.zeros(len(configs)), np.zeros(len(configs), np.bool_)
        self._set_place()
        self.own = self._first(self.place.owned.volume * layer.out.item_bytes)
        self.saved = self.held = self.gone = self.none
        self.steady = self.begin = self.after = self.end = self.update = self.none
        self.keeps, self.reads = self.no, {}
        if layer.role in (Role.CONSTANT, Role.INPUT) or layer.end:
            # A constant's box is its readers', and so is an input's with io boxes.
            if layer.role is Role.INPUT and model.options.io != "boxes":
                self.steady = self.own
            self.keeps = ~self.no
        else:
            gradients, gathered = self._set_parameters()
            if layer.role is Role.COMPUTE:
                self._set_stages(gradients, gathered)
        self.steady = sum((self._need(slot) for slot in constants), self.steady)

    def read(self, slot: int) -> Read:
        """An input's bytes; all are 0 if the backward pass does not read it."""
        return self.reads.get(slot, Read(self.none, self.none, self.none, self.no))

    def _first(self, sizes: Floats | Mask | float) -> Floats:
        """(V,) sizes on device 0, from sizes (C * W,) or one size for all."""
        count = len(self.watched)
        return np.broadcast_to(np.asarray(sizes, np.float64), len(self.cells) * count)[::count][self.rows]

    def needs(self, slot: int) -> Boxes:
        """The box of an input that each watched device needs, in the rows of `place`."""
        maps, epilogue = input_maps(self.layer, slot)
        return self.place.at(epilogue).needs(maps)

    def _need(self, slot: int) -> Floats:
        """The box of an input that the layer needs."""
        item_bytes = self.model.graph[self.layer.inputs[slot]].out.item_bytes
        return self._first(self.needs(slot).volume * item_bytes)

    def _set_place(self) -> None:
        """Sets the boxes of the watched devices, who has the full tensor, and the degrees."""
        layer, model, rank, count = self.layer, self.model, len(self.layer.out.shape), len(self.cells)
        if layer.role is Role.CONSTANT or (layer.end and model.options.io != "sample"):
            boxes = Boxes.whole(layer.out.shape, count * len(self.watched))
            self.place, self.everywhere = Place(boxes, boxes, everywhere=True), np.ones(count, np.bool_)
            self.computed = np.ones((count, len(self.dims)), np.int64)
            self.owned = self.computed[:, :rank]
            return
        layout, skip = model.layout(layer, self.cells), int(not rank)  # a scalar counts as one dimension there
        self.place = Place(
            self._boxes(layout.computed, self.dims, skip), self._boxes(layout.owned, self.dims[:rank], skip)
        )
        self.everywhere = np.array([layer.name in model.graph.unfed and config.total == 1 for config in self.cells])
        self.computed, self.owned = (these.cuts[:, skip:] for these in (layout.computed, layout.owned))

    def _boxes(self, cells: LayoutCells, dims: Sequence[Dim], skip: int) -> Boxes:
        """The boxes of the watched devices under each of C cells."""
        on = (cells.numbers(self.watched) >= 0).reshape(-1)
        sides = (side[..., skip:].reshape(len(on), len(dims)) for side in boxes_on(dims, cells, self.watched))
        lo, hi = (np.where(on[:, None], side, 0) for side in sides)
        return Boxes(lo, hi, on)

    # ---- what the layer saves, and what its backward pass allocates ----

    def _set_stages(self, gradients: Floats, gathered: Floats) -> None:
        model, layer, none, first = self.model, self.layer, self.none, self._first
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
                        need = self._need(slot)
                        _, travels, pads, saves = self.reads.get(slot, Read(need, need, none, self.no))
                        pads = np.maximum(pads, padded * (slot == 0))
                        self.reads[slot] = Read(need, np.maximum(travels, pads), pads, saves | where | (pads > 0))
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
                if slot in self.reads:
                    self.reads[slot] = self.reads[slot]._replace(saves=self.reads[slot].saves | where)

        def bytes_of(number: int) -> Floats:
            return sum((size[one] * where for one, where in (upto[number] if number >= 0 else {}).items()), none)

        self.saved = bytes_of(len(stages) - 1)
        if isinstance(out, int):
            self.keeps = upto[-1].get(out, self.keeps)
        tracked = [number for number, stage in enumerate(stages) if stage.tracked]
        most, gone, flows = none, none, model.has_gradient
        for number in tracked:
            stage, start = stages[number], number == tracked[0]
            between, run = first(stage.between - stage.padded), size[number]
            new = none
            if not stage.saved.through:
                if start:
                    new = sum((self._need(s) for s in stage.slots if flows[layer.inputs[s]]), none)
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
        self.held, self.gone = most + gathered, gone + gathered

    # ---- parameters ----

    def _set_parameters(self) -> tuple[Floats, Floats]:
        """Sets the bytes of parameters. Returns those of gradients, and of what is gathered for the layer alone."""
        model, layer, rows, first = self.model, self.layer, self.rows, self._first
        states, training = OPTIMIZERS[model.options.optimizer], model.options.kind == "training"
        spikes = model.options.optimizer == "adam" and model.devices.device_type != "cpu"
        gradients, gathered = np.zeros((2, len(rows)))
        for _, p, item_bytes in layer.held():
            size = first(self.place.holds(p).volume * item_bytes)
            may, kept, row, all_rows = self._shards(p, item_bytes)
            if not (p.trainable and training) and not may.any():
                self.steady = self.steady + size
                continue
            split = (may[rows] > 0) & np.array([config.states != "replicated" for config in self.configs])
            sooner = split & np.array([states_of(layer, config) == "gathered" for config in self.configs])
            stays, plain = split & ~sooner, ~split
            local, row, all_rows = np.where(split, kept[rows], size), row[rows] * split, all_rows[rows] * stays
            trained = training & (split | p.trainable)
            self.steady = self.steady + local + size * stays + trained * states * local
            alone = size * plain * trained
            self.after = self.after + alone + (all_rows + row * sooner) * training
            self.end = self.end + alone + (all_rows + row) * training
            self.update = self.update + alone + row * training + local * spikes * trained
            self.begin = self.begin + all_rows + row * stays
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
