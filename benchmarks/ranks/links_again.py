"""Measured links, timed again now and then while something else is measured: a shared machine's speed moves."""

from __future__ import annotations

from dataclasses import replace
from statistics import median

import numpy as np

from layerwise.comm.base import Comm
from layerwise.machine.curves import Curve, Links, Operation, Overlap
from layerwise.measure.links import measure_overlap, operation_time
from layerwise.measure.topology import RankGroups, find_topology, pairs, shapes

USED: tuple[Operation, ...] = ("message", "exchange", "all_reduce", "reduce_scatter")  # by gloo


class LinksAgain:
    """The curves at their knots, and what computation and messages beside it cost each other; what a further message
    costs is not, nor the wait after computation. All ranks do the same. Without links there is nothing to do."""

    def __init__(self, comm: Comm, links: Links | None) -> None:
        where = find_topology(comm)
        self.comm, self.none, self.first = comm, links is None, links or Links(())
        self.pairs, self.groups = ({(s.fan, s.load): s for s in kind(where)} for kind in (pairs, shapes))
        self.curves = [curve for curve in self.first.curves if curve.operation in USED]
        self.times: list[list[list[float]]] = []  # of each turn and curve the seconds at its knots
        self.overlaps: list[list[Overlap]] = []  # of each turn

    def turn(self) -> None:
        """Times everything once."""
        self.times.append([self._times(curve) for curve in self.curves])
        self.overlaps.append([self._overlap(known) for known in self.first.overlaps])

    def links(self) -> Links | None:
        """By the medians of all turns, the first measuring among them."""
        if self.none:
            return None
        again = {}
        for curve, *turns in zip(self.curves, *self.times, strict=True):
            first = [seconds for _, seconds in curve.knots]
            seconds = np.maximum.accumulate([median(column) for column in zip(first, *turns, strict=True)]).tolist()
            again[curve] = replace(
                curve, knots=tuple((size, s) for (size, _), s in zip(curve.knots, seconds, strict=True))
            )
        overlaps = []
        for known, *turns in zip(self.first.overlaps, *self.overlaps, strict=True):
            every = [known, *turns]
            compute, sync = median(o.compute for o in every), median(o.sync for o in every)
            overlaps.append(replace(known, compute=compute, sync=sync))
        curves = tuple(again.get(curve, curve) for curve in self.first.curves)
        return replace(self.first, curves=curves, overlaps=tuple(overlaps))

    def _shape(self, curve: Curve) -> RankGroups:
        kind = self.pairs if curve.operation in ("message", "exchange") else self.groups
        return kind[curve.fan, curve.load]

    def _times(self, curve: Curve) -> list[float]:
        shape = self._shape(curve)
        return [operation_time(self.comm, curve.operation, shape, size, rounds=1).seconds for size, _ in curve.knots]

    def _overlap(self, known: Overlap) -> Overlap:
        alone = self.first.curve(known.operation, known.fan, known.load)
        assert alone is not None
        return measure_overlap(self.comm, alone, self._shape(alone), rounds=1)
