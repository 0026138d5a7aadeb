"""Lifetimes: the program of a step on the claims of all configurations at once, as `step` has it on one's storages.

What `step` does on N devices is done on C*N; what depends on the configurations of two layers is a claim of an edge.
The program is that of all that may happen; claims say under which configurations it does. Where more than two layers
decide, or the order of what travels does, less is claimed than `step` counts, never more (tests/cost/test_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from layerwise.cost.memory.bounds.claims import Claim
from layerwise.cost.memory.bounds.forward import Forward
from layerwise.cost.memory.bounds.stacked import Part
from layerwise.cost.memory.bounds.state import ALWAYS, GradientClaims
from layerwise.cost.memory.sizes import BEFORE, StageMemory
from layerwise.cost.model import EdgeName
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.program import Effects, fold
from layerwise.program.instructions import (
    AllGather,
    Arrive,
    Begin,
    Compute,
    End,
    Fill,
    Forget,
    Free,
    Keep,
    Move,
    Output,
    Release,
    Update,
)


class Lifetimes(Forward):
    """The claims of a step, from its beginning to the optimizer's update: gradients come while what was saved goes."""

    def __post_init__(self) -> None:
        super().__post_init__()
        does: Effects = {
            Begin: self.begin, End: self.end, Move: self.move, Keep: self.keep, Compute: self.compute,
            Output: self.output, Free: self.free, Forget: self.forget, Update: self.update,
            **dict.fromkeys((AllGather, Arrive, Release, Fill)),  # claims of parameters are made with their layer's
        }  # fmt: skip
        fold(self.program, does)

    # ---- instructions ----

    def begin(self, instruction: Begin) -> None:
        """Claims the memory of what is issued early; forward only what has arrived is claimed."""
        if instruction.way == "backward":
            self._return(self.model.graph[instruction.layer], instruction.slot, early=True)

    def end(self, instruction: End) -> None:
        """A transfer that was issued before is awaited."""
        if instruction.way == "backward":
            self._land(self.model.graph[instruction.layer], instruction.slot)
        else:
            self._receive(self.model.graph[instruction.layer], instruction.slot, recomputed=False)

    def move(self, instruction: Move) -> None:
        """A layer receives an input, or returns its gradient, at once."""
        layer, slot = self.model.graph[instruction.layer], instruction.slot
        if instruction.way == "backward":
            self._return(layer, slot, early=False)
        else:
            self._receive(layer, slot, recomputed=instruction.way == "recompute")

    def _receive(self, layer: Layer, slot: int, *, recomputed: bool) -> None:
        if layer.role is not Role.SINK:  # whose outputs are looked at together
            received = self._receive_recomputed(layer, slot) if recomputed else self._receive_forward(layer, slot)
            self.received.setdefault(layer.name, {})[slot] = received

    def compute(self, instruction: Compute) -> None:
        """A layer's kernels run."""
        parts = {"recompute": self._recompute, "backward": self._backward}
        parts.get(instruction.part, self._forward)(self.model.graph[instruction.layer])

    def update(self, _: Update) -> None:
        """Activations are gone; Adam has its denominators besides (see `ParameterStorages.update`)."""
        if self.all_leave:
            for name, held in self.parameters.items():
                self._new(name, held.part - held.part_gathered)
        self.ledger.instant("backward end")
        self.ledger.drop(self.rows + self.last)
        adam, on_cpu = self.model.options.optimizer == "adam", self.model.devices.device_type == "cpu"
        rows = [(name, size) for name, held in self.parameters.items() for size in held.updated if adam]
        for name, size in rows if not on_cpu else ():
            self._new(name, size)
        self.ledger.instant("update")
        before = list[Claim]()
        for number, (name, size) in enumerate(rows if on_cpu else ()):
            claims = self._new(name, 2 * size)
            self.ledger.instant(f"update {number}")
            self.ledger.drop(before + claims)
            before = self._new(name, size)

    # ---- the backward pass ----

    def _backward(self, layer: Layer) -> None:
        name = layer.name
        if layer.role is Role.TIED:
            gradient = self.gradients.pop(name, None)
            self.ledger.drop(gradient.claims if gradient else [])
        elif name in self.stages:
            self.inward[name] = self._differentiate(layer)
        self._hand_out(layer)

    def _differentiate(self, layer: Layer) -> dict[int, GradientClaims]:
        ledger, name, stages = self.ledger, layer.name, self.stages[layer.name]
        running, inward = self.gradients.pop(name, None), dict[int, GradientClaims]()
        gathered = self._new(name, self.parameters[name].gathered)
        if name in self.moved:  # the reader needs it no more
            edge = (name, *self.within[name])
            self.saved[name][-1] += ledger.hold(ledger.storage(), edge, "own", *self.moved[name], local=False)
        tracked = [number for number, stage in enumerate(stages) if stage.tracked]
        for number in reversed(tracked):
            stage, made, weights = stages[number], list[Claim](), list[Claim]()
            if number == tracked[0]:
                weights = self._new(name, stage.weights)
                made = [] if weights else self._parameters(layer)
            cast = [size for slot, size in stage.copies.items() if slot == BEFORE or self.flows[layer.inputs[slot]]]
            copies = self._new(name, sum(cast, stage.between - stage.padded)) + self._copy(layer, number)
            read = self.saved[name][number] + (running.claims if running else [])
            if copies:
                ledger.instant(f"backward {name} {number} first")
                alone = (stage.padded > 0) & (stage.between == stage.padded)
                arrived = self._waiting(layer, read, alone) if number == 0 else []
                read = self._only(name, read, stage.between == 0) + arrived
            wanted = [slot for slot in stage.slots if self.flows[layer.inputs[slot]]]
            through = running if stage.saved.through else None
            apart = through is not None and self._disjoint(layer, stage, wanted, through, stages[number - 1].made)
            if not apart:
                inward |= {slot: self._inward(layer, slot, through, stage.saved.through) for slot in wanted}
            before = (
                self._before(name, stages[number - 1].made, through, stage.saved.through) if stage.running else None
            )
            ledger.instant(f"backward {name} {number}")
            ledger.drop(copies + read + (running.claims if running else []))
            if apart:
                inward |= {slot: self._inward(layer, slot, None, False) for slot in wanted}
            if weights:
                made = self._parameters(layer)
                ledger.instant(f"backward {name} {number} weights")
            ledger.drop(made + weights)
            running = before
        ledger.drop(gathered + (running.claims if running else []))
        self._sum_gathered(layer)
        return inward

    def _disjoint(
        self, layer: Layer, stage: StageMemory, slots: Sequence[int], running: GradientClaims, made: Floats
    ) -> bool:
        """True if the gradients of a stage's inputs are different parts of its result's, which nobody else holds."""
        total = sum((self._need(layer, slot) for slot in slots), made if stage.running else np.zeros_like(made))
        others = [claim for claim in running.storage.claims if claim.last < 0 and claim not in running.claims]
        return not stage.running and not others and running.whole and bool((total <= running.size).all())

    def _inward(self, layer: Layer, slot: int, running: GradientClaims | None, through: bool) -> GradientClaims:
        """The gradient of an input: a view of the output's, or made."""
        need = self._need(layer, slot)
        if running is not None:
            size = np.minimum(need, running.size)
            whole = running.whole and bool((need <= running.size).all())
            return GradientClaims(
                running.storage, size, self.ledger.hold(running.storage, layer.name, "sure", size), whole
            )
        storage = self.ledger.storage()
        if through:  # of nothing
            return GradientClaims(storage, 0 * need, [], whole=False)
        return GradientClaims(storage, need, self.ledger.hold(storage, layer.name, "sure", need))

    def _before(self, name: str, made: Floats, running: GradientClaims | None, through: bool) -> GradientClaims | None:
        """The gradient of the stage before."""
        if through and running is None:
            return None
        storage = self.ledger.storage() if running is None else running.storage
        size = made if running is None else np.minimum(made, running.size)
        whole = running is None or running.whole
        return GradientClaims(storage, size, self.ledger.hold(storage, name, "sure", size), whole)

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

    def _parameters(self, layer: Layer) -> list[Claim]:
        """Their gradients."""
        held = self.parameters[layer.name]
        return self._new(layer.name, held.gradients) + self._new(layer.name, held.rows)

    def _sum_gathered(self, layer: Layer) -> None:
        """Gradients of what is gathered for a layer go into rows, of which some stay until others come."""
        held = self.parameters[layer.name]
        if held.rows_last.any():
            self.ledger.drop(self.last)  # those of the layer before may have left
            self.last = self._new(layer.name, held.rows_last)
            alone = self._new(layer.name, held.gradient_last)
            self.ledger.instant(f"backward {layer.name} sums")
            self.ledger.drop(alone)

    def _hand_out(self, layer: Layer) -> None:
        """Gradients that nobody shares stay, and a device's part of the sums of others."""
        held = self.parameters[layer.name]
        self._new(layer.name, held.alone + held.part_gathered * self.all_leave)
        self.rows += self._new(layer.name, held.rows)

    def _return(self, layer: Layer, slot: int, *, early: bool) -> None:
        """The gradient of a layer's input goes back to who owns it: at once, or while others compute (see `_land`)."""
        source = layer.inputs[slot]
        edge, gradient = (source, layer.name, slot), self.inward[layer.name].get(slot)
        if gradient is None:
            return
        if early:
            flight = self._of_edge(gradient.storage, edge, ALWAYS, gradient.size, local=False)
            if source not in self.gradients:
                own = self._own_bytes(source)
                here = self._of_edge(gradient.storage, edge, own, ALWAYS, local=True) if gradient.whole else []
                self.gradients[source] = GradientClaims(gradient.storage, own, here, gradient.whole, partial=True)
            elif not gradient.whole:
                self._forget(source)
            # What comes back meanwhile, and the copies that it comes from.
            flight += self._part(edge, "sent") + self._part(edge, "back")
            self.flights[layer.name, slot] = replace(gradient, claims=flight)
        else:
            self._arrive(layer, slot)
            self._add(source, gradient)
        self.ledger.drop(gradient.claims)

    def _arrive(self, layer: Layer, slot: int) -> None:
        """Receives what was sent, from copies; then it is added up, beside what it is made of."""
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

    def _add(self, source: str, gradient: GradientClaims) -> None:
        """A gradient that came back is added to those that came before, in place where nobody else has these."""
        before = self.gradients.get(source)
        storage, whole = gradient.storage, gradient.whole
        if before is not None:
            self.ledger.drop(before.claims)
            storage = storage if before.partial else self.ledger.storage()
            whole = whole and before.whole
        own = self._own_bytes(source)
        claims = self.ledger.hold(storage, source, "sure", own) if whole else []
        self.gradients[source] = GradientClaims(storage, own, claims, whole)
