"""Bounds: the memory of a step as sums over layers and edges, so that a search can bound it.

The memory at an instant is no sum over layers: a tensor that is kept by its layer and by a consumer that reads it as it
lies is one storage. `lifetimes` claims of each storage no more than there is of it, whatever the configurations. So at
every instant and on every device the sum of the tables is at most what `step.peak_bytes` counts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial

import numpy as np

from layerwise.cost.memory.bounds.claims import Claim, Holds
from layerwise.cost.memory.bounds.lifetimes import Lifetimes
from layerwise.cost.memory.bounds.travels import Part
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.geometry.arrays import Floats, Ints, Mask


@dataclass(frozen=True, slots=True)
class MemoryTables:
    """The bytes of one instant on one device: their sum is at most `peak_bytes` of that device, for every strategy."""

    instant: str
    device: int
    node: dict[str, Floats]  # (V_l,) bytes
    edge: dict[EdgeName, Floats]  # (B_u, B_v) bytes; only edges that have something


@dataclass(frozen=True, slots=True, eq=False)
class _Rows:
    """The K claims of one owner, which lie together in all claims."""

    source: Floats  # (V, K, N)
    target: Floats | None  # (V_v, K, N)
    local: Mask  # (K,)


class _Bases:
    """Of a layer's V configurations, groups of those that are alike in an edge's tables, and C that are in cells."""

    def __init__(self, base: Ints, cells: Ints) -> None:
        self.cells = cells  # (V,) which each has
        self.order = np.argsort(base, kind="stable")
        self.first = np.flatnonzero(np.diff(base[self.order], prepend=-1))
        self.of_base = cells[self.order[self.first]]  # (B,)

    def least(self, sizes: Floats) -> Floats:
        """(B,) of (V,) bytes, or of (1,) for all."""
        if len(sizes) == 1:
            return sizes
        least: Floats = np.minimum.reduceat(sizes[self.order], self.first)
        return least


class _Sums:
    """Sums of rows that have the same number."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self._order = np.argsort(numbers, kind="stable")
        self.at, self._first = np.unique(np.array(numbers, np.int64)[self._order], return_index=True)

    def of(self, rows: Floats) -> Floats:
        """(numbers `at`, ...) of (K, ...)."""
        sums: Floats = np.add.reduceat(rows[self._order], self._first, axis=0)
        return sums


