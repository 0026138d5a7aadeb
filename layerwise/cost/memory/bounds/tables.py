"""Bounds: the memory of a step as sums over layers and edges, so that a search can bound it.

The memory at an instant is no sum over layers: a tensor that is kept by its layer and by a consumer that reads it as it
lies is one storage. `lifetimes` claims of each storage no more than there is of it, whatever the configurations. So at
every instant and on every device the sum of the tables is at most what `step.peak_bytes` counts.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from layerwise.cost.memory.bounds.claims import Claim
from layerwise.cost.memory.bounds.lifetimes import Lifetimes
from layerwise.cost.memory.bounds.travels import Part
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.geometry.arrays import Floats, Mask


@dataclass(frozen=True, slots=True)
class MemoryTables:
    """The bytes of one instant on one device: their sum is at most `peak_bytes` of that device, for every strategy."""

    instant: str
    device: int
    node: dict[str, Floats]  # (C_l,) bytes
    edge: dict[EdgeName, Floats]  # (C_u, C_v) bytes; only edges that have something


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The K claims of one owner, which lie together in all claims."""

    source: Floats  # (C, K, N)
    target: Floats | None  # (C_v, K, N)
    local: Mask  # (K,)


class MemoryBounds:
    """Lower bounds of the memory of all strategies over some configurations.

    `instants` are those of a step, in their order: the forward pass of every stage of every layer, the loss, the
    backward pass, the update.
    """

    def __init__(self, model: CostModel, configs: Configs) -> None:
        """configs: of every layer, inputs and sink included, as for `CostModel.tables`."""
        lifetimes = Lifetimes(model, configs)
        self.instants: tuple[str, ...] = tuple(lifetimes.ledger.instants)
        self.devices = model.devices.count
        self._counts = {name: len(rows) for name, rows in configs.items()}
        self._known: dict[tuple[EdgeName, Part, int, int], Floats] = {}
        self._index = {name: i for i, name in enumerate(self.instants)}
        self._local = lifetimes.local
        self._claims: dict[str | EdgeName, list[Claim]] = {layer.name: [] for layer in model.graph.layers}
        self._travels = lifetimes.travels
        self._parts: dict[tuple[EdgeName, Part], list[Claim]] = {}
        for claim in lifetimes.ledger.entries():
            if claim.part is None:
                self._claims.setdefault(claim.owner, []).append(claim)
            elif not isinstance(claim.owner, str):
                self._parts.setdefault((claim.owner, claim.part), []).append(claim)
        self._rows = {owner: self._stack(claims) for owner, claims in self._claims.items() if claims}
        everyone = [claim for claims in self._claims.values() for claim in claims]
        self._first = np.array([claim.first for claim in everyone], np.int64)
        self._last = np.array([claim.last for claim in everyone], np.int64)

    def _stack(self, claims: list[Claim]) -> _Rows:
        one, n = claims[0], self.devices
        source = [np.broadcast_to(c.source, (len(c.source), n)) for c in claims]
        rows = max(map(len, source))
        sources = np.stack([np.broadcast_to(s, (rows, n)) for s in source], axis=1)
        targets = None if one.target is None else _stack_targets(claims, n)
        return _Rows(sources, targets, np.array([claim.local for claim in claims], np.bool_))

    def tables(self, instant: str, device: int) -> MemoryTables:
        """Of one of the `instants` on one device."""
        now = self._index[instant]
        node: dict[str, Floats] = {}
        edge: dict[EdgeName, Floats] = {}
        for owner, claims in self._claims.items():
            alive = [i for i, claim in enumerate(claims) if claim.first <= now < claim.last]
            if isinstance(owner, str):
                none = np.zeros(self._counts[owner])
                node[owner] = sum((self._rows[owner].source[:, i, device] for i in alive), none)
            elif alive:
                edge[owner] = self._edge_table(owner, alive, device)
        for (name, part), claims in self._parts.items():
            if any(claim.first <= now < claim.last for claim in claims):
                u, v = (np.arange(count) for count in self._local[name].shape)
                travelling = self._travels[name].bytes(part, u[:, None], v[None], np.array(device))
                edge[name] = edge[name] + travelling if name in edge else travelling
        return MemoryTables(instant, device, node, {name: table for name, table in edge.items() if table.any()})

    def _edge_table(self, owner: EdgeName, alive: list[int], device: int) -> Floats:
        rows, mask = self._rows[owner], self._local[owner]
        assert rows.target is not None
        table = np.zeros(mask.shape)
        for i in alive:
            pairs = rows.source[:, i, device][:, None] * rows.target[:, i, device]
            table += np.where(mask == rows.local[i], pairs, 0.0)
        return table

    def at(self, choice: Mapping[str, int]) -> Floats:
        """(instants, devices) bytes: the sums of all tables under one strategy, the index of each layer's own."""
        parts = [self._bytes(owner, rows, choice) for owner, rows in self._rows.items()]
        sizes = np.concatenate(parts)
        change = np.zeros((len(self.instants) + 1, self.devices))
        np.add.at(change, self._first, sizes)
        np.subtract.at(change, self._last, sizes)
        for (name, part), claims in self._parts.items():
            if not self._local[name][choice[name[0]], choice[name[1]]]:
                size = self._travelling(name, part, choice)
                for claim in claims:
                    change[claim.first] += size
                    change[claim.last] -= size
        total: Floats = change[:-1].cumsum(0)
        return total

    def _travelling(self, edge: EdgeName, part: Part, choice: Mapping[str, int]) -> Floats:
        """(N,)."""
        u, v = choice[edge[0]], choice[edge[1]]
        if (edge, part, u, v) not in self._known:
            size = self._travels[edge].bytes(part, np.array(u), np.array(v), np.arange(self.devices))
            self._known[edge, part, u, v] = size
        return self._known[edge, part, u, v]

    def _bytes(self, owner: str | EdgeName, rows: _Rows, choice: Mapping[str, int]) -> Floats:
        """(K, N)."""
        if isinstance(owner, str):
            alone: Floats = rows.source[choice[owner]]
            return alone
        assert rows.target is not None
        u, v = choice[owner[0]], choice[owner[1]]
        here = rows.local == self._local[owner][u, v]
        source = rows.source[u if len(rows.source) > 1 else 0]
        result: Floats = source * rows.target[v if len(rows.target) > 1 else 0] * here[:, None]
        return result


def _stack_targets(claims: list[Claim], devices: int) -> Floats:
    targets = [np.ones((1, 1)) if claim.target is None else claim.target for claim in claims]
    rows = max(map(len, targets))
    return np.stack([np.broadcast_to(target, (rows, devices)) for target in targets], axis=1)
