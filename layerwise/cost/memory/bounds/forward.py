"""The forward pass of a step, and the layers that are recomputed in the backward pass, as `step` has them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from layerwise.config import distinct_cells
from layerwise.cost.memory.bounds.claims import Claim, ClaimedStorage, ClaimKind
from layerwise.cost.memory.bounds.state import ALWAYS, WEIGHTS, GradientClaims, Received, StageResult, StepClaims
from layerwise.cost.memory.sizes import BEFORE, differentiated, moved_between, place_of, returned
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.program.instructions import Forget, Free, Keep, Output
from layerwise.tensor import ITEM_BYTES


class Forward(StepClaims):
    """The forward pass: what layers make, and what is saved of it for the backward pass."""

    def _forward(self, layer: Layer) -> None:
        if layer.role is Role.TIED:  # the parameter itself
            self.values[layer.name] = None
        elif layer.role in (Role.INPUT, Role.CONSTANT):  # whoever feeds it keeps it
            size, storage = self._own_bytes(layer.name), self.ledger.storage()
            self.ledger.hold(storage, layer.name, "sure", size)
            self.values[layer.name] = StageResult(storage, size, [], np.ones(size.shape, np.bool_))
        else:
            recomputed = self.recomputed[layer.name]
            self.values[layer.name] = self._compute("forward", layer, np.ones_like(recomputed), ~recomputed)

    def _receive_forward(self, layer: Layer, slot: int) -> Received:
        source = layer.inputs[slot]
        value, there, behind = self.values[source], list[tuple[ClaimedStorage, Floats]](), None
        if isinstance(value, StageResult):
            there.append((value.storage, value.size * ~value.held))
            behind = None if value.held.any() else value.storage
        elif isinstance(value, Received):
            behind = None if value.held.any() else value.behind
            if behind is not None and self.users[source] == {layer.name}:
                # The view's own input, of `need` bytes or more: in the storage behind it, or in one that was received,
                # which is claimed no more once this layer has read it. So at most one of them is counted.
                there.append((behind, value.need))
        return replace(self._received(layer, slot, there, self._need(layer, slot), "shared"), behind=behind)

    def _received(
        self, layer: Layer, slot: int, there: list[tuple[ClaimedStorage, Floats]], need: Floats, kind: ClaimKind
    ) -> Received:
        edge, leaf = (layer.inputs[slot], layer.name, slot), self.ledger.storage()
        if slot == 0 and layer.name in self.stages:
            need = np.maximum(need, self.stages[layer.name][0].padded * (need > 0))
        working = self._of_edge(leaf, edge, ALWAYS, need, local=False)
        return Received(edge, there, leaf, need, working, np.zeros(need.shape, np.bool_), kind)

    def _compute(self, pass_: str, layer: Layer, on: Mask, saving: Mask) -> StageResult | Received | None:
        """Its result. on, saving: (V, 1) which configurations compute it now, and save what its backward pass reads."""
        ledger, name, given = self.ledger, layer.name, self.received.pop(layer.name, {})
        saved = self.saved.setdefault(name, [[] for _ in self.stages[name]])
        gathered = self._new(name, self.parameters[name].gathered * on)
        out: StageResult | Received | None = None
        last = self.stages[name][-1]
        for number, stage in enumerate(self.stages[name]):
            before, mine, done = out, list[Claim](), list[Claim]()
            copies = dict[int, StageResult]()
            keeps = saving if stage.tracked else np.zeros_like(saving)
            if stage.view:
                out = before if number else given[0]
            else:
                mine = self._new(name, (stage.extra - stage.padded) * keeps) + self._copy(layer, number, keeps)
                copies = {slot: self._made(name, size * on) for slot, size in stage.copies.items()}
                copies[WEIGHTS], out = self._made(name, stage.weights * on), self._made(name, stage.made * on)
                done += [claim for copy in copies.values() for claim in copy.working]
                spike = self._new(name, stage.forward * on + (stage.extra - stage.padded) * (on & ~keeps))
                ledger.instant(f"{pass_} {name} {number}")
                ledger.drop(spike)
            if stage.tracked and self.flows[name]:
                where = ((self.at[name].table(stage.saved.inputs) > 0) | (stage.padded > 0)) & keeps
                whole = np.broadcast_to(keeps, where.shape)
                read: dict[int, StageResult | Received | None] = {BEFORE: before}
                read |= {slot: given[slot] for slot in stage.slots}
                read |= copies
                for slot, ref in read.items():
                    mine += self._keep(name, ref, whole if slot == WEIGHTS else where)
                if stage.saved.output and isinstance(out, StageResult) and on.all() and stage is last:
                    mine += self._keep_output(name, out, whole)
                elif stage.saved.output:
                    mine += self._keep(name, out, whole)
            saved[number] += mine
            if before is not None and before is not out and before not in given.values():
                done += before.working
            ledger.drop(done)
        if not self.flows[name]:
            ledger.drop([claim for mine in saved for claim in mine])
        ledger.drop(gathered + [claim for ref in given.values() if ref is not out for claim in ref.working])
        return out

    def _copy(self, layer: Layer, number: int, keeps: Mask | bool = True) -> list[Claim]:
        """A padded copy of a layer's first input, where that does not travel."""
        size = self.stages[layer.name][number].padded * keeps
        if not size.any():
            return []
        return self._of_edge(self.ledger.storage(), (layer.inputs[0], layer.name, 0), ALWAYS, size, local=True)

    def _made(self, name: str, size: Floats) -> StageResult:
        storage = self.ledger.storage()
        return StageResult(storage, size, self.ledger.hold(storage, name, "sure", size), np.zeros(size.shape, np.bool_))

    def _keep(self, name: str, ref: StageResult | Received | None, where: Mask) -> list[Claim]:
        """Claims what is saved for the backward pass. What another stage keeps until later is its own already."""
        if ref is None:
            return []
        more = (where & ~ref.held).astype(np.float64)
        ref.held = ref.held | where
        if isinstance(ref, StageResult):
            return self.ledger.hold(ref.storage, name, "own", ref.size * more)
        claims = self.ledger.hold(ref.leaf, ref.edge, "own", ALWAYS, ref.need * more, local=False)
        here = more * (ref.need > 0) if ref.edge[2] else more * ((ref.need > 0) & (self.stages[name][0].padded == 0))
        for storage, free in ref.there:
            claims += self.ledger.hold(storage, ref.edge, ref.kind, free, here, local=True)
        return claims

    def _keep_output(self, name: str, out: StageResult, where: Mask) -> list[Claim]:
        """Claims a saved output, where no reader saves it within what it receives (`partition.blocks.saved_within`)."""
        if name not in self.within:
            return self._keep(name, out, where)
        reader, slot = self.within[name]
        first, edge = self.stages[reader][0], (name, reader, slot)
        kept = ((self.at[reader].table(first.saved.inputs) > 0) | (first.padded > 0)) & ~self.recomputed[reader]
        size: Floats = out.size * (where & ~out.held)
        out.held = out.held | where
        self.moved[name] = size, kept.astype(np.float64)
        claims = self.ledger.hold(out.storage, edge, "own", size, np.ones(kept.shape), local=True)
        return claims + self.ledger.hold(out.storage, edge, "own", size, (~kept).astype(np.float64), local=False)

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

    # ---- what is recomputed ----

    def keep(self, instruction: Keep) -> None:
        """Claims what a layer is recomputed from, unless that is recomputed with it; running statistics of before."""
        layer, name = self.model.graph[instruction.layer], instruction.layer
        where, on = self.at[name], self.recomputed[name]
        kept, always = self.sources.setdefault(instruction.block, []), np.broadcast_to(1.0 * on, where.full)
        for slot, source in enumerate(layer.inputs):
            value = self.values[source]
            if isinstance(value, StageResult):
                free, edge = value.size * ~value.held * self._original(layer, source), (source, name, slot)
                for local in (True, False):
                    kept += self.ledger.hold(value.storage, edge, "source", free, always, local=local)
        for _, p, dtype in layer.remembered:
            size = where.table(where.place.at(p.epilogue).needs(p.maps).volume * ITEM_BYTES[dtype])
            kept += self._new(name, size * where.table(where.place.computed.active) * on)

    def forget(self, instruction: Forget) -> None:
        """The block has been recomputed."""
        self.ledger.drop(self.sources.pop(instruction.block, []))

    def _original(self, layer: Layer, source: str) -> Mask:
        """(V_u, 1) where a layer's source is not recomputed with it."""
        same = self.blocks.get(source) == self.blocks[layer.name]
        return ~self.recomputed[source] if same else np.ones_like(self.recomputed[source])

    def _recompute(self, layer: Layer) -> None:
        on = self.recomputed[layer.name]
        made = self.remade[layer.name] = self._compute("recomputed", layer, on, on)
        self.ledger.drop(made.working if made else [])

    def _receive_recomputed(self, layer: Layer, slot: int) -> Received:
        source, there, on = layer.inputs[slot], list[tuple[ClaimedStorage, Floats]](), self.recomputed[layer.name]
        value = self.values[source]
        if isinstance(value, StageResult):
            there.append((value.storage, value.size * ~value.held * self._original(layer, source)))
        if self.blocks.get(source) == self.blocks[layer.name]:
            made = self.remade.get(source)
            there += [(made.storage, made.size * ~made.held)] if isinstance(made, StageResult) else []
        return self._received(layer, slot, there, self._need(layer, slot) * on, "recomputed")
