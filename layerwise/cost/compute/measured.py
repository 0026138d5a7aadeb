"""t_C from measurements: the cell's own time if it was measured, else the fit, else the analytic roofline.

The fit: one direction of a cell takes a·kernels + b·arithmetic + c·memory, the roofline's own terms, with the factors
of at least 0 that minimize relative errors (non-negative least squares, Lawson and Hanson 1974: with three terms all 7
subsets are tried). Factors are those of the same operator if enough of its cells were measured, else of its kind, else
of all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import chain, combinations
from statistics import median

import numpy as np

from layerwise.cost.compute.roofline import ComputeTime, Roofline, rooflines, update_roofline
from layerwise.geometry import needed
from layerwise.geometry.arrays import Floats, Ints
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import Processor
from layerwise.machine.layer_times import CellTime, Extents, LayerTimes, Work
from layerwise.ops.base import Role
from layerwise.ops.facts import Maps
from layerwise.partition.largest import LargestCell, largest_cell, shared_statistics
from layerwise.partition.layout import Layout
from layerwise.program import StepKind

ENOUGH = 4  # cells for three factors
FOLDS = 5
SUBSETS = [list(s) for s in chain.from_iterable(combinations(range(3), n) for n in (1, 2, 3))]
Rows = list[tuple[Work, float]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors (3,) of kernels, arithmetic and memory, by group and direction: 0 forward, 1 backward."""

    factors: Mapping[tuple[str, int], Floats]

    def __call__(self, operator: str, direction: int, work: Floats) -> Floats | None:
        """(C,) seconds for `work` (C, 3); None if nothing comparable was measured."""
        for group in groups(operator):
            if (group, direction) in self.factors:
                time: Floats = work @ self.factors[group, direction]
                return time
        return None


@lru_cache(maxsize=65536)
def groups(operator: str) -> tuple[str, ...]:
    """Groups whose cells take similar times, most similar first: the operator itself, its kind, all."""
    if not operator.startswith("{"):  # updates, and a step's overhead beside layers: similar to nothing else
        return (operator,)
    named = json.loads(operator)
    kinds = [named["op"], *(row[0] for row in named.get("followers", ()))]
    return operator, "+".join(str(row.get("fn") or row["kind"]) for row in kinds), str(kinds[0]["kind"]), "all"


def fitted(cells: Mapping[str, Mapping[Extents, CellTime]]) -> Fit:
    """The factors that fit these cells."""
    return _fitted((name, time) for name, times in cells.items() for time in times.values())


def held_out_error(times: LayerTimes) -> float | None:
    """The median relative error, over both directions, of cells that were left out of the fit, a fifth at a time.

    None if fewer than 10 cells of layers were measured.
    """
    rows = [(name, time) for name, by_cell in times.cells.items() if name[0] == "{" for time in by_cell.values()]
    errors = []
    for fold in range(FOLDS if len(rows) >= 2 * FOLDS else 0):
        fit = _fitted(row for i, row in enumerate(rows) if i % FOLDS != fold)
        for name, time in rows[fold::FOLDS]:
            both = [fit(name, i, _row(work)) for i, work in enumerate((time.forward, time.backward))]
            real = time.forward_s + time.backward_s
            if real > 0:
                errors.append(abs(sum(float(t[0]) for t in both if t is not None) / real - 1))
    return median(errors) if errors else None


def _fitted(rows: Iterable[tuple[str, CellTime]]) -> Fit:
    samples: dict[tuple[str, int], Rows] = defaultdict(list)
    for name, time in rows:
        for direction, (work, seconds) in enumerate(((time.forward, time.forward_s), (time.backward, time.backward_s))):
            if seconds > 0:
                for group in groups(name):
                    samples[group, direction].append((work, seconds))
    return Fit({key: _factors(rows_here) for key, rows_here in samples.items() if len(rows_here) >= ENOUGH})


