"""Lower bounds by message passing: what any strategy with a given configuration of a given layer costs at least.

Costs are moved between layers and edges without changing any strategy's total (a reparametrisation), so that the sum
of all minima, which no strategy can beat, becomes as large as possible: sequential tree-reweighted message passing
(Kolmogorov, IEEE TPAMI 28(10), 2006). A sweep takes O(E C^2), an elimination O(E C^3).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from layerwise.cost.model import EdgeName
from layerwise.geometry.arrays import Floats

Pair = tuple[str, str]
CACHED = 1 << 16  # elements of a table that are summed at once: they stay in the cache


@dataclass(frozen=True, slots=True)
class Bounds:
    """Bounds of the cost of strategies, by message passing."""

    lower_s: dict[str, Floats]  # (C_l,) of each layer: of every strategy that contains the configuration
    choice: dict[str, int]  # indices of a good strategy, decoded from the same messages


class Messages:
    """Messages along the edges of a graph; they stay valid when the node costs change."""

    def __init__(self, transfer: Mapping[EdgeName, Floats], names: Sequence[str]) -> None:
        self.names = list(names)
        self.edges: dict[Pair, Floats] = {}
        for (u, v, _), cost in transfer.items():
            self.edges[u, v] = self.edges[u, v] + cost if (u, v) in self.edges else cost
        self.down = {pair: np.zeros(cost.shape[1]) for pair, cost in self.edges.items()}  # to the consumer
        self.up = {pair: np.zeros(cost.shape[0]) for pair, cost in self.edges.items()}  # to the producer
        self.ins: dict[str, list[Pair]] = {name: [] for name in self.names}
        self.outs: dict[str, list[Pair]] = {name: [] for name in self.names}
        for u, v in self.edges:
            self.outs[u].append((u, v))
            self.ins[v].append((u, v))

    def bounds(self, node: Mapping[str, Floats], sweeps: int) -> Bounds:
        """Passes messages forward and backward `sweeps` times, then bounds every configuration."""
        for _ in range(sweeps):
            for name in self.names:
                share = self._share(name, node)
                for pair in self.outs[name]:
                    (self.down[pair],) = _least_by_column(self.edges[pair], share - self.up[pair])
            for name in reversed(self.names):
                share = self._share(name, node)
                for pair in self.ins[name]:
                    self.up[pair] = _least_by_row(self.edges[pair], share - self.down[pair])
        return Bounds(self._lower(node), self._decode(node))

    def _belief(self, name: str, node: Mapping[str, Floats]) -> Floats:
        """A layer's cost with all that its neighbours have sent it."""
        total = node[name].copy()
        for pair in self.ins[name]:
            total += self.down[pair]
        for pair in self.outs[name]:
            total += self.up[pair]
        return total

    def _share(self, name: str, node: Mapping[str, Floats]) -> Floats:
        return self._belief(name, node) / max(len(self.ins[name]), len(self.outs[name]), 1)

    def _lower(self, node: Mapping[str, Floats]) -> dict[str, Floats]:
        """Terms that are left after a backward sweep: none is negative, so that any of them may be added up.

        A layer has given shares of its belief to its inward edges; what it keeps is bounded by its minimum. A
        configuration then costs, beyond the sum of all minima, at least the cheapest way to it from the first layer,
        by the dearest of its inward edges, and the least of each other inward edge.
        """
        floor, beyond = 0.0, {}
        for name in self.names:
            share = self._share(name, node)
            kept = share * max(len(self.outs[name]) - len(self.ins[name]), 0 if self.ins[name] else 1)
            floor += float(kept.min())
            beyond[name] = kept - kept.min()
            if self.ins[name]:
                by_way, least = [], []
                for u, v in self.ins[name]:
                    up, here = self.up[u, v], share - self.down[u, v]
                    edge_s, way_s = _least_by_column(self.edges[u, v], -up, beyond[u] - up)
                    least.append(edge_s + here)
                    by_way.append(way_s - edge_s)
                beyond[name] += np.sum(least, axis=0) + np.max(by_way, axis=0)
        return {name: floor + cost for name, cost in beyond.items()}

    def _decode(self, node: Mapping[str, Floats]) -> dict[str, int]:
        """Layer by layer: the cheapest given the choices so far and what the layers to come have sent."""
        choice: dict[str, int] = {}
        for name in self.names:
            cost = node[name].copy()
            for pair in self.ins[name]:
                cost += self.edges[pair][choice[pair[0]]]
            for pair in self.outs[name]:
                cost += self.up[pair]
            choice[name] = int(cost.argmin())
        return choice


def _least_by_column(table: Floats, *rows: Floats) -> list[Floats]:
    """The least of table + row[:, None] in every column, (C_v,), for each of `rows` (C_u,)."""
    found = [np.full(table.shape[1], np.inf) for _ in rows]
    for part, sums in _parts(table):
        for least, row in zip(found, rows, strict=True):
            np.add(table[part], row[part, None], out=sums)
            np.minimum(least, sums.min(0), out=least)
    return found


def _least_by_row(table: Floats, column: Floats) -> Floats:
    """The least of table + column[None, :] in every row, (C_u,)."""
    least = np.empty(len(table))
    for part, sums in _parts(table):
        np.add(table[part], column, out=sums).min(1, out=least[part])
    return least


def _parts(table: Floats) -> Iterator[tuple[slice, Floats]]:
    """Some rows of a table at a time, and room for as many."""
    step = min(max(1, CACHED // table.shape[1]), len(table))
    room = np.empty((step, table.shape[1]))
    for start in range(0, len(table), step):
        yield slice(start, start + step), room[: len(table) - start]
