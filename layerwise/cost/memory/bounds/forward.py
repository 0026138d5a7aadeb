"""The forward pass of a step, and the layers that are made again in the backward pass, as `step` has them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from layerwise.cost.memory.bounds.claims import Claim, Kind, Storage
from layerwise.cost.memory.bounds.followed import ALWAYS, WEIGHTS, Followed, Given, Made
from layerwise.cost.memory.kernels import BEFORE
from layerwise.geometry.arrays import Floats, Mask
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.tensor import ITEM_BYTES


class Forward(Followed):
    """What layers make, and what is kept of it for the backward pass."""

    def _forward(self, layer: Layer) -> None:
        if layer.role is Role.TIED:  # the parameter itself
            self.values[layer.name] = None
        elif layer.role in (Role.INPUT, Role.CONSTANT):  # whoever feeds it keeps it
            size, storage = self._own_bytes(layer.name), self.ledger.storage()
            self.ledger.hold(storage, layer.name, "sure", size)
            self.values[layer.name] = Made(storage, size, [], np.ones(size.shape, np.bool_))
        else:
            given = [self._given(layer, slot) for slot in range(len(layer.inputs))]
            again = self.recomputed[layer.name]
            self._keep_sources(layer, again)
            self.values[layer.name] = self._compute("forward", layer, given, np.ones_like(again), ~again)

    def _given(self, layer: Layer, slot: int) -> Given:
        source = layer.inputs[slot]
        self.local[source, layer.name, slot] = self._locality(layer, slot)
        value, there, behind = self.values[source], list[tuple[Storage, Floats]](), None
        if isinstance(value, Made):
            there.append((value.storage, value.size * ~value.held))
            behind = None if value.held.any() else value.storage
        elif isinstance(value, Given):
            behind = None if value.held.any() else value.behind
            if behind is not None and self.users[source] == {layer.name}:
                # The view's own input, of `need` bytes or more: in the storage behind it, or in one that was received,
                # which is claimed no more once this layer has read it. So at most one of them is counted.
                there.append((behind, value.need))
        return replace(self._received(layer, slot, there, self._need(layer, slot), "shared"), behind=behind)

    def _received(
        self, layer: Layer, slot: int, there: list[tuple[Storage, Floats]], need: Floats, kind: Kind
    ) -> Given:
        edge, leaf = (layer.inputs[slot], layer.name, slot), self.ledger.storage()
        if slot == 0 and layer.name in self.stages:
            need = np.maximum(need, self.stages[layer.name][0].padded * (need > 0))
        working = self._of_edge(leaf, edge, ALWAYS, need, local=False)
        return Given(edge, there, leaf, need, working, np.zeros(need.shape, np.bool_), kind)

    def _compute(self, pass_: str, layer: Layer, given: list[Given], on: Mask, saving: Mask) -> Made | Given | None:
        """Its result. on, saving: (V, 1) which configurations compute it now, and keep what its backward pass reads."""
        ledger, name = self.ledger, layer.name
        saved = self.saved.setdefault(name, [[] for _ in self.stages[name]])
        gathered = self._new(name, self.parameters[name].gathered * on)
        out: Made | Given | None = None
        last = self.stages[name][-1]
        for number, stage in enumerate(self.stages[name]):
            before, mine, done = out, list[Claim](), list[Claim]()
            copies = dict[int, Made]()
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
                where = ((self.at[name].table(stage.kept.inputs) > 0) | (stage.padded > 0)) & keeps
                whole = np.broadcast_to(keeps, where.shape)
                read: dict[int, Made | Given | None] = {BEFORE: before}
                read |= {slot: given[slot] for slot in self._slots(layer, number)}
                read |= copies
                for slot, ref in read.items():
                    mine += self._keep(name, ref, whole if slot == WEIGHTS else where)
                if stage.kept.output and isinstance(out, Made) and on.all() and stage is last:
                    mine += self._keep_output(name, out, whole)
                elif stage.kept.output:
                    mine += self._keep(name, out, whole)
            saved[number] += mine
            if before is not None and before is not out and before not in given:
                done += before.working
            ledger.drop(done)
        if not self.flows[name]:
            ledger.drop([claim for mine in saved for claim in mine])
        ledger.drop(gathered + [claim for ref in given if ref is not out for claim in ref.working])
        return out

    def _copy(self, layer: Layer, number: int, keeps: Mask | bool = True) -> list[Claim]:
        """A padded copy of a layer's first input, where that does not travel."""
        size = self.stages[layer.name][number].padded * keeps
        if not size.any():
            return []
        return self._of_edge(self.ledger.storage(), (layer.inputs[0], layer.name, 0), ALWAYS, size, local=True)

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
        here = more * (ref.need > 0) if ref.edge[2] else more * ((ref.need > 0) & (self.stages[name][0].padded == 0))
        for storage, free in ref.there:
            claims += self.ledger.hold(storage, ref.edge, ref.kind, free, here, local=True)
        return claims

    def _keep_output(self, name: str, out: Made, where: Mask) -> list[Claim]:
        """For the backward pass, where no reader keeps it in what it is given (`partition.within`)."""
        if name not in self.within:
            return self._keep(name, out, where)
        reader, slot = self.within[name]
        first, edge = self.stages[reader][0], (name, reader, slot)
        kept = ((self.at[reader].table(first.kept.inputs) > 0) | (first.padded > 0)) & ~self.recomputed[reader]
        size: Floats = out.size * (where & ~out.held)
        out.held = out.held | where
        self.moved[name] = size, kept.astype(np.float64)
        claims = self.ledger.hold(out.storage, edge, "own", size, np.ones(kept.shape), local=True)
        return claims + self.ledger.hold(out.storage, edge, "own", size, (~kept).astype(np.float64), local=False)

    # ---- what is made again ----

    def _keep_sources(self, layer: Layer, again: Mask) -> None:
        """What a recomputed layer is made of, as far as it is not made again with it; running statistics of before."""
        if not again.any():
            return
        name, where = layer.name, self.at[layer.name]
        kept, always = self.kept.setdefault(self.blocks[name], []), np.broadcast_to(1.0 * again, where.full)
        for slot, source in enumerate(layer.inputs):
            value = self.values[source]
            if isinstance(value, Made):
                free, edge = value.size * ~value.held * self._original(layer, source), (source, name, slot)
                for local in (True, False):
                    kept += self.ledger.hold(value.storage, edge, "kept", free, always, local=local)
        for _, p, dtype in layer.remembered:
            size = where.table(where.place.at(p.epilogue).needs(p.maps).volume * ITEM_BYTES[dtype])
            kept += self._new(name, size * where.table(where.place.computed.active) * again)

    def _original(self, layer: Layer, source: str) -> Mask:
        """(V_u, 1) where a layer's source is not made again with it."""
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
                made = self.again[name] = self._compute("again", layer, given, again, again)
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
