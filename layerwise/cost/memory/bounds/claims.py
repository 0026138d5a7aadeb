"""Claims: who holds a storage from when to when, such that what is counted of it never exceeds it.

A storage may be held by several: by the layer that made it, by consumers that read it as it lies, by views. Who does
depends on the configurations of several layers. A sum over layers and edges must count it once at most, so at every
instant its bytes are divided among those who may hold it then.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Literal

import numpy as np

from layerwise.cost.memory.bounds.stacked import Part
from layerwise.cost.setting import EdgeName
from layerwise.geometry.arrays import Floats, Mask

Owner = str | EdgeName  # whose configurations bytes follow from: a layer's, or those of both ends of an edge
# sure: whatever the configurations; own: where `source` is not 0, and nobody else counts it there; shared: perhaps.
# Also shared: source, of which a layer is recomputed; recomputed, by a recomputed layer, which may save the same.
ClaimKind = Literal["sure", "own", "shared", "source", "recomputed"]


@dataclass(slots=True, eq=False)
class Claim:
    """Somebody holds a storage from instant `first` to before instant `last`.

    Bytes of a layer: source (V, N). Of an edge: source[u] * target[v] where the edge is local, or where it is not.
    """

    storage: ClaimedStorage
    owner: Owner
    kind: ClaimKind
    first: int
    source: Floats  # (V, N), by configurations of the layer, or of the edge's producer; of an edge perhaps (1, 1)
    target: Floats | None = None  # (V_v, N), by configurations of the edge's consumer
    local: bool = True  # of an edge: under which pairs of configurations
    last: int = -1  # it has not ended
    part: Part | None = None  # of an edge where it is not local: bytes are those of `Travel`, and source a factor

    def restrict(self, keep: Mapping[str, Mask], local: Mapping[EdgeName, Mask]) -> Claim | None:
        """Over the configurations that are kept (V_l,); None where nothing is held. local: (V_u, V_v) of these."""
        source, target = self.source, self.target
        if isinstance(self.owner, str):
            source = _rows_of(source, keep[self.owner])
        elif (local[self.owner] == self.local).any():
            source = _rows_of(source, keep[self.owner[0]])
            target = None if target is None else _rows_of(target, keep[self.owner[1]])
        else:
            return None
        if not source.any() or (target is not None and not target.any()):
            return None
        return replace(self, source=source, target=target)


Holds = Callable[[Claim], bool]


@dataclass(slots=True, eq=False)
class ClaimedStorage:
    """Memory that tensors share, with all who may ever hold it."""

    claims: list[Claim] = field(default_factory=list)

    @property
    def shared(self) -> bool:
        """True if its division depends on who is likely to hold it."""
        return any(claim.kind not in ("sure", "own") for claim in self.claims)

    def entries(self, end: int, holds: Holds) -> Iterator[Claim]:
        """Entries that may be added up: claims weighted in such a way that at no instant they exceed the storage."""
        claims = [claim for claim in self.claims if (end if claim.last < 0 else claim.last) > claim.first]
        for claim in claims:
            claim.last = end if claim.last < 0 else claim.last
        if len(claims) == 1:  # it has all
            yield claims[0]
            return
        times = sorted({time for claim in claims for time in (claim.first, claim.last)})
        runs: dict[tuple[Claim, ...], list[tuple[int, int, float]]] = {}
        for first, last in pairwise(times):
            alive = [claim for claim in claims if claim.first <= first and last <= claim.last]
            for together, weight in _weights(alive, holds):
                before = runs.setdefault(together, [])
                if before and before[-1][1:] == (first, weight):
                    before[-1] = (before[-1][0], last, weight)
                else:
                    before.append((first, last, weight))
        for together, rows in runs.items():
            claim = _largest(together)
            for first, last, weight in rows:
                yield replace(claim, first=first, last=last, source=claim.source * weight)


def _weights(alive: list[Claim], holds: Holds) -> list[tuple[tuple[Claim, ...], float]]:
    """The sure claims of one owner, of which the largest counts; where there are none, own claims, and shared ones.

    Of an edge those where it is local, and those where it is not. Of what is shared the first owner that `holds` has
    all; where none does, all have equal parts.
    """
    sure = [claim for claim in alive if claim.kind == "sure"]
    if sure:
        best = max(sure, key=_size)
        mine = [claim for claim in sure if claim.owner == best.owner]
        groups = (tuple(claim for claim in mine if claim.local == local) for local in (True, False))
        return [(group, 1.0) for group in groups if group]
    sources = {claim.owner for claim in alive if claim.kind == "source"}
    alive = [claim for claim in alive if claim.kind != "recomputed" or claim.owner not in sources]
    holder = next((claim.owner for claim in alive if claim.kind != "own" and holds(claim)), None)
    if holder is not None:
        return [((claim,), 1.0) for claim in alive if claim.kind == "own" or claim.owner == holder]
    sharers = len({claim.owner for claim in alive if claim.kind != "own"})
    return [((claim,), 1.0 if claim.kind == "own" else 1.0 / sharers) for claim in alive]


def _largest(claims: tuple[Claim, ...]) -> Claim:
    """The largest of an owner's claims on one storage under each configuration, as far as it is a claim."""
    best = max(claims, key=_size)
    for claim in claims:
        if claim.target is None and best.target is None:
            best = replace(best, source=np.maximum(best.source, claim.source))
        elif claim.target is not None and best.target is not None and np.array_equal(claim.source, best.source):
            best = replace(best, target=np.maximum(best.target, claim.target))
    return best


