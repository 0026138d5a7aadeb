"""Gathers of the simulated step: parameters of which each device keeps a part, whole when their layer computes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise

from layerwise.cost.collectives import all_gather_s, group_shape, overlap
from layerwise.cost.model import CostModel, Strategy
from layerwise.cost.timeline.buckets import Bucket, shared_out
from layerwise.cost.timeline.stream import Stream, Traffic
from layerwise.geometry.arrays import Floats, Ints
from layerwise.partition.sharding import states_of


class Gathers:
    """In the order in which the runtime begins them. They travel beside computation, as sums of gradients do."""

    def __init__(
        self, model: CostModel, strategy: Strategy, leaving: Mapping[str, Sequence[Bucket]], stream: Stream
    ) -> None:
        self._model, self._stream = model, stream
        self._coming: dict[str, list[Traffic]] = {}  # by the layer that waits for it
        buckets = [bucket for some in leaving.values() for bucket in some if bucket.states == "sharded"]
        self._buckets = buckets[::-1]
        self._rows: dict[str, list[tuple[Ints, float]]] = {}  # of layers whose parameters are whole for them only
        for layer in model.graph.layers:
            if states_of(layer, strategy[layer.name]) == "gathered":
                by_group = dict[bytes, tuple[Ints, float]]()
                for row, _, size in shared_out(model, layer, strategy[layer.name]):
                    by_group[row.tobytes()] = row, size + by_group.get(row.tobytes(), (row, 0.0))[1]
                if by_group:
                    self._rows[layer.name] = list(by_group.values())
        names = list(self._rows)
        back = [name for name in reversed(names) if model.has_gradient[name]]
        self._next = {True: dict(pairwise(names)), False: dict(pairwise(back))}

    def begin(self, clock: Floats) -> None:
        """The forward pass begins: all that stays whole till the next step is on its way."""
        for bucket in self._buckets:
            self._send(bucket.first, bucket.name, bucket.row, bucket.bytes, clock)

    def awaited(self, name: str, clock: Floats, *, forward: bool) -> Floats:
        """The devices' times when a layer may compute. That of the next one sets out."""
        clock = self.awaited_alone(name, clock)
        following = self._next[forward].get(name)
        if following is not None:
            self._begin(following, clock)
        return clock

    def awaited_alone(self, name: str, clock: Floats) -> Floats:
        """The same, of a layer that is made again: no other one sets out."""
        if name in self._rows:
            self._begin(name, clock)
        for one in self._coming.pop(name, ()):
            clock = self._stream.awaited_sum(one, clock)
        return clock

    def _begin(self, name: str, clock: Floats) -> None:
        if name not in self._coming:
            for row, size in self._rows[name]:
                self._send(name, name, row, size, clock)

    def _send(self, user: str, name: str, row: Ints, size_bytes: float, clock: Floats) -> None:
        devices = self._model.devices
        group = group_shape(row, devices)
        rates = overlap(group, devices)
        seconds = all_gather_s(size_bytes, group, devices)
        one = Traffic(f"gather of {name}", row, seconds, rates.compute, rates.sync)
        self._stream.add(one, clock)
        self._coming.setdefault(user, []).append(one)