def _factors(rows: Sequence[tuple[Work, float]]) -> Floats:
    """The non-negative factors with the least sum of squared relative errors."""
    a = np.concatenate([_row(work) for work, _ in rows]) / np.array([[seconds] for _, seconds in rows])
    best, least = np.zeros(3), np.inf
    for subset in SUBSETS:
        factors, *_ = np.linalg.lstsq(a[:, subset], np.ones(len(a)), rcond=None)
        error = float(np.square(a[:, subset] @ factors - 1).sum())
        if (factors >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[subset] = factors
    return best


def _row(work: Work) -> Floats:
    return np.array([[work.kernels, work.arithmetic_s, work.memory_s]])


LAYER = "runtime layer"  # the runtime's overhead for any layer
COPY = "runtime copy"  # of the part of a tensor that a rank keeps when the tensor is transferred; extents: its bytes
NONE = CellTime(0.0, 0.0, 0.0, 0)


def update_name(optimizer: str) -> str:
    """The operator that updates parameters; its extents are the elements of each tensor."""
    return f"update by {optimizer}"


def step_name(optimizer: str) -> str:
    """The name of the runtime's overhead for any step, beside its layers; its extents are ()."""
    return f"runtime step {optimizer}"


def loss_name(layer: Layer) -> str:
    """The name of the time of the loss and its gradient; its extents are the shapes of the network's outputs."""
    return "loss of " + ", ".join(f"{spec.dtype} of rank {len(spec.shape)}" for spec in layer.specs)


@dataclass(frozen=True)
class Measurements:
    """One set of measured times, for one machine, optimizer and kind of statistics."""

    times: LayerTimes
    processor: Processor
    dtype: str
    optimizer: str
    local_batch_norm: bool
    kind: StepKind = "training"

    @cached_property
    def fit(self) -> Fit:
        """The fit, computed when it is first needed."""
        return fitted(self.times.cells)

    def compute_time(self, layer: Layer, layout: Layout, wanted: Sequence[bool], uses: int) -> ComputeTime:
        """t_C of every configuration of a layer. uses: how many gradients of its output are added up."""
        cell, count = largest_cell(layer, layout), len(layout.computed.degrees)
        roofline = update_roofline(layer, layout, self.processor, self.optimizer)
        (update,) = self._looked_up(update_name(self.optimizer), sizes(layer, cell), (roofline,))
        if layer.role is Role.TIED:
            return _time(np.zeros((count, 3)), np.zeros((count, 3)), update * (self.kind == "training"))
        name = signature(layer, wanted, uses)
        rows = extents(layer, layout, cell, local_batch_norm=self.local_batch_norm)
        forward, backward = self._looked_up(name, rows, rooflines(layer, layout, wanted, self.processor, self.dtype))
        if self.kind == "inference":
            backward = update = np.zeros_like(forward)
        return _time(forward, backward, update)

    def sink_time(self, layer: Layer, layout: Layout) -> ComputeTime:
        """A step's time beside its layers: the loss and the runtime's overhead; 0 if they were not measured."""
        rows = extents(layer, layout, largest_cell(layer, layout), local_batch_norm=False)
        training = self.kind == "training"
        cells_known = self.times.cells.get(loss_name(layer), {}) if training else {}
        losses = [cells_known.get(row, NONE) for row in rows]
        step = self.times.cells.get(step_name(self.optimizer), {}).get((), NONE)
        forward = np.array([time.forward_s + step.forward_s for time in losses])
        backward = np.array([time.backward_s + step.backward_s for time in losses]) * training
        zeros = np.zeros(len(rows))
        return ComputeTime(forward, backward, zeros, forward + backward, zeros)

    @property
    def copy_s(self) -> tuple[float, float]:
        """Seconds a byte of a tensor's own part, if some of the tensor is transferred: forward, and
        for its gradient.
        """
        times = self.times.cells.get(COPY, {})
        rows = ((extents[0], time) for extents, time in times.items() if extents and extents[0] > 0)
        return next(((time.forward_s / size, time.backward_s / size) for size, time in rows), (0.0, 0.0))

    def _looked_up(self, name: str, rows: Sequence[Extents], works: Sequence[Roofline]) -> list[Floats]:
        """Seconds by direction, (C, 3): measured, fitted and analytic; two of them are 0."""
        known = self.times.cells.get(name, {})
        known_times = [known.get(row) for row in rows]
        missing = np.array([time is None for time in known_times])
        extra = self.times.cells.get(LAYER, {}).get((), NONE) if len(works) == 2 else NONE
        result = []
        for direction, work in enumerate(works):
            parts = np.zeros((len(rows), 3))
            beside = (extra.forward_s, extra.backward_s)[direction]
            active = work.kernels > 0
            parts[:, 0] = [0.0 if t is None else (t.forward_s, t.backward_s)[direction] for t in known_times]
            parts[~missing, 0] += beside
            if missing.any():
                predicted = self.fit(name, direction, work.work) if active.any() else None
                if predicted is not None:
                    parts[:, 1] = np.where(missing & active, predicted + beside, 0.0)
                else:
                    parts[:, 2] = np.where(missing, work.seconds if len(works) == 2 else work.memory_s, 0.0)
            result.append(parts)
        return result


def _time(forward: Floats, backward: Floats, update: Floats) -> ComputeTime:
    whole = forward + backward + update
    return ComputeTime(forward.sum(1), backward.sum(1), update.sum(1), whole[:, 0], whole[:, 1])


def latest(sets: Sequence[LayerTimes], dtype: str) -> LayerTimes | None:
    """The latest of a profile's sets of times for `dtype`, or None."""
    return next((one for one in reversed(sets) if one.conditions.dtype == dtype), None)


def signature(layer: Layer, wanted: Sequence[bool], uses: int) -> str:
    """Identifies a layer's work apart from sizes: its operators, its inputs' types and the gradients it computes.

    wanted: whether each input needs a gradient; uses: how many gradients of its output are added up.
    """
    chains = (chain for stage in layer.stages for chain in stage.views if chain)
    named = {
        "op": layer.main.rows(),
        "views": [[view.kind for view in chain] for chain in chains],
        "followers": [[stage.op.rows(), stage.slot, len(stage.views)] for stage in layer.stages[1:]],
        "inputs": [spec.dtype for spec in layer.specs],
        "gradients": [int(w) for w in wanted],
        "uses": uses,
        "frozen": [i for i, name in enumerate(layer.parameters) if name in layer.frozen],
    }
    usual = {"views": [], "followers": [], "uses": 1, "frozen": []}
    return json.dumps({k: v for k, v in named.items() if usual.get(k) != v}, default=str, separators=(",", ":"))


def extents(layer: Layer, layout: Layout, cell: LargestCell, *, local_batch_norm: bool) -> list[tuple[int, ...]]:
    """Every configuration's shapes: the cell, what it owns, its inputs and parameters; and whether statistics are
    shared.
    """
    columns = [cell.hi - cell.lo, cell.own_hi - cell.own_lo]
    space = layer.space
    needs = [(maps, epilogue) for maps, epilogue in zip(space.needs, space.epilogue_inputs, strict=True)]
    for maps, epilogue in [*needs, *((p.maps, p.epilogue) for p in space.parameters)]:
        columns.append(_lengths(maps, *cell.bounds(epilogue)))
    shared = [s[:, None] for s in shared_statistics(layer, layout, local_batch_norm=local_batch_norm)]
    rows: list[list[int]] = np.concatenate([*columns, *shared], axis=1).tolist()
    return [tuple(row) for row in rows]


def sizes(layer: Layer, cell: LargestCell) -> list[tuple[int, ...]]:
    """For every configuration, the elements of each parameter that the cell's device updates (not tied ones)."""
    rows = [_lengths(p.maps, *cell.bounds(p.epilogue)).prod(1) for _, p in layer.own_parameters() if p.trainable]
    return [tuple(row) for row in np.stack(rows, axis=1).tolist()] if rows else [()] * len(cell.lo)


def gradient_uses(graph: LayerGraph) -> dict[str, int]:
    """The number of gradients of each layer's output that are added up."""
    flows, sink = graph.has_gradient, graph.layers[-1].name
    result = dict.fromkeys(graph.by_name, 0)
    for source, target, _ in graph.edges():
        result[source] += flows[source] and (flows[target] or target == sink)
    return result


def _lengths(maps: Maps, lo: Ints, hi: Ints) -> Ints:
    """(C, dimensions of the tensor) extents that boxes need."""
    first, last = needed(maps, lo, hi)
    return last - first