def _rows_of(sizes: Floats, keep: Mask) -> Floats:
    """The rows of (V, N), or of (1, N) for all."""
    return sizes[keep] if len(sizes) > 1 else sizes


def _size(claim: Claim) -> tuple[bool, float]:
    """Whatever the edge is first, then by bytes under the configurations on average."""
    return claim.target is None, float(claim.source.mean()) * (
        1.0 if claim.target is None else float(claim.target.mean())
    )


class Ledger:
    """Instants of a step in their order, and all storages."""

    def __init__(self) -> None:
        self.instants: list[str] = []
        self.storages: list[ClaimedStorage] = []

    @property
    def now(self) -> int:
        """The instant to come."""
        return len(self.instants)

    def instant(self, name: str) -> None:
        """All that is held now is alive at this instant."""
        self.instants.append(name)

    def storage(self) -> ClaimedStorage:
        """A new storage."""
        self.storages.append(ClaimedStorage())
        return self.storages[-1]

    def hold(
        self,
        storage: ClaimedStorage,
        owner: Owner,
        kind: ClaimKind,
        source: Floats,
        target: Floats | None = None,
        local: bool = True,
    ) -> list[Claim]:
        """A new claim from now on; none where there is nothing to hold."""
        if not source.any() or (target is not None and not target.any()):
            return []
        storage.claims.append(Claim(storage, owner, kind, self.now, source, target, local))
        return storage.claims[-1:]

    def hold_part(self, edge: EdgeName, part: Part) -> list[Claim]:
        """A storage of what travels on an edge."""
        storage = self.storage()
        storage.claims.append(
            Claim(storage, edge, "sure", self.now, np.ones((1, 1)), np.ones((1, 1)), False, part=part)
        )
        return storage.claims[-1:]

    def drop(self, claims: list[Claim]) -> None:
        """These end now."""
        for claim in claims:
            if claim.last < 0:
                claim.last = self.now

    def entries(self, shared: bool, holds: Holds = lambda _: False) -> Iterator[Claim]:
        """The entries of all storages that are `shared`, or of all others. holds: who is likely to hold one."""
        for storage in self.storages:
            if storage.shared == shared:
                yield from storage.entries(self.now, holds)

    def restrict(self, keep: Mapping[str, Mask], local: Mapping[EdgeName, Mask]) -> Ledger:
        """Over the configurations that are kept (V_l,). local: (V_u, V_v) of these."""
        other = Ledger()
        other.instants = self.instants
        for storage in self.storages:
            new = ClaimedStorage([small for claim in storage.claims if (small := claim.restrict(keep, local))])
            if new.claims:
                other.storages.append(new)
        return other
