"""The memory of parameters and their gradients through a step.

As `layerwise.run.execute` has it. Of what devices share out there are gathers (`gathers`), what layers compute with,
and gradients in rows (`buckets`).
"""

from __future__ import annotations

from collections import deque
from collections.abc import MutableSequence, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np

from layerwise.config import Config
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.allocations import NOBODY, AllocationTracker, Ref
from layerwise.cost.memory.kernels import update
from layerwise.cost.model import CostModel
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.base import Role
from layerwise.ops.facts import Parameter
from layerwise.partition.boxes import Boxes
from layerwise.partition.buckets import ALONE, fill
from layerwise.partition.place import Place
from layerwise.partition.sharding import sharded, states_of


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """One parameter; arrays are (N,), in bytes."""

    key: tuple[bytes, str]  # who shares it with whom, and the layer for which it is gathered at a time, if any
    whole: Floats  # of the box that a device computes with
    kept: Floats
    row: Floats  # of its part as it travels
    rows: Floats  # of those of all members

    @property
    def gathered(self) -> bool:
        """Whether it is whole while its layer computes only."""
        return bool(self.key[1])


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """One parameter that lives in a layer; arrays are (N,), in bytes."""

    trained: bool
    size: Floats  # of the box that a device computes with
    shared: Floats  # that where another device has the same one
    share: Share | None  # where devices keep a part each


def held(model: CostModel, layer: Layer, config: Config, place: Place) -> list[Held]:
    """The parameters that live in a layer."""
    rows = list[Held]()
    for _, p, item_bytes in layer.held():
        boxes = place.holds(p)
        size = boxes.volume * item_bytes
        share = _share(model, layer, p, config, boxes, item_bytes)
        shared = np.where(boxes.shared(), size, 0.0) if p.trainable and share is None else 0 * size
        rows.append(Held(p.trainable, size, shared, share))
    return rows


def _share(model: CostModel, layer: Layer, p: Parameter, config: Config, boxes: Boxes, item_bytes: int) -> Share | None:
    """What devices keep of a parameter of which they compute with `boxes`; None where that is all of these."""
    found = sharded(layer, p, config, model.devices.count)
    if found is None:
        return None
    ends = np.concatenate([boxes.lo, boxes.hi], axis=1)
    _, first, group = np.unique(ends, axis=0, return_index=True, return_inverse=True)
    gathered = states_of(layer, config) == "gathered"
    row = found.rows.astype(np.float64) * item_bytes
    key = first[group.reshape(-1)].tobytes(), layer.name if gathered else ""
    return Share(key, boxes.volume * item_bytes, found.boxes.volume * item_bytes, row, row * found.members)


@dataclass(frozen=True, slots=True, eq=False)
class _Trained:
    """The gradient of one parameter; arrays are (N,), in bytes."""

    size: Floats
    alone: Floats  # of those that nobody shares
    share: Share | None


@dataclass(slots=True, eq=False)
class _Bucket:
    """Gradients that travel together, and parameters that are gathered together."""

    shares: list[Share]
    missing: int = 0  # gradients that are yet to be made
    coming: Ref = NOBODY  # what is gathered
    flat: Ref = NOBODY

    @property
    def gathered(self) -> bool:
        """Whether its parameters are, as all of a bucket are or none."""
        return self.shares[0].gathered