class MemoryBounds:
    """Lower bounds of the memory of all strategies over some configurations.

    `instants` are those of a step, in their order: the forward pass of every stage of every layer, the loss, the
    backward pass, the update.
    """

    def __init__(self, model: CostModel, configs: Configs, base: Mapping[str, Ints] | None = None) -> None:
        """configs: of every layer, inputs and sink included, as for `CostModel.tables`.

        base: (V_l,) groups of these, counted from 0, which have the same cells: tables of edges are over the groups,
        with the least of each. By default each is its own.
        """
        lifetimes = self._lifetimes = Lifetimes(model, configs)
        self._bases = {
            name: _Bases(np.arange(len(rows)) if base is None else base[name], lifetimes.at[name].rows)
            for name, rows in configs.items()
        }
        self.instants: tuple[str, ...] = tuple(lifetimes.ledger.instants)
        self.devices = model.devices.count
        self._counts = {name: len(rows) for name, rows in configs.items()}
        self._known: dict[tuple[EdgeName, Part, int, int], Floats] = {}
        self._index = {name: i for i, name in enumerate(self.instants)}
        twice = {n for n in self.instants if self.instants.count(n) > 1}
        assert not twice, f"two instants of one name: {sorted(twice)}"
        self._local = lifetimes.local
        self._travels = lifetimes.travels
        self._weigh(lambda _: False)

    def near(self, favour: Mapping[str, int]) -> MemoryBounds:
        """Other bounds, which are near the memory of one strategy: the index of each layer's configuration."""
        other = copy(self)
        other._weigh(partial(self._holds, favour))
        return other

    def _weigh(self, holds: Holds) -> None:
        """Divides storages among those who may hold them. holds: who is likely to."""
        self._claims: dict[str | EdgeName, list[Claim]] = {name: [] for name in self._counts}
        self._parts: dict[tuple[EdgeName, Part], list[Claim]] = {}
        for claim in self._lifetimes.ledger.entries(holds):
            if claim.part is None:
                self._claims.setdefault(claim.owner, []).append(claim)
            elif not isinstance(claim.owner, str):
                self._parts.setdefault((claim.owner, claim.part), []).append(claim)
        self._rows = {owner: self._stack(claims) for owner, claims in self._claims.items() if claims}
        everyone = [claim for claims in self._claims.values() for claim in claims]
        self._first = _Sums([claim.first for claim in everyone])
        self._last = _Sums([claim.last for claim in everyone])

    def _holds(self, choice: Mapping[str, int], claim: Claim) -> bool:
        """Whether there is anything of a claim under a strategy."""
        if isinstance(claim.owner, str) or claim.target is None:
            return bool(_row(claim.source, choice[str(claim.owner)]).any())
        if self._is_local(claim.owner, choice) != claim.local:
            return False
        u, v = (choice[end] for end in claim.owner[:2])
        return bool((_row(claim.source, u) * _row(claim.target, v)).any())

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
                cells = self._travels[name].bytes(part, u[:, None], v[None], np.array(device))
                travelling = cells[self._pairs(name)]
                edge[name] = edge[name] + travelling if name in edge else travelling
        return MemoryTables(instant, device, node, {name: table for name, table in edge.items() if table.any()})

    def _pairs(self, edge: EdgeName) -> tuple[Ints, ...]:
        """Of a table over cells those of the (B_u, B_v) bases."""
        return np.ix_(self._bases[edge[0]].of_base, self._bases[edge[1]].of_base)

    def _edge_table(self, owner: EdgeName, alive: list[int], device: int) -> Floats:
        rows, mask = self._rows[owner], self._local[owner][self._pairs(owner)]
        assert rows.target is not None
        source, target = (self._bases[end] for end in owner[:2])
        table = np.zeros(mask.shape)
        for i in alive:
            pairs = source.least(rows.source[:, i, device])[:, None] * target.least(rows.target[:, i, device])
            table += np.where(mask == rows.local[i], pairs, 0.0)
        return table

    def at(self, choice: Mapping[str, int]) -> Floats:
        """(instants, devices) bytes: the sums of all tables under one strategy, the index of each layer's own."""
        parts = [self._bytes(owner, rows, choice) for owner, rows in self._rows.items()]
        sizes = np.concatenate(parts)
        change = np.zeros((len(self.instants) + 1, self.devices))
        change[self._first.at] += self._first.of(sizes)
        change[self._last.at] -= self._last.of(sizes)
        for (name, part), claims in self._parts.items():
            if not self._is_local(name, choice):
                size = self._travelling(name, part, choice)
                for claim in claims:
                    change[claim.first] += size
                    change[claim.last] -= size
        total: Floats = change[:-1].cumsum(0)
        return total

    def _travelling(self, edge: EdgeName, part: Part, choice: Mapping[str, int]) -> Floats:
        """(N,)."""
        u, v = self._cells(edge, choice)
        if (edge, part, u, v) not in self._known:
            size = self._travels[edge].bytes(part, np.array(u), np.array(v), np.arange(self.devices))
            self._known[edge, part, u, v] = size
        return self._known[edge, part, u, v]

    def _cells(self, edge: EdgeName, choice: Mapping[str, int]) -> tuple[int, int]:
        u, v = (int(self._bases[end].cells[choice[end]]) for end in edge[:2])
        return u, v

    def _is_local(self, edge: EdgeName, choice: Mapping[str, int]) -> bool:
        return bool(self._local[edge][self._cells(edge, choice)])

    def _bytes(self, owner: str | EdgeName, rows: _Rows, choice: Mapping[str, int]) -> Floats:
        """(K, N)."""
        if isinstance(owner, str):
            alone: Floats = rows.source[choice[owner]]
            return alone
        assert rows.target is not None
        u, v = choice[owner[0]], choice[owner[1]]
        here = rows.local == self._is_local(owner, choice)
        source = rows.source[u if len(rows.source) > 1 else 0]
        result: Floats = source * rows.target[v if len(rows.target) > 1 else 0] * here[:, None]
        return result


def _row(sizes: Floats, number: int) -> Floats:
    """(N,) of (V, N), or of (1, N) for all."""
    row: Floats = sizes[number if len(sizes) > 1 else 0]
    return row


def _stack_targets(claims: list[Claim], devices: int) -> Floats:
    targets = [np.ones((1, 1)) if claim.target is None else claim.target for claim in claims]
    rows = max(map(len, targets))
    return np.stack([np.broadcast_to(target, (rows, devices)) for target in targets], axis=1)
