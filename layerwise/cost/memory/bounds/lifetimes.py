"""Lifetimes: a step followed for all configurations at once, as `step` follows it for one strategy.

What `step` does on N devices is done on C*N; what depends on the configurations of two layers is a claim of an edge.
Where more than two layers decide, or the order of what travels does, less is claimed than `step` counts, never more
(tests/cost/test_bounds.py).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from layerwise.cost.memory.bounds.claims import Claim, Kind, Ledger, Storage
from layerwise.cost.memory.bounds.loss import Scored, scored
from layerwise.cost.memory.bounds.parameters import Parameters, parameters
from layerwise.cost.memory.bounds.stacked import Stacked, inside, stacked
from layerwise.cost.memory.bounds.travels import Part, Travel
from layerwise.cost.memory.kernels import BEFORE, StageMemory, stages_of
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.partition.ahead import EdgeEnd, begun_before, weights_late
from layerwise.partition.blocks import blocks
from layerwise.partition.place import input_maps
from layerwise.tensor import ITEM_BYTES

WEIGHTS = -2  # instead of a slot: the copies of weights
ALWAYS = np.ones((1, 1))  # of an edge whose bytes follow from one of its ends only


@dataclass(slots=True, eq=False)
class Made:
    """The result of a stage, or a copy, of its layer alone."""

    storage: Storage
    size: Floats  # (C, N) bytes
    working: list[Claim]  # while it is computed with
    held: Mask  # (C, N) where a stage of the layer itself keeps it for the backward pass


@dataclass(slots=True, eq=False)
class Given:
    """An input of a layer: what lies here already where the edge is local, else received."""

    edge: EdgeName
    there: list[tuple[Storage, Floats]]  # the source's, with (C_u, N) bytes that the source does not keep itself
    leaf: Storage  # what is received
    need: Floats  # (C_v, N) bytes
    working: list[Claim]
    held: Mask  # (C_v, N)
    kind: Kind  # of the claims on what lies here


@dataclass(slots=True, eq=False)
class Gradient:
    """A gradient on its way: of a layer's output, of a stage's, or of an input."""

    storage: Storage
    size: Floats  # (C, N) bytes that are surely alive, by configurations of the layer that has it
    claims: list[Claim]
    whole: bool = True  # whether its storage is as large as itself: a view's may be smaller
    partial: bool = False  # whether under some configurations it has not arrived


@dataclass
class Lifetimes:
    """The claims of a step, in `ledger`. All by the layer's name."""

    model: CostModel
    configs: Configs
    ledger: Ledger = field(default_factory=Ledger)
    at: dict[str, Stacked] = field(default_factory=dict)
    local: dict[EdgeName, Mask] = field(default_factory=dict)  # (C_u, C_v)
    travels: dict[EdgeName, Travel] = field(default_factory=dict)  # of edges that may be not local
    alike: dict[object, tuple[Mask, Travel | None]] = field(default_factory=dict)  # of equal edges
    values: dict[str, Made | Given | None] = field(default_factory=dict)
    saved: dict[str, list[list[Claim]]] = field(default_factory=dict)
    gradients: dict[str, Gradient] = field(default_factory=dict)
    flights: dict[EdgeEnd, Gradient] = field(default_factory=dict)

    def __post_init__(self) -> None:
        graph, options = self.model.graph, self.model.options
        self.flows = self.model.has_gradient
        self.begun = begun_before(graph, options.io)
        self.ahead = {end for begun in self.begun.values() for end in begun}
        self.parameters: dict[str, Parameters] = {}
        self.waiting: list[Claim] = []  # of what the gradient of weights is made of, while it is yet to be made
        self.rows: list[Claim] = []  # of gradients that are yet to be summed
        self.stages: dict[str, list[StageMemory]] = {}
        self.recomputed, self.blocks = self._recomputed()
        self.kept: dict[int, list[Claim]] = {}  # by block, what it is made again of
        self.again: dict[str, Made | Given | None] = {}  # values that are made again
        self._begin()
        for layer in graph.inner:
            self.stages[layer.name] = self._stages(layer)
        last = {source: i for i, layer in enumerate(graph.layers) for source in layer.inputs}
        for i, layer in enumerate(graph.layers):
            self._forward(layer)
            for source in dict.fromkeys(layer.inputs):
                value = self.values.get(source)
                if last[source] == i and value is not None:
                    self.ledger.drop(value.working)
        for layer in reversed(graph.layers):
            self._make_again(layer)
            self._backward(layer)
        self._update()

    # ---- what all have ----

    def _recomputed(self) -> tuple[dict[str, Mask], dict[str, int]]:
        """Which configurations recompute a layer, (C, 1), and the number of its block, where any layer does."""
        rows = {name: np.array([[config.recompute] for config in configs]) for name, configs in self.configs.items()}
        of = blocks(self.model.graph) if any(row.any() for row in rows.values()) else {}
        return {name: row if name in of else np.zeros_like(row) for name, row in rows.items()}, of

    def _begin(self) -> None:
        """Parameters, states, places in buckets; and what arrives of parameters before the first layer computes."""
        coming = list[Claim]()
        for layer in self.model.graph.layers:
            name = layer.name
            where = self.at[name] = stacked(self.model, layer, self.configs[name])
            found = self.parameters[name] = parameters(self.model, layer, where, self.configs[name])
            self._new(name, found.always)
            coming += self._new(name, found.coming)
        if coming:
            self.ledger.instant("begin")
            self.ledger.drop(coming)

    def _stages(self, layer: Layer) -> list[StageMemory]:
        """With arrays (C, N)."""
        where, flows = self.at[layer.name], self.model.graph.flows_back(layer)
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
                )
            )
        return rows

    def _new(self, name: str, size: Floats) -> list[Claim]:
        """A storage of a layer alone."""
        return self.ledger.hold(self.ledger.storage(), name, "sure", size)

    def _of_edge(self, storage: Storage, edge: EdgeName, source: Floats, target: Floats, *, local: bool) -> list[Claim]:
        """Sure where the edge is local, or where it is not."""
        mask = self.local[edge]
        return self.ledger.hold(storage, edge, "sure", source, target, local) if (mask == local).any() else []

    def _own_bytes(self, name: str) -> Floats:
        where = self.at[name]
        return where.table(where.place.owned.volume * self.model.graph[name].out.item_bytes)

    def _need(self, layer: Layer, slot: int) -> Floats:
        maps, epilogue = input_maps(layer, slot)
        where = self.at[layer.name]
        volume = where.place.at(epilogue).needs(maps).volume
        return where.table(volume * self.model.graph[layer.inputs[slot]].out.item_bytes)

    def _locality(self, layer: Layer, slot: int) -> Mask:
        """(C_u, C_v) where nothing travels; else there is a `Travel`."""
        name = (layer.inputs[slot], layer.name, slot)
        edge = self.model.edge(name, self.configs[name[0]], self.configs[name[1]])
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

    # ---- forward ----

    def _forward(self, layer: Layer) -> None:
        if layer.role is Role.TIED:  # the parameter itself
            self.values[layer.name] = None
        elif layer.role in (Role.INPUT, Role.CONSTANT):  # whoever feeds it keeps it
            size, storage = self._own_bytes(layer.name), self.ledger.storage()
            self.ledger.hold(storage, layer.name, "sure", size)
            self.values[layer.name] = Made(storage, size, [], np.ones(size.shape, np.bool_))
        elif layer.role is Role.SINK:
            self._loss(layer)
        else:
            given = [self._given(layer, slot) for slot in range(len(layer.inputs))]
            again = self.recomputed[layer.name]
            self._keep_sources(layer, again)
            self.values[layer.name] = self._compute(layer, given, np.ones_like(again), ~again)

    def _given(self, layer: Layer, slot: int) -> Given:
        source = layer.inputs[slot]
        self.local[source, layer.name, slot] = self._locality(layer, slot)
        value = self.values[source]
        there = [(value.storage, value.size * ~value.held)] if isinstance(value, Made) else []
        return self._received(layer, slot, there, self._need(layer, slot), "shared")

    def _received(
        self, layer: Layer, slot: int, there: list[tuple[Storage, Floats]], need: Floats, kind: Kind
    ) -> Given:
        edge, leaf = (layer.inputs[slot], layer.name, slot), self.ledger.storage()
        working = self._of_edge(leaf, edge, ALWAYS, need, local=False)
        return Given(edge, there, leaf, need, working, np.zeros(need.shape, np.bool_), kind)

    def _compute(self, layer: Layer, given: list[Given], on: Mask, saving: Mask) -> Made | Given | None:
        """Its result. on, saving: (C, 1) which configurations compute it now, and keep what its backward pass reads."""
        ledger, name = self.ledger, layer.name
        saved = self.saved.setdefault(name, [[] for _ in self.stages[name]])
        pass_ = "forward" if on.all() else "again"
        gathered = self._new(name, self.parameters[name].gathered * on)
        out: Made | Given | None = None
        for number, stage in enumerate(self.stages[name]):
            before, mine, done = out, list[Claim](), list[Claim]()
            copies = dict[int, Made]()
            keeps = saving if stage.tracked else np.zeros_like(saving)
            if stage.view:
                out = before if number else given[0]
            else:
                mine = self._new(name, stage.extra * keeps)
                copies = {slot: self._made(name, size * on) for slot, size in stage.copies.items()}
                copies[WEIGHTS], out = self._made(name, stage.weights * on), self._made(name, stage.made * on)
                done += [claim for copy in copies.values() for claim in copy.working]
                spike = self._new(name, stage.forward * on + stage.extra * (on & ~keeps))
                ledger.instant(f"{pass_} {name} {number}")
                ledger.drop(spike)
            if stage.tracked and self.flows[name]:
                where = np.broadcast_to(stage.kept.inputs, stage.made.size).reshape(stage.made.shape) & keeps
                whole = np.broadcast_to(keeps, where.shape)
                read: dict[int, Made | Given | None] = {BEFORE: before}
                read |= {slot: given[slot] for slot in self._slots(layer, number)}
                read |= copies
                for slot, ref in read.items():
                    mine += self._keep(name, ref, whole if slot == WEIGHTS else where)
                mine += self._keep(name, out, whole) if stage.kept.output else []
            saved[number] += mine
            if before is not None and before is not out and before not in given:
                done += before.working
            ledger.drop(done)
        if not self.flows[name]:
            ledger.drop([claim for mine in saved for claim in mine])
        ledger.drop(gathered + [claim for ref in given if ref is not out for claim in ref.working])
        return out

    def _made(self, name: str, size: Floats) -> Made:
        storage = self.ledger.storage()
        return Made(storage, size, self.ledger.hold(storage, name, "sure", size), np.zeros(size.shape, np.bool_))

    def _keep(self, name: str, ref: Made | Given | None, where: Mask) -> list[Claim]:
        """For the backward pass. What another stage keeps until later is its own already."""
        if ref is None:
            return []
        more = (where & ~ref.held).astype(np.float64)
        ref.held = ref.held | where
        if isinstance(ref, Made):
            return self.ledger.hold(ref.storage, name, "own", ref.size * more)
        claims = self.ledger.hold(ref.leaf, ref.edge, "own", ALWAYS, ref.need * more, local=False)
        for storage, free in ref.there:
            claims += self.ledger.hold(storage, ref.edge, ref.kind, free, (ref.need > 0) * more, local=True)
        return claims

    # ---- what is made again ----

    def _keep_sources(self, layer: Layer, again: Mask) -> None:
        """What a recomputed layer is made of, as far as it is not made again with it; running statistics of before."""
        if not again.any():
            return
        name, where = layer.name, self.at[layer.name]
        kept, always = self.kept.setdefault(self.blocks[name], []), np.broadcast_to(1.0 * again, where.shape)
        for slot, source in enumerate(layer.inputs):
            value = self.values[source]
            if isinstance(value, Made):
                free, edge = value.size * ~value.held * self._original(layer, source), (source, name, slot)
                for local in (True, False):
                    kept += self.ledger.hold(value.storage, edge, "kept", free, always, local=local)
        for _, p, dtype in layer.remembered:
            size = where.table(where.place.at(p.epilogue).needs(p.maps).volume * ITEM_BYTES[dtype])
            kept += self._new(name, np.where(where.place.computed.active.reshape(where.shape) & again, size, 0.0))

    def _original(self, layer: Layer, source: str) -> Mask:
        """(C_u, 1) where a layer's source is not made again with it."""
        same = self.blocks.get(source) == self.blocks[layer.name]
        return ~self.recomputed[source] if same else np.ones_like(self.recomputed[source])

    def _make_again(self, last: Layer) -> None:
        """The recomputed layers of a block, before its last layer is differentiated."""
        block = self.blocks.get(last.name)
        names = [name for name, number in self.blocks.items() if number == block]
        if block is None or names[-1] != last.name:
            return
        for name in names:
            layer, again = self.model.graph[name], self.recomputed[name]
            if again.any():
                given = [self._given_again(layer, slot, again) for slot in range(len(layer.inputs))]
                made = self.again[name] = self._compute(layer, given, again, again)
                self.ledger.drop(made.working if made else [])
        self.ledger.drop(self.kept.pop(block, []))

    def _given_again(self, layer: Layer, slot: int, again: Mask) -> Given:
        source, there = layer.inputs[slot], list[tuple[Storage, Floats]]()
        value = self.values[source]
        if isinstance(value, Made):
            there.append((value.storage, value.size * ~value.held * self._original(layer, source)))
        if self.blocks.get(source) == self.blocks[layer.name]:
            made = self.again.get(source)
            there += [(made.storage, made.size * ~made.held)] if isinstance(made, Made) else []
        return self._received(layer, slot, there, self._need(layer, slot) * again, "again")

    def _slots(self, layer: Layer, number: int) -> tuple[int, ...]:
        """The layer's inputs that a stage reads; the first one also the parameters that other layers use, too."""
        slots = self.stages[layer.name][number].slots
        return slots if number else slots + tuple(range(len(layer.specs), len(layer.inputs)))

    def _loss(self, sink: Layer) -> None:
        """As `step` has it: all follows from the configuration of the layer whose output it is."""
        ledger, rows = self.ledger, list[Scored]()
        for slot, name in enumerate(sink.inputs):
            rows.append(scored(self.model, sink, slot, self.configs[name], self.configs[sink.name]))
            local = rows[-1].local[:, None] if self.model.options.io == "free" else self._locality(sink, slot)
            self.local[name, sink.name, slot] = local
        received = [self._new(name, row.received) for name, row in zip(sink.inputs, rows, strict=True)]
        copies = [self._new(name, row.size) for name, row in zip(sink.inputs, rows, strict=True)]
        ledger.instant("loss outputs")
        ledger.drop([claim for claims in received for claim in claims])
        logs = list[list[Claim]]()
        for name, row in zip(sink.inputs, rows, strict=True):
            self._new(name, row.targets)
            copies.append(self._new(name, row.scored * row.wide))
        for name, row in zip(sink.inputs, rows, strict=True):
            logs.append(self._new(name, row.scored))
        ledger.instant("loss logarithms")
        ledger.drop([claim for claims in copies for claim in claims])
        uneven = self.model.options.io == "sample" and self.model.graph.batch % min(
            self.model.devices.count, self.model.graph.batch
        )
        for slot, (name, row, log) in enumerate(zip(sink.inputs, rows, logs, strict=True)):
            first, storage = self._new(name, row.scored), ledger.storage()
            wide = (row.scored if row.wide else row.size) * self.flows[name]
            gradient = ledger.hold(storage, name, "sure", wide)
            ledger.instant(f"loss gradient {slot}")
            ledger.drop(first + log)
            for again in (row.wide, bool(uneven)):
                if again:
                    before, storage = gradient, ledger.storage()
                    gradient = ledger.hold(storage, name, "sure", row.size * self.flows[name])
                    ledger.instant(f"loss gradient {slot} again")
                    ledger.drop(before)
            self._return(sink, slot, Gradient(storage, row.size[:1], gradient))
            self._travelling(sink, (slot,))

    # ---- backward ----

    def _backward(self, layer: Layer) -> None:
        name = layer.name
        if layer.role is Role.TIED:
            gradient = self.gradients.pop(name, None)
            self.ledger.drop(gradient.claims if gradient else [])
            self._hand_out(layer)
        elif layer.role is not Role.SINK:
            late = self._late(layer)
            inward = self._differentiate(layer, late) if self.flows[name] and name in self.stages else {}
            for user, slot in reversed(self.begun.get(name, ())):
                self._land(self.model.graph[user], slot)
            for slot in sorted(inward, reverse=True):
                self._return(layer, slot, inward[slot], late=late and slot == 0)
            self._travelling(layer, inward)  # where some run ahead they are the last
            if late and inward:
                self._make_weights(layer, inward[0])
                if (name, 0) not in self.ahead:
                    self._land(layer, 0)
            if self.flows[name]:
                self._hand_out(layer)

    def _late(self, layer: Layer) -> bool:
        """Whether under some configurations the gradient of its weights is made while that of its input travels."""
        flows = any(self.model.graph.flows_back(layer)[:1])
        return (
            weights_late(layer, flows, self.model.devices.device_type)
            and not self.local[layer.inputs[0], layer.name, 0].all()
        )

    def _differentiate(self, layer: Layer, late: bool) -> dict[int, Gradient]:
        ledger, name, stages = self.ledger, layer.name, self.stages[layer.name]
        running, inward = self.gradients.pop(name, None), dict[int, Gradient]()
        gathered, waiting = self._new(name, self.parameters[name].gathered), list[Claim]()
        tracked = [number for number, stage in enumerate(stages) if stage.tracked]
        for number in reversed(tracked):
            stage, slots, made = stages[number], stages[number].slots, list[Claim]()
            weights, rows = list[Claim](), list[Claim]()
            if number == tracked[0]:
                slots = self._slots(layer, 0) if number == 0 else slots
                weights = self._unless_late(layer, stage.weights, late)
                made = [] if weights else self._parameters(layer, late)
                rows = [] if weights or late else self._new(name, self.parameters[name].rows_gathered)
            cast = [size for slot, size in stage.copies.items() if slot == BEFORE or self.flows[layer.inputs[slot]]]
            between = sum(cast, stage.between)
            copies = self._new(name, between)
            read = self.saved[name][number] + (running.claims if running else [])
            if copies or rows:
                ledger.instant(f"backward {name} {number} first")
                ledger.drop(rows)
                if late and number == 0:
                    waiting += self._waiting(layer, read, stage.between > 0)
                read = self._only(name, read, stage.between == 0)
            wanted = [slot for slot in slots if self.flows[layer.inputs[slot]]]
            through = running if stage.kept.through else None
            alone = through is not None and self._disjoint(layer, stage, wanted, through, stages[number - 1].made)
            if not alone:
                inward |= {slot: self._inward(layer, slot, through, stage.kept.through) for slot in wanted}
            before = self._before(name, stages[number - 1].made, through, stage.kept.through) if stage.running else None
            ledger.instant(f"backward {name} {number}")
            if late and number == 0:
                waiting += self._waiting(layer, read, np.ones(stage.made.shape, np.bool_))
            ledger.drop(copies + read + (running.claims if running else []))
            if alone:
                inward |= {slot: self._inward(layer, slot, None, False) for slot in wanted}
            if weights:
                made = self._parameters(layer, late)
                ledger.instant(f"backward {name} {number} weights")
            ledger.drop(made + weights)
            running = before
        ledger.drop(gathered + (running.claims if running else []))
        self.waiting = waiting
        return inward

    def _disjoint(
        self, layer: Layer, stage: StageMemory, slots: Sequence[int], running: Gradient, made: Floats
    ) -> bool:
        """Whether the gradients of a stage's inputs are different parts of its result's, which nobody else holds."""
        total = sum((self._need(layer, slot) for slot in slots), made if stage.running else np.zeros_like(made))
        others = [claim for claim in running.storage.claims if claim.last < 0 and claim not in running.claims]
        return not stage.running and not others and running.whole and bool((total <= running.size).all())

    def _inward(self, layer: Layer, slot: int, running: Gradient | None, through: bool) -> Gradient:
        """That of an input: a view of the output's, or made."""
        need = self._need(layer, slot)
        if running is not None:
            size = np.minimum(need, running.size)
            whole = running.whole and bool((need <= running.size).all())
            return Gradient(running.storage, size, self.ledger.hold(running.storage, layer.name, "sure", size), whole)
        storage = self.ledger.storage()
        if through:  # of nothing
            return Gradient(storage, 0 * need, [], whole=False)
        return Gradient(storage, need, self.ledger.hold(storage, layer.name, "sure", need))

    def _before(self, name: str, made: Floats, running: Gradient | None, through: bool) -> Gradient | None:
        """That of the stage before."""
        if through and running is None:
            return None
        storage = self.ledger.storage() if running is None else running.storage
        size = made if running is None else np.minimum(made, running.size)
        whole = running is None or running.whole
        return Gradient(storage, size, self.ledger.hold(storage, name, "sure", size), whole)

    def _only(self, name: str, claims: Sequence[Claim], where: Mask) -> list[Claim]:
        """The claims go on where a layer's configuration says so."""
        more = list[Claim]()
        for claim in claims:
            if claim.last < 0:
                self.ledger.drop([claim])
                of_source = claim.target is None or claim.owner[0] == name
                source = claim.source * where if of_source else claim.source
                target = claim.target if of_source or claim.target is None else claim.target * where
                more += self.ledger.hold(claim.storage, claim.owner, claim.kind, source, target, claim.local)
        return more

    def _waiting(self, layer: Layer, claims: Sequence[Claim], where: Mask) -> list[Claim]:
        """They go on where the gradient of the layer's input travels, and its own configuration says so."""
        edge, more = (layer.inputs[0], layer.name, 0), list[Claim]()
        for claim in claims:
            if claim.last < 0 and claim.owner == layer.name:
                target = claim.source * where
            elif claim.last < 0 and claim.owner == edge and claim.target is not None and not claim.local:
                target = claim.target * where
            else:
                continue
            more += self.ledger.hold(claim.storage, edge, claim.kind, ALWAYS, target, local=False)
        return more

    def _parameters(self, layer: Layer, late: bool) -> list[Claim]:
        """Their gradients."""
        held = self.parameters[layer.name]
        return self._unless_late(layer, held.gradients, late) + ([] if late else self._new(layer.name, held.rows))

    def _unless_late(self, layer: Layer, size: Floats, late: bool) -> list[Claim]:
        if not late:
            return self._new(layer.name, size)
        return self._of_edge(self.ledger.storage(), (layer.inputs[0], layer.name, 0), ALWAYS, size, local=True)

    def _make_weights(self, layer: Layer, inward: Gradient) -> None:
        """While the gradient of the input travels, which is a flight by now."""
        stage, edge, held = self.stages[layer.name][0], (layer.inputs[0], layer.name, 0), self.parameters[layer.name]
        claims = self._of_edge(self.ledger.storage(), edge, ALWAYS, held.gradients + stage.weights, local=False)
        claims += self._new(layer.name, held.rows)
        self.ledger.instant(f"backward {layer.name} weights")
        self.ledger.drop(claims + self.waiting)

    def _hand_out(self, layer: Layer) -> None:
        """Gradients that nobody shares stay."""
        self._new(layer.name, self.parameters[layer.name].alone)
        self.rows += self._new(layer.name, self.parameters[layer.name].rows)

    def _return(self, layer: Layer, slot: int, gradient: Gradient, *, late: bool = False) -> None:
        """The gradient of a layer's input goes back to who owns it: at once, or ahead (see `_land`)."""
        source = layer.inputs[slot]
        edge = (source, layer.name, slot)
        if self.flows[source]:
            if (late or (layer.name, slot) in self.ahead) and not self.local[edge].all():
                flight = self._of_edge(gradient.storage, edge, ALWAYS, gradient.size, local=False)
                self.flights[layer.name, slot] = replace(gradient, claims=flight)
                if source not in self.gradients:
                    own = self._own_bytes(source)
                    here = self._of_edge(gradient.storage, edge, own, ALWAYS, local=True) if gradient.whole else []
                    self.gradients[source] = Gradient(gradient.storage, own, here, gradient.whole, partial=True)
                elif not gradient.whole:
                    self._forget(source)
            else:
                self._arrive(layer, slot)
                self._add(source, gradient)
        self.ledger.drop(gradient.claims)

    def _travelling(self, layer: Layer, slots: Iterable[int]) -> None:
        """What comes back meanwhile, and the copies that it comes from."""
        for slot in slots:
            if (layer.name, slot) in self.flights:
                edge = (layer.inputs[slot], layer.name, slot)
                self.flights[layer.name, slot].claims.extend(self._part(edge, "sent") + self._part(edge, "back"))

    def _arrive(self, layer: Layer, slot: int) -> None:
        """What was sent comes back, from copies; then it is added up, beside what it is made of."""
        edge = (layer.inputs[slot], layer.name, slot)
        if edge in self.travels:
            arrived, copies = self._part(edge, "sent"), self._part(edge, "back")
            self.ledger.instant(f"return {layer.name} {slot}")
            self.ledger.drop(copies)
            arrived += self._part(edge, "returned")
            self.ledger.instant(f"return {layer.name} {slot} added")
            self.ledger.drop(arrived)

    def _part(self, edge: EdgeName, part: Part) -> list[Claim]:
        return self.ledger.hold_part(edge, part) if edge in self.travels else []

    def _forget(self, source: str) -> None:
        """A sum may have become a view of something smaller."""
        before = self.gradients[source]
        self.ledger.drop(before.claims)
        self.gradients[source] = replace(before, claims=[], whole=False)

    def _land(self, layer: Layer, slot: int) -> None:
        """The end of a gradient's way back, where there is one."""
        flight = self.flights.pop((layer.name, slot), None)
        if flight is not None:
            self._add(layer.inputs[slot], flight)
            self.ledger.drop(flight.claims)

    def _add(self, source: str, gradient: Gradient) -> None:
        """A gradient that came back is added to those that came before, in place where nobody else has these."""
        before = self.gradients.get(source)
        storage, whole = gradient.storage, gradient.whole
        if before is not None:
            self.ledger.drop(before.claims)
            storage = storage if before.partial else self.ledger.storage()
            whole = whole and before.whole
        own = self._own_bytes(source)
        claims = self.ledger.hold(storage, source, "sure", own) if whole else []
        self.gradients[source] = Gradient(storage, own, claims, whole)

    # ---- update ----

    def _update(self) -> None:
        """Activations are gone; Adam has its denominators besides (see `kernels.update`)."""
        if all(self.flows[layer.name] for layer in self.model.graph.layers if layer.trains):  # all that waits has left
            for name, held in self.parameters.items():
                self._new(name, held.part)
        self.ledger.instant("backward end")
        self.ledger.drop(self.rows)
        rows = [(name, size) for name, held in self.parameters.items() for size in held.updated]
        if self.model.options.optimizer == "adam" and self.model.devices.device_type != "cpu":
            for name, size in rows:
                self._new(name, size)
        self.ledger.instant("update")
        if self.model.options.optimizer == "adam" and self.model.devices.device_type == "cpu":
            before = list[Claim]()
            for number, (name, size) in enumerate(rows):
                claims = self._new(name, 2 * size)
                self.ledger.instant(f"update {number}")
                self.ledger.drop(before + claims)
                before = self._new(name, size)
