"""Parameters: what every device has of a layer's parameters and their gradients, under all its configurations."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from layerwise.config import Config
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.bounds.stacked import Stacked
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Parameter
from layerwise.partition.sharding import sharded, states_of


@dataclass(slots=True, eq=False)
class Parameters:
    """Of one layer; arrays are (C, N), in bytes. Words are those of `shares`."""

    always: Floats  # parameters, states, places in buckets
    gradients: Floats  # all, as the backward pass makes them
    alone: Floats  # of these, those that nobody shares, which stay
    gathered: Floats  # parameters that are whole while their layer computes only
    coming: Floats  # what arrives of those that are gathered for the whole step, before the step begins
    rows: Floats  # gradients that are summed for each device's part, where they stay until the backward pass has ended
    rows_gathered: Floats  # where they go sooner
    part: Floats  # a device's own part of those sums
    updated: list[Floats] = field(default_factory=list, kw_only=True)  # of each parameter that is trained


def parameters(model: CostModel, layer: Layer, where: Stacked, configs: tuple[Config, ...]) -> Parameters:
    """As `step` and `shares` have them."""
    found = Parameters(*np.zeros((8, *where.shape)))
    states = OPTIMIZERS[model.options.optimizer]
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
        found.rows_gathered += all_rows * sooner
        found.part += row
        found.updated.append(updated)
    return found


def _shares(
    model: CostModel, layer: Layer, p: Parameter, configs: tuple[Config, ...], item_bytes: int
) -> tuple[Mask, Floats, Floats, Floats]:
    """(C,) whether devices share it; then what each keeps, its row, and those of all members (see `shares.Share`)."""
    which = np.zeros(len(configs), np.bool_)
    kept, row, rows = np.zeros((3, len(configs), model.devices.count))
    for i, config in enumerate(configs):
        found = sharded(layer, p, config, model.devices.count)
        if found is not None:
            which[i], kept[i], row[i] = True, found.boxes.volume * item_bytes, found.rows * float(item_bytes)
            rows[i] = row[i] * found.members
    return which, kept, row, rows
