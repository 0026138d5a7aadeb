"""Bounds: the memory of a step as sums over layers and edges, so that a search can bound it.

The memory at an instant is no sum over layers: a tensor that is kept by its layer and by a consumer that reads it as it
lies is one storage. `lifetimes` claims of each storage no more than there is of it, whatever the configurations. So at
every instant and on every device the sum of the tables is at most what `step.peak_bytes` counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import numpy as np

from layerwise.cost.memory.bounds.claims import Claim, Ledger, Owner
from layerwise.cost.memory.bounds.lifetimes import Lifetimes
from layerwise.cost.memory.bounds.stacked import Part
from layerwise.cost.model import Configs, CostModel, EdgeName
from layerwise.geometry.arrays import Floats, Ints, Mask


@dataclass(frozen=True, slots=True, eq=False)
class _OwnerClaims:
    """The K claims of one owner, which lie together in all claims."""

    source: Floats  # (V, K, N)
    target: Floats | None  # (V_v, K, N)
    local: Mask  # (K,)


class _Bases:
    """Groups of a layer's V configurations that are alike in an edge's tables, and C that are in cells."""

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


class _Weighed:
    """Claims of which the bytes may be added up."""

    def __init__(self, claims: Iterable[Claim], devices: int) -> None:
        self.claims: dict[Owner, list[Claim]] = {}
        self.parts: dict[tuple[EdgeName, Part], list[Claim]] = {}
        for claim in claims:
            if claim.part is None:
                self.claims.setdefault(claim.owner, []).append(claim)
            elif not isinstance(claim.owner, str):
                self.parts.setdefault((claim.owner, claim.part), []).append(claim)
        self.rows = {owner: _stack(claims, devices) for owner, claims in self.claims.items()}
        everyone = [claim for claims in self.claims.values() for claim in claims]
        self._first = _Sums([claim.first for claim in everyone])
        self._last = _Sums([claim.last for claim in everyone])
        self._at: dict[Owner, object] = {}  # what of each owner `_sizes` are of: choices differ in few layers
        ends = np.cumsum([0, *map(len, self.claims.values())]).tolist()
        self._slices = {owner: slice(*pair) for owner, pair in zip(self.rows, pairwise(ends), strict=True)}
        self._sizes = np.zeros((len(everyone), devices))

    def add(self, change: Floats, choice: Mapping[str, int], local: Mapping[EdgeName, bool]) -> None:
        """Adds to `change` (instants + 1, devices) what is claimed more than an instant before; but of shards."""
        for owner, rows in self.rows.items():
            if isinstance(owner, str):
                at: object = choice[owner]
            else:
                at = choice[owner[0]], choice[owner[1]], local[owner]
            if self._at.get(owner) != at:
                self._sizes[self._slices[owner]] = _bytes(owner, rows, choice, local)
                self._at[owner] = at
        if self.rows:
            change[self._first.at] += self._first.of(self._sizes)
            change[self._last.at] -= self._last.of(self._sizes)


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
        lifetimes = Lifetimes(model, configs)
        self.instants: tuple[str, ...] = tuple(lifetimes.ledger.instants)
        self.devices = model.devices.count
        self._known: dict[tuple[EdgeName, Part, int, int], Floats] = {}
        self._index = {name: i for i, name in enumerate(self.instants)}
        twice = {n for n in self.instants if self.instants.count(n) > 1}
        assert not twice, f"two instants of one name: {sorted(twice)}"
        self._local = lifetimes.local  # by cells, as they were counted first
        self._travels = lifetimes.travels
        cells = {name: lifetimes.at[name].rows for name in configs}
        self._over(cells, base, lifetimes.ledger)

    def _over(self, cells: Mapping[str, Ints], base: Mapping[str, Ints] | None, ledger: Ledger) -> None:
        """cells: (V_l,) which each configuration has."""
        self._counts = {name: len(rows) for name, rows in cells.items()}
        self._bases = {
            name: _Bases(np.arange(len(rows)) if base is None else base[name], rows) for name, rows in cells.items()
        }
        self._ledger = ledger
        self._alone = _Weighed(ledger.entries(shared=False), self.devices)
        self._shared = _Weighed(ledger.entries(shared=True), self.devices)

    def restrict(self, keep: Mapping[str, Mask], base: Mapping[str, Ints]) -> MemoryBounds:
        """Over the configurations that are kept (V_l,), and groups of these: sooner made than anew."""
        other = copy(self)
        cells = {name: bases.cells[keep[name]] for name, bases in self._bases.items()}
        local = {edge: mask[np.ix_(cells[edge[0]], cells[edge[1]])] for edge, mask in self._local.items()}
        other._over(cells, base, self._ledger.restrict(keep, local))
        return other

    def near(self, favour: Mapping[str, int]) -> MemoryBounds:
        """Other bounds, which are near the memory of one strategy: the index of each layer's configuration."""
        other = copy(self)
        entries = self._ledger.entries(shared=True, holds=partial(self._holds, favour))
        other._shared = _Weighed(entries, self.devices)
        return other

    def _holds(self, choice: Mapping[str, int], claim: Claim) -> bool:
        """True if there is anything of a claim under a strategy."""
        if isinstance(claim.owner, str) or claim.target is None:
            return bool(_row(claim.source, choice[str(claim.owner)]).any())
        u, v = (choice[end] for end in claim.owner[:2])
        if self._local[claim.owner][self._bases[claim.owner[0]].cells[u], self._bases[claim.owner[1]].cells[v]] != (
            claim.local
        ):
            return False
        return bool((_row(claim.source, u) * _row(claim.target, v)).any())

    def tables(self, instant: str, device: int) -> tuple[dict[str, Floats], dict[EdgeName, Floats]]:
        """The bytes of one of the `instants` on one device: (V_l,) of layers, (B_u, B_v) of edges that have any.

        Their sum is at most `peak_bytes` of that device, for every strategy.
        """
        now = self._index[instant]
        node = {name: np.zeros(count) for name, count in self._counts.items()}
        edge: dict[EdgeName, Floats] = {}
        for weighed in (self._alone, self._shared):
            for owner, claims in weighed.claims.items():
                alive = [i for i, claim in enumerate(claims) if claim.first <= now < claim.last]
                rows = weighed.rows[owner]
                if isinstance(owner, str):
                    node[owner] = sum((rows.source[:, i, device] for i in alive), node[owner])
                elif alive:
                    table = self._edge_table(owner, rows, alive, device)
                    edge[owner] = edge[owner] + table if owner in edge else table
            for (name, part), claims in weighed.parts.items():
                if any(claim.first <= now < claim.last for claim in claims):
                    u, v = (np.arange(count) for count in self._local[name].shape)
                    cells = self._travels[name].bytes(part, u[:, None], v[None], np.array(device))
                    travelling = cells[self._pairs(name)]
                    edge[name] = edge[name] + travelling if name in edge else travelling
        return node, {name: table for name, table in edge.items() if table.any()}

    def _pairs(self, edge: EdgeName) -> tuple[Ints, ...]:
        """The entries of a table over cells for the (B_u, B_v) bases."""
        return np.ix_(self._bases[edge[0]].of_base, self._bases[edge[1]].of_base)

    def _edge_table(self, owner: EdgeName, rows: _OwnerClaims, alive: list[int], device: int) -> Floats:
        mask = self._local[owner][self._pairs(owner)]
        assert rows.target is not None
        source, target = (self._bases[end] for end in owner[:2])
        table = np.zeros(mask.shape)
        for i in alive:
            pairs = source.least(rows.source[:, i, device])[:, None] * target.least(rows.target[:, i, device])
            table += np.where(mask == rows.local[i], pairs, 0.0)
        return table

    def at(self, choice: Mapping[str, int]) -> Floats:
        """(instants, devices) bytes: the sums of all tables under one strategy, the index of each layer's own."""
        return self.at_each([self], choice)[0]

    @staticmethod
    def at_each(bounds: Sequence[MemoryBounds], choice: Mapping[str, int]) -> list[Floats]:
        """`at` of bounds of which all but the first are `near` some strategy: what nobody shares is the same."""
        first = bounds[0]
        cells = {name: int(bases.cells[choice[name]]) for name, bases in first._bases.items()}
        local = {edge: bool(mask[cells[edge[0]], cells[edge[1]]]) for edge, mask in first._local.items()}
        change = np.zeros((len(first.instants) + 1, first.devices))
        first._alone.add(change, choice, local)
        for (edge, part), claims in first._alone.parts.items():
            if not local[edge]:
                size = first._travelling(edge, part, cells[edge[0]], cells[edge[1]])
                for claim in claims:
                    change[claim.first] += size
                    change[claim.last] -= size
        found = list[Floats]()
        for each in bounds:
            changes = change.copy()
            each._shared.add(changes, choice, local)
            found.append(changes[:-1].cumsum(0))
        return found

    def _travelling(self, edge: EdgeName, part: Part, u: int, v: int) -> Floats:
        """(N,), by cells of the ends."""
        if (edge, part, u, v) not in self._known:
            size = self._travels[edge].bytes(part, np.array(u), np.array(v), np.arange(self.devices))
            self._known[edge, part, u, v] = size
        return self._known[edge, part, u, v]