@dataclass(eq=False)
class Parameters:
    """Of a strategy. All by the layer's name."""

    model: CostModel
    tracker: AllocationTracker
    of: dict[str, list[Share]] = field(default_factory=dict)  # what is shared out
    _trained: dict[str, list[_Trained]] = field(default_factory=dict)
    _updated: list[Floats] = field(default_factory=list)  # of what a device updates of each
    _next: dict[bool, dict[str, str]] = field(default_factory=dict)  # whose are gathered after whose, forward and back
    # Buckets that have yet to leave, and those that left whose rows are there yet; by whether they are gathered.
    _waiting: dict[bool, deque[_Bucket]] = field(default_factory=lambda: {False: deque(), True: deque()})
    _left: dict[bool, list[_Bucket]] = field(default_factory=lambda: {False: [], True: []})
    _in: dict[int, _Bucket] = field(default_factory=dict)  # by the share's id
    _whole: dict[str, dict[int, Ref]] = field(default_factory=dict)  # what a layer computes with, by the share's id
    _coming: dict[str, Ref] = field(default_factory=dict)  # to be made that of what travels

    def hold(self, layer: Layer, parameters: Sequence[Held]) -> None:
        """A layer's, with their optimizer's state; and their place in buckets, which outlives the step."""
        states, rows = OPTIMIZERS[self.model.options.optimizer], self._trained.setdefault(layer.name, [])
        for p in parameters:
            if (share := p.share) is not None:
                self.of.setdefault(layer.name, []).append(share)
                self.tracker.new(share.kept, "parameters")
                self.tracker.new(share.kept * states, "states")
                if not share.gathered:
                    self.tracker.new(share.whole, "gathered")
                rows.append(_Trained(p.size, 0 * p.size, share))
                self._updated.append(share.kept)
                continue
            self.tracker.new(p.size, "parameters")
            if p.trained:
                self.tracker.new(states * p.size, "states")
                self.tracker.new(p.shared, "gradients")
                rows.append(_Trained(p.size, p.size - p.shared, None))
                self._updated.append(p.size)

    def gradients(self, layer: Layer) -> list[Ref]:
        """Of a layer's, as they are made; those that are summed later go into their rows."""
        made = [self.tracker.new(one.size, "gradients") for one in self._trained[layer.name]]
        self._fill([share for share in self.of.get(layer.name, ()) if not share.gathered])
        return made

    def put(self, layer: Layer, made: Sequence[Ref]) -> None:
        """Gradients go, one after the other, when what they were made of is gone.

        The first makes room for the rows of all that are gathered, the last begins their sum; parameters that are
        gathered for the layer go as soon as they have a gradient.
        """
        for one, gradient in zip(self._trained[layer.name], made, strict=True):
            if one.share is not None and one.share.gathered:
                self.tracker.drop(self._whole[layer.name].pop(id(one.share)))
                self._fill([one.share])
            self.tracker.drop(gradient)

    def hand_out(self, layer: Layer) -> None:
        """Gradients that nobody shares stay; what is shared has been copied into its bucket."""
        for one in self._trained[layer.name]:
            self.tracker.new(one.alone, "gradients")
        self.leave(layer)

    def begin(self) -> None:
        """The forward pass begins: what stays whole is gathered."""
        gathered = {name for name, shares in self.of.items() if any(share.gathered for share in shares)}
        names = [layer.name for layer in self.model.graph.layers if layer.name in gathered]
        back = [name for name in reversed(names) if self.model.has_gradient[name]]
        self._next = {True: dict(pairwise(names)), False: dict(pairwise(back))}
        layers = self.model.graph.layers
        last = [layer.name for layer in layers if layer.role is Role.TIED]
        order = [*(layer.name for layer in layers[::-1] if layer.name not in last), *last[::-1]]
        shares = [share for name in order for share in reversed(self.of.get(name, []))]
        sizes = [ALONE if share.gathered else float(share.rows.max()) for share in shares]
        for places in fill((share.key, size) for share, size in zip(shares, sizes, strict=True)):
            bucket = _Bucket([shares[i] for i in places], missing=len(places))
            self._waiting[bucket.gathered].append(bucket)
            self._in |= {id(share): bucket for share in bucket.shares}
            if not bucket.gathered:
                bucket.coming = self._travelling(bucket.shares)

    def enter(self, layer: Layer, *, forward: bool) -> None:
        """A layer is about to compute, or its backward pass to begin; of the next one parameters are gathered."""
        following = self._next[forward].get(layer.name)
        for share in self.of.get(layer.name, ()):
            bucket = self._in[id(share)]
            self.tracker.drop(bucket.coming)
            bucket.coming = NOBODY
        self.enter_again(layer)
        if following is not None:
            self._gather(following)

    def enter_again(self, layer: Layer) -> None:
        """A layer is about to compute, perhaps once more for the backward pass: its own are gathered."""
        if any(share.gathered for share in self.of.get(layer.name, ())):
            self._gather(layer.name)
            self.tracker.drop(self._coming.pop(layer.name))

    def _gather(self, name: str) -> None:
        if name not in self._whole:
            shares = [share for share in self.of[name] if share.gathered]
            self._whole[name] = {id(share): self.tracker.new(share.whole, "gathered") for share in shares}
            self._coming[name] = self._travelling(shares)

    def _travelling(self, shares: Sequence[Share]) -> Ref:
        """What is gathered as it arrives, and as it leaves."""
        return self.tracker.new(np.sum([share.rows + share.row for share in shares], axis=0), "gathered")

    def leave(self, layer: Layer) -> None:
        """It has computed."""
        for whole in self._whole.pop(layer.name, {}).values():
            self.tracker.drop(whole)

    def fill_rows(self, layer: Layer) -> None:
        """The gradients of all that a layer has shared out go into the rows."""
        self._fill(self.of.get(layer.name, ()))

    def _fill(self, shares: Sequence[Share]) -> None:
        """Rows leave when they are full."""
        for share in shares:
            bucket = self._in[id(share)]
            if not bucket.flat:
                bucket.flat = self.tracker.new(np.sum([one.rows for one in bucket.shares], axis=0), "gradients")
            bucket.missing -= 1
        for waiting in self._waiting.values():
            while waiting and not waiting[0].missing:
                self._send(waiting.popleft())

    def _send(self, bucket: _Bucket) -> None:
        left = self._left[bucket.gathered]
        if bucket.gathered:
            self._forget(left)
        left.append(bucket)
        # This device's part of the sum stays.
        self.tracker.new(np.sum([share.row for share in bucket.shares], axis=0), "gradients")
        if self.model.devices.device_type == "cpu":  # messages arrive in rows of their own
            others = np.sum([share.rows - share.row for share in bucket.shares], axis=0)
            bucket.flat += self.tracker.new(others, "gradients")

    def _forget(self, left: MutableSequence[_Bucket]) -> None:
        """Rows that were summed."""
        for bucket in left:
            self.tracker.drop(bucket.flat)
        left.clear()

    def finish(self) -> None:
        """The backward pass has ended, and the optimizer steps."""
        for rows in (*self._left.values(), *self._waiting.values()):
            self._forget(rows)
        update(self.tracker, self._updated, self.model)
