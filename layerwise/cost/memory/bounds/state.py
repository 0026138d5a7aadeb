"""Facts that the passes of a step share, for all configurations of every layer at once."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np

from layerwise.config import Config, distinct_cells
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.bounds.claims import Claim, ClaimedStorage, ClaimKind, Ledger
from layerwise.cost.memory.bounds.stacked import Stacked, Travel, inside, stacked
from layerwise.cost.memory.sizes import StageMemory, stages_of
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.ops.facts import Parameter
from layerwise.partition.ahead import EdgeEnd
from layerwise.partition.blocks import blocks, saved_within
from layerwise.partition.place import Boxes, input_maps
from layerwise.partition.sharding import shardings, states_of
from layerwise.program import StrategyFacts, program

WEIGHTS = -2  # instead of a slot: the copies of weights
ALWAYS = np.ones((1, 1))  # of an edge whose bytes follow from one of its ends only


@dataclass(slots=True, eq=False)
class StageResult:
    """The result of a stage, or a copy, of its layer alone."""

    storage: ClaimedStorage
    size: Floats  # (V, N) bytes
    working: list[Claim]  # while it is computed with
    held: Mask  # (V, N) where a stage of the layer itself keeps it for the backward pass


@dataclass(slots=True, eq=False)
class Received:
    """An input of a layer: what lies here already where the edge is local, else received."""

    edge: EdgeName
    there: list[tuple[ClaimedStorage, Floats]]  # the source's, with (V_u, N) bytes that the source does not keep itself
    leaf: ClaimedStorage  # what is received
    need: Floats  # (V_v, N) bytes
    working: list[Claim]
    held: Mask  # (V_v, N)
    kind: ClaimKind  # of the claims on what lies here
    behind: ClaimedStorage | None = None  # what was viewed first, where nobody but its readers keeps it


@dataclass(slots=True, eq=False)
class GradientClaims:
    """A gradient on its way: of a layer's output, of a stage's, or of an input."""

    storage: ClaimedStorage
    size: Floats  # (V, N) bytes that are surely alive, by configurations of the layer that has it
    claims: list[Claim]
    whole: bool = True  # whether its storage is as large as itself: a view's may be smaller
    partial: bool = False  # whether under some configurations it has not arrived


@dataclass
class StepClaims:
    """The state of a step, and its claims in `ledger`. All by the layer's name."""

    model: CostModel
    configs: Configs
    ledger: Ledger = field(default_factory=Ledger)
    at: dict[str, Stacked] = field(default_factory=dict)
    local: dict[EdgeName, Mask] = field(default_factory=dict)  # (C_u, C_v), by cells
    travels: dict[EdgeName, Travel] = field(default_factory=dict)  # of edges that may be not local
    alike: dict[object, tuple[Mask, Travel | None]] = field(default_factory=dict)  # of equal edges
    values: dict[str, StageResult | Received | None] = field(default_factory=dict)
    received: dict[str, dict[int, Received]] = field(default_factory=dict)
    saved: dict[str, list[list[Claim]]] = field(default_factory=dict)
    inward: dict[str, dict[int, GradientClaims]] = field(default_factory=dict)  # of inputs, by slot
    gradients: dict[str, GradientClaims] = field(default_factory=dict)  # of outputs, as far as they are added up
    flights: dict[EdgeEnd, GradientClaims] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph = self.model.graph
        self.flows = self.model.has_gradient
        self.users = {name: set(uses) for name, uses in graph.consumers().items()}
        self.parameters: dict[str, ParameterBounds] = {}
        self.rows: list[Claim] = []  # of gradients that are yet to be summed
        self.last: list[Claim] = []  # of the last layer's gathered parameters
        self.all_leave = all(self.flows[layer.name] for layer in graph.layers if layer.trains)  # none waits for others
        self.stages: dict[str, list[StageMemory]] = {}
        self.recomputed, self.blocks = self._recomputed()
        self.sources: dict[str, list[Claim]] = {}  # by block, what it is recomputed from
        self.remade: dict[str, StageResult | Received | None] = {}  # recomputed values
        self.within = saved_within(graph)
        self.moved: dict[str, tuple[Floats, Floats]] = {}  # bytes of outputs kept in what readers are given, and where
        self._begin()
        for layer in graph.layers:
            for slot, source in enumerate(layer.inputs):
                if layer.role is not Role.SINK or self.model.options.io == "sample":
                    self.local[source, layer.name, slot] = self._locality(layer, slot)
        self.program = program(graph, self.model.options.io, self._facts(), self.model.options.kind)

    def _facts(self) -> StrategyFacts:
        """All that may be under some configurations."""
        travels = {(name, slot) for (_, name, slot), local in self.local.items() if not local.all()}
        recomputed = {name for name, rows in self.recomputed.items() if rows.any()}
        return StrategyFacts(travels, recomputed, gathered=(), gradients=())

    def _recomputed(self) -> tuple[dict[str, Mask], dict[str, int]]:
        """The configurations that recompute a layer, (V, 1), and the number of its block, where any layer does."""
        rows = {name: np.array([[config.recompute] for config in configs]) for name, configs in self.configs.items()}
        of = blocks(self.model.graph) if any(row.any() for row in rows.values()) else {}
        return {name: row if name in of else np.zeros_like(row) for name, row in rows.items()}, of

    def _begin(self) -> None:
        """Parameters, states, places in buckets; and what arrives of parameters before the first layer computes."""
        coming, known = list[Claim](), dict[object, tuple[Stacked, ParameterBounds, list[StageMemory]]]()
        for layer in self.model.graph.layers:
            name, configs = layer.name, self.configs[layer.name]
            key = self.model.kind(layer), configs  # equal blocks are looked at once
            if key not in known:
                where = stacked(self.model, layer, configs)
                found = parameters(self.model, layer, where, configs)
                known[key] = where, found, [] if layer.end else self._stages(layer, where)
            self.at[name], found, stages = known[key]
            self.parameters[name] = found
            if not layer.end:
                self.stages[name] = stages
            self._new(name, found.always)
            coming += self._new(name, found.coming)
        if coming:
            self.ledger.instant("begin")
            self.ledger.drop(coming)

    def _stages(self, layer: Layer, where: Stacked) -> list[StageMemory]:
        """The stages with arrays (V, N)."""
        flows = self.model.graph.flows_back(layer)
        split = np.array([config["k"] > 1 for config in self.configs[layer.name]])[:, None]
        rows = []
        whole = stages_of(layer, where.place, flows, False)
        parts = stages_of(layer, where.place, flows, True) if split.any() else whole
        for stage, part in zip(whole, parts, strict=True):
            rows.append(
                replace(
                    stage,
                    made=where.table(stage.made),
                    extra=where.table(stage.extra),
                    forward=np.where(split, where.table(part.forward), where.table(stage.forward)),
                    between=np.where(split, where.table(part.between), where.table(stage.between)),
                    copies={slot: where.table(size) for slot, size in stage.copies.items()},
                    weights=where.table(stage.weights),
                    padded=where.table(stage.padded),
                )
            )
        return rows

    def _new(self, name: str, size: Floats) -> list[Claim]:
        """A storage of a layer alone."""
        return self.ledger.hold(self.ledger.storage(), name, "sure", size)

    def _of_edge(
        self, storage: ClaimedStorage, edge: EdgeName, source: Floats, target: Floats, *, local: bool
    ) -> list[Claim]:
        """Sure where the edge is local, or where it is not."""
        mask = self.local[edge]
        return self.ledger.hold(storage, edge, "sure", source, target, local) if (mask == local).any() else []

    def _own_bytes(self, name: str) -> Floats:
        where = self.at[name]
        return where.table(where.place.owned.volume * self.model.graph[name].out.item_bytes)

    def _need(self, layer: Layer, slot: int) -> Floats:
        """(V, N) bytes, as few as where it travels."""
        (maps, epilogue), x = input_maps(layer, slot), self.model.graph[layer.inputs[slot]].out
        where = self.at[layer.name]
        return where.table(where.place.at(epilogue).needs(maps).volume * x.item_bytes)

    def _locality(self, layer: Layer, slot: int) -> Mask:
        """(C_u, C_v) where nothing travels, by cells; else there is a `Travel`."""
        name = (layer.inputs[slot], layer.name, slot)
        edge = self.model.edge(name, *(distinct_cells(self.configs[end])[0] for end in name[:2]))
        key = (edge, self.at[name[0]].everywhere.tobytes(), self.at[name[1]].everywhere.tobytes())
        if key not in self.alike:
            self.alike[key] = self._travel(layer, slot)
        local, travel = self.alike[key]
        if travel is not None:
            self.travels[name] = travel
        return local

    def _travel(self, layer: Layer, slot: int) -> tuple[Mask, Travel | None]:
        source, target = self.at[layer.inputs[slot]], self.at[layer.name]
        maps, epilogue = input_maps(layer, slot)
        need = target.place.at(epilogue).needs(maps)
        local = inside(source.place.owned, need, (source.shape[0], target.shape[0])) | source.everywhere[:, None]
        item_bytes = self.model.graph[layer.inputs[slot]].out.item_bytes
        return local, None if local.all() else Travel(source, target, maps, epilogue, item_bytes, local)


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
