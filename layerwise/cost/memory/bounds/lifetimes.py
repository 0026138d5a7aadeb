"""Lifetimes: the program of a step on the claims of all configurations at once, as `step` has it on one's storages.

What `step` does on N devices is done on C*N; what depends on the configurations of two layers is a claim of an edge.
The program is that of all that may happen; claims say under which configurations it does. Where more than two layers
decide, or the order of what travels does, less is claimed than `step` counts, never more (tests/cost/test_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from layerwise.config import distinct_cells
from layerwise.cost.memory.bounds.backward import Backward
from layerwise.cost.memory.bounds.claims import Claim
from layerwise.cost.memory.bounds.state import GradientClaims
from layerwise.cost.memory.sizes import differentiated, moved_between, place_of, returned
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.program import fold
from layerwise.program.instructions import Begin, Compute, End, Free, Move, Output, Update


class Lifetimes(Backward):
    """The claims of a step, from its beginning to the optimizer's update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        fold(self.program, self)

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
        parts = {"recompute": self._recompute, "backward": self._backward, "weights": self._make_weights}
        parts.get(instruction.part, self._forward)(self.model.graph[instruction.layer])

    def free(self, instruction: Free) -> None:
        """The layer's output is claimed by what saved it only."""
        value = self.values.get(instruction.value)
        self.ledger.drop(value.working if value else [])

    def output(self, instruction: Output) -> None:
        """Gradients of the outputs: all follows from the configuration of the layer whose output it is."""
        sink, model = self.model.graph[instruction.layer], self.model
        sizes, received = list[Floats](), list[list[Claim]]()
        for slot, (name, spec) in enumerate(zip(sink.inputs, sink.specs, strict=True)):
            cells, which = distinct_cells(self.configs[name])
            end, source = place_of(model, sink, self.configs[sink.name][0]), model.graph[name]
            edges = [moved_between(model, sink, slot, place_of(model, source, config), end) for config in cells]
            local = np.array([[edge.local] for edge in edges])
            if model.options.io != "sample":
                self.local[name, sink.name, slot] = local
            sizes.append(np.stack([edge.need for edge in edges])[which] * spec.item_bytes)
            received.append(self._new(name, np.where(local[which], 0.0, sizes[-1])))

        def new(slot: int, size: Floats) -> list[Claim]:
            return self._new(sink.inputs[slot], size)

        if model.options.kind == "inference":
            returned(new, self._drop_outputs, sizes, received)
            return
        made = differentiated(new, self._drop_outputs, model, sink, sizes, received)
        self.inward[sink.name] = {
            slot: GradientClaims(claims[0].storage if claims else self.ledger.storage(), size[:1], claims)
            for slot, (size, claims) in enumerate(zip(sizes, made, strict=True))
        }

    def _drop_outputs(self, claims: Sequence[list[Claim]]) -> None:
        self.ledger.instant(f"outputs {self.ledger.now}")
        self.ledger.drop([claim for each in claims for claim in each])

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
