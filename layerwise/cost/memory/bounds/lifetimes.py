"""Lifetimes: a step followed for all configurations at once, as `step` follows it for one strategy.

What `step` does on N devices is done on C*N; what depends on the configurations of two layers is a claim of an edge.
Where more than two layers decide, or the order of what travels does, less is claimed than `step` counts, never more
(tests/cost/test_bounds.py).
"""

from __future__ import annotations

from layerwise.cost.memory.bounds.backward import Backward
from layerwise.cost.memory.bounds.claims import Claim
from layerwise.cost.memory.bounds.followed import Gradient
from layerwise.cost.memory.bounds.loss import Scored, scored
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role


class Lifetimes(Backward):
    """The claims of a step, from its beginning to the optimizer's update."""

    def __post_init__(self) -> None:
        super().__post_init__()
        graph = self.model.graph
        last = {source: i for i, layer in enumerate(graph.layers) for source in layer.inputs}
        gradients = list[Gradient]()
        for i, layer in enumerate(graph.layers):
            if layer.role is Role.SINK:
                gradients = self._loss(layer)
            else:
                self._forward(layer)
            for source in dict.fromkeys(layer.inputs):
                value = self.values.get(source)
                if last[source] == i and value is not None:
                    self.ledger.drop(value.working)
        sink = graph.layers[-1]
        for slot in reversed(range(len(sink.inputs))):
            self._return(sink, slot, gradients[slot])
            self._travelling(sink, (slot,))
        for layer in reversed(graph.layers):
            self._make_again(layer)
            self._backward(layer)
        self._update()

    def _loss(self, sink: Layer) -> list[Gradient]:
        """Gradients of the outputs: all follows from the configuration of the layer whose output it is."""
        ledger, rows = self.ledger, list[Scored]()
        for slot, name in enumerate(sink.inputs):
            rows.append(scored(self.model, sink, slot, self.configs[name], self.configs[sink.name]))
            local = rows[-1].local[:, None] if self.model.options.io != "sample" else self._locality(sink, slot)
            self.local[name, sink.name, slot] = local
        received = [self._new(name, row.received) for name, row in zip(sink.inputs, rows, strict=True)]
        copies = [self._new(name, row.size) for name, row in zip(sink.inputs, rows, strict=True)]
        ledger.instant("loss outputs")
        ledger.drop([claim for claims in received for claim in claims])
        if self.model.options.kind == "inference":
            return [Gradient(ledger.storage(), row.size[:1], []) for row in rows]
        logs, gradients = list[list[Claim]](), list[Gradient]()
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
            for again, why in ((row.wide, "in 16 bits"), (bool(uneven), "scaled")):
                if again:
                    before, storage = gradient, ledger.storage()
                    gradient = ledger.hold(storage, name, "sure", row.size * self.flows[name])
                    ledger.instant(f"loss gradient {slot} {why}")
                    ledger.drop(before)
            gradients.append(Gradient(storage, row.size[:1], gradient))
        return gradients

    def _update(self) -> None:
        """Activations are gone; Adam has its denominators besides (see `kernels.update`)."""
        if self.all_leave:
            for name, held in self.parameters.items():
                self._new(name, held.part - held.part_gathered)
        self.ledger.instant("backward end")
        self.ledger.drop(self.rows + self.last)
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
