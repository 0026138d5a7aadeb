"""Parameters: what every device has of a layer's parameters and their gradients, under all its configurations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from layerwise.config import Config, distinct_cells
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.bounds.stacked import Stacked
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.facts import Parameter
from layerwise.partition.place import Boxes
from layerwise.partition.sharding import shardings, states_of


@dataclass(slots=True, eq=False)
class ParameterBounds:
    """Memory of one layer's parameters; arrays are (V, N), in bytes. Words are those of `shares`."""

    always: Floats  # parameters, states, places in buckets
    gradients: Floats  # all, as the backward pass makes them
    alone: Floats  # of these, those that nobody shares, which stay
    gathered: Floats  # parameters that are whole while their layer computes only
    coming: Floats  # what arrives of those that are gathered for the whole step, before the step begins
    rows: Floats  # gradients that are summed for each device's part, where they stay until the backward pass has ended
    rows_last: Floats  # of those that are summed sooner, what stays at least until the next layer's have been made
    gradient_last: Floats  # of the last parameter of these, which lasts until the sum of all has begun
    part: Floats  # a device's own part of those sums, which stays
    part_gathered: Floats  # of that, what is there as soon as its layer's gradients are summed
    updated: list[Floats] = field(default_factory=list, kw_only=True)  # of each parameter that is trained


def parameters(model: CostModel, layer: Layer, where: Stacked, configs: tuple[Config, ...]) -> ParameterBounds:
    """The memory of a layer's parameters on every device, as `step` and `cost.memory.parameters` have it."""
    found = ParameterBounds(*np.zeros((10, *where.full)))
    states, last = OPTIMIZERS[model.options.optimizer], _Last(where)
    for _, p, item_bytes in layer.held():
        boxes = where.place.holds(p)
        size = where.table(boxes.volume * item_bytes)
        if not p.trainable:
            found.always += size
            continue
        which, kept, row, all_rows = _shares(model, layer, p, configs, item_bytes)
        plain = ~which[:, None]
        shared = where.shared(boxes) & plain
        sooner = ~plain & np.array([states_of(layer, config) == "gathered" for config in configs])[:, None]
        stays = ~plain & ~sooner
        updated = np.where(plain, size, kept)
        found.always += (1 + states) * updated + size * (shared | stays)
        found.gradients += size
        found.alone += size * (plain & ~shared)
        found.gathered += size * sooner
        found.coming += (all_rows + row) * stays
        found.rows += all_rows * stays
        found.gradient_last = np.where(sooner, size, found.gradient_last)
        found.part += row
        found.part_gathered += row * sooner
        last.add(boxes, all_rows * sooner, sooner)
        found.updated.append(updated)
    found.rows_last += last.least()
    return found


class _Last:
    """The last bucket of a layer's gathered parameters: of all of them where all have the same groups, else of some."""

    def __init__(self, where: Stacked) -> None:
        self.where, self.groups = where, np.zeros((0, 0), np.int64)
        self.alike = np.ones((where.full[0], 1), np.bool_)
        self.all, self.any = np.zeros(where.full), np.full(where.full, np.inf)

    def add(self, boxes: Boxes, rows: Floats, gathered: Mask) -> None:
        """One more parameter. rows: (V, N) bytes; gathered: (V, 1)."""
        if gathered.any():
            groups = self.where.groups(boxes)
            if not self.groups.size:
                self.groups = groups
            self.alike &= ~gathered | (groups == self.groups).all(1, keepdims=True)
            self.all += rows
            self.any = np.where(gathered, np.minimum(self.any, rows), self.any)

    def least(self) -> Floats:
        """(V, N) bytes of it."""
        some: Floats = np.where(self.alike, self.all, np.where(np.isfinite(self.any), self.any, 0.0))
        return some


def _shares(
    model: CostModel, layer: Layer, p: Parameter, configs: tuple[Config, ...], item_bytes: int
) -> tuple[Mask, Floats, Floats, Floats]:
    """(V,) whether devices share it; then what each keeps, its row, and those of all members (see `Share`)."""
    cells, which = distinct_cells(configs)
    may = np.zeros(len(cells), np.bool_)
    kept, row, rows = np.zeros((3, len(cells), model.devices.count))
    wanted = np.array([config.states != "replicated" for config in configs])
    each = (
        shardings(layer, p, cells, model.devices.count, unfed=layer.name in model.graph.unfed) if wanted.any() else []
    )
    for i, found in enumerate(each):
        if found is not None:
            may[i], kept[i], row[i] = True, found.boxes.volume * item_bytes, found.rows * float(item_bytes)
            rows[i] = row[i] * found.members
    shared: Mask = may[which] & wanted
    kept, row, rows = (array[which] * shared[:, None] for array in (kept, row, rows))
    return shared, kept, row, rows
