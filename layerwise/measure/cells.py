"""The cells to measure: every distinct cell that a layer has under any configuration, once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod

import numpy as np

from layerwise.config import Config
from layerwise.cost.compute.measured import extents, loss_name, signature, sizes, update_name
from layerwise.cost.compute.roofline import OPTIMIZERS, rooflines, update_roofline
from layerwise.cost.model import CostModel
from layerwise.graph.layer import Layer
from layerwise.machine.layer_times import Extents, Work
from layerwise.measure.bench import CellSpec, LossSpec, UpdateSpec
from layerwise.ops.base import Role
from layerwise.partition.largest import largest_cell, shared_statistics

Key = tuple[str, Extents]


@dataclass(frozen=True, slots=True)
class CellTask:
    """A cell whose time the planner needs."""

    name: str  # its key in `machine.layer_times`
    extents: Extents
    what: str  # for display
    spec: CellSpec | UpdateSpec | LossSpec
    predicted_s: float  # the assumed cost until it is measured
    bytes: float  # about its memory
    forward: Work
    backward: Work

    @property
    def key(self) -> Key:
        """Equal for cells of equal time."""
        return self.name, self.extents


def wanted_cells(model: CostModel, configs: Mapping[str, Sequence[Config]], kind: int = 0) -> dict[Key, CellTask]:
    """The cells that a kind of devices has of all these configurations of the layers of a network."""
    cells: dict[Key, CellTask] = {}
    for layer in model.graph.layers:
        for cell in layer_cells(model, layer, () if layer.end else configs[layer.name], kind):
            cells.setdefault(cell.key, cell)
    return cells


def layer_cells(model: CostModel, layer: Layer, configs: Sequence[Config], kind: int = 0) -> list[CellTask]:
    """The cells of a layer: its operator's, and its parameters' updates; of a network's end the loss."""

    def found() -> list[CellTask]:
        if layer.role is Role.SINK:
            return _losses(model, layer, kind)
        return [] if layer.end else [*_cells(model, layer, configs, kind), *_updates(model, layer, configs, kind)]

    return model.once(("cells", layer.name, tuple(configs), kind), found)


def _cells(model: CostModel, layer: Layer, configs: Sequence[Config], kind: int) -> list[CellTask]:
    if layer.role is Role.TIED or model.dtype(layer) != model.options.dtype:  # of another set of times
        return []
    layout, some = model.largest_of_kind(layer, model.layout(layer, configs), kind)
    cells, local = largest_cell(layer, layout), model.options.local_batch_norm
    flows = model.graph.flows_back(layer)
    uses = model.uses[layer.name]
    name, rows = signature(layer, flows, uses), extents(layer, layout, cells, local_batch_norm=local)
    both = rooflines(layer, layout, flows, model.devices.each_kind[kind].processor, model.options.dtype)
    predicted = model.node_cost(layer, tuple(configs)).of_kind(kind)
    statistics = iter(shared_statistics(layer, layout, local_batch_norm=local))
    columns = [
        np.zeros(len(rows), np.int64) if stage.statistics() is None else next(statistics) for stage in layer.stages
    ]
    rank = len(layer.out.shape)
    tasks: dict[Extents, CellTask] = {}
    for i, row in enumerate(rows):
        if row not in tasks and np.broadcast_to(some, len(rows))[i]:
            shared = tuple(bool(column[i]) for column in columns)
            spec = CellSpec(layer, cells.cell(i), cells.owned(i, rank), flows, shared, uses)
            forward, backward = (Work(*work.work[i].tolist()) for work in both)
            time = float(predicted.forward[i] + predicted.backward[i])
            held_bytes = _bytes(layer, row, len(layer.stages))
            tasks[row] = CellTask(name, row, layer.kinds, spec, time, held_bytes, forward, backward)
    return list(tasks.values())


def _bytes(layer: Layer, row: Extents, stages: int) -> float:
    """Bytes of inputs, parameters and the stages' results, and of their gradients, in the largest type."""
    dims, rank = len(layer.space.dims), max(1, len(layer.out.shape))
    shapes = [*(spec.shape for spec in layer.specs), *(p.shape for p in layer.space.parameters)]
    ends = np.cumsum([dims + rank, *map(len, shapes)]).tolist()
    total = prod(row[: min(rank, dims)]) * stages + sum(prod(row[a:b]) for a, b in pairwise(ends))
    return 3.0 * total * layer.out.item_bytes


def _updates(model: CostModel, layer: Layer, configs: Sequence[Config], kind: int) -> list[CellTask]:
    layout, some = model.largest_of_kind(layer, model.layout(layer, configs), kind)
    optimizer = model.options.optimizer
    work = update_roofline(layer, layout, model.devices.each_kind[kind].processor, optimizer)
    predicted = model.node_cost(layer, tuple(configs)).of_kind(kind).update
    tasks: dict[Extents, CellTask] = {}
    for i, row in enumerate(sizes(layer, largest_cell(layer, layout))):
        if row and row not in tasks and np.broadcast_to(some, len(configs))[i]:
            held_bytes = float(sum(row)) * layer.out.item_bytes * (3 + OPTIMIZERS[optimizer])
            name, spec, done = update_name(optimizer), UpdateSpec(optimizer, row), Work(*work.work[i].tolist())
            tasks[row] = CellTask(name, row, "update", spec, float(predicted[i]), held_bytes, done, Work())
    return list(tasks.values())


def _losses(model: CostModel, sink: Layer, kind: int) -> list[CellTask]:
    layout, _ = model.largest_of_kind(sink, model.layout(sink, (model.end_config(sink),)), kind)
    (row,) = extents(sink, layout, largest_cell(sink, layout), local_batch_norm=False)
    size = sum(float(spec.volume * spec.item_bytes) for spec in sink.specs)
    ends = np.cumsum([2, *(len(spec.shape) for spec in sink.specs)]).tolist()  # after the sink's own samples
    spec = LossSpec(tuple(row[a:b] for a, b in pairwise(ends)), tuple(spec.dtype for spec in sink.specs))
    return [CellTask(loss_name(sink), row, "loss", spec, 0.0, 4 * size, Work(), Work())]