def _stack(claims: list[Claim], devices: int) -> _OwnerClaims:
    sources = _together([claim.source for claim in claims], devices)
    targets = [np.ones((1, 1)) if claim.target is None else claim.target for claim in claims]
    target = None if claims[0].target is None else _together(targets, devices)
    return _OwnerClaims(sources, target, np.array([claim.local for claim in claims], np.bool_))


def _together(sizes: Sequence[Floats], devices: int) -> Floats:
    """(V, K, N) of K arrays (V, N) or (1, N)."""
    rows = max(map(len, sizes))
    return np.stack([np.broadcast_to(size, (rows, devices)) for size in sizes], axis=1)


def _bytes(owner: Owner, rows: _OwnerClaims, choice: Mapping[str, int], local: Mapping[EdgeName, bool]) -> Floats:
    """(K, N)."""
    if isinstance(owner, str):
        alone: Floats = rows.source[choice[owner]]
        return alone
    assert rows.target is not None
    ends = _row(rows.source, choice[owner[0]]) * _row(rows.target, choice[owner[1]])
    result: Floats = ends * (rows.local == local[owner])[:, None]
    return result


def _row(sizes: Floats, number: int) -> Floats:
    """(..., N) of (V, ..., N), or of (1, ..., N) for all."""
    row: Floats = sizes[number if len(sizes) > 1 else 0]
    return row
