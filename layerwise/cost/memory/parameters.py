"""The memory of parameters and their gradients through a step, as `layerwise.run.execute` allocates it.

A sharded parameter has a shard on each device, the gathered parameter that the layer computes with, and its gradient in
a bucket of shards.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from layerwise.config import Config
from layerwise.cost.compute.roofline import OPTIMIZERS
from layerwise.cost.memory.allocations import AllocationTracker, Ref
from layerwise.cost.model import CostModel
from layerwise.cost.step_facts import GradientSum
from layerwise.cost.terms import ParameterKind, kind_of
from layerwise.geometry.arrays import Floats
from layerwise.graph.layer import Layer
from layerwise.ops.facts import Parameter
from layerwise.partition.place import Boxes, Place
from layerwise.partition.sharding import sharded, states_of
from layerwise.program import Effects, Program, StrategyFacts
from layerwise.program.instructions import AllGather, Arrive, Fill, Release, Update


@dataclass(frozen=True, slots=True, eq=False)
class Share:
    """A sharded parameter; arrays are (N,), in bytes."""

    kind: ParameterKind
    gathered: bool  # whether it is gathered only while its layer computes
    full: Floats  # the box that a device computes with
    owned: Floats  # a device's shard
    shard: Floats  # the same as it is sent, padded to the size of the largest
    shards: Floats  # the shards of all members, as they are sent


@dataclass(frozen=True, slots=True, eq=False)
class ParameterMemory:
    """One parameter that lives in a layer; arrays are (N,), in bytes."""

    trained: bool
    size: Floats  # the box that a device computes with
    shared: Floats  # the same if another device has an equal box, else 0
    share: Share | None  # its shards, if it is sharded

    @property
    def alone(self) -> Floats:
        """(N,) bytes of its gradient on devices that share it with no other device."""
        return self.size - self.shared if self.share is None else 0 * self.size


def parameters_of(model: CostModel, layer: Layer, config: Config, place: Place) -> list[ParameterMemory]:
    """The parameters that live in a layer."""
    rows = list[ParameterMemory]()
    for _, p, item_bytes in layer.held():
        boxes = place.holds(p)
        size = boxes.volume * item_bytes
        share = _share(model, layer, p, config, boxes, item_bytes)
        shared = np.where(boxes.shared(), size, 0.0) if p.trainable and share is None else 0 * size
        rows.append(ParameterMemory(p.trainable, size, shared, share))
    return rows


def _share(model: CostModel, layer: Layer, p: Parameter, config: Config, boxes: Boxes, item_bytes: int) -> Share | None:
    """The shards of a parameter whose layer computes with `boxes`; None if it is not sharded."""
    found = sharded(layer, p, config, model.devices.count, unfed=layer.name in model.graph.unfed)
    if found is None:
        return None
    row, gathered = found.rows.astype(np.float64) * item_bytes, states_of(layer, config) == "gathered"
    sizes = boxes.volume * item_bytes, found.boxes.volume * item_bytes, row, row * found.members
    return Share(kind_of(p), gathered, *sizes)


@dataclass(eq=False)
class ParameterStorages:
    """The storages of a strategy's parameters and of their gradients, and how instructions change them."""

    model: CostModel
    tracker: AllocationTracker
    training: bool
    _shares: dict[str, list[Share]] = field(default_factory=dict)  # by layer
    _trained: dict[str, list[ParameterMemory]] = field(default_factory=dict)  # by layer
    _updated: list[Floats] = field(default_factory=list)  # bytes of each parameter that a device updates
    _members: list[list[Share]] = field(default_factory=list)  # by bucket, its sharded parameters
    _bucket: dict[int, int] = field(default_factory=dict)  # by the share's id
    _flat: dict[int, Ref] = field(default_factory=dict)  # by bucket, the shards of all members
    _summing: int | None = None  # the bucket of gathered parameters that was flushed last
    _full: dict[str, dict[int, Ref]] = field(default_factory=dict)  # gathered parameters, by layer and share's id
    _coming: dict[str | int, Ref] = field(default_factory=dict)  # what gathers are sending and receiving

    def add(self, layer: Layer, parameters: Sequence[ParameterMemory]) -> None:
        """Allocates a layer's parameters and their optimizer's states, which live through the step."""
        states, new = OPTIMIZERS[self.model.options.optimizer], self.tracker.new
        rows = self._trained.setdefault(layer.name, [])
        for p in parameters:
            share = p.share
            local = p.size if share is None else share.owned
            new(local, "parameters")
            if share is not None:
                self._shares.setdefault(layer.name, []).append(share)
                if not share.gathered:
                    new(share.full, "gathered")
            if self.training and (p.trained or share is not None):
                new(local * states, "states")
                rows.append(p)
                self._updated.append(local)

    def bucket(self, step: Program, facts: StrategyFacts, sums: Sequence[GradientSum]) -> None:
        """Finds the program's bucket of each sharded parameter."""
        for number, bucket in enumerate(step.buckets):
            numbers = bucket.gradients if bucket.states != "replicated" else ()
            of = [(self._shares[facts.gradients[i].layer], sums[i].kind) for i in numbers]
            shares = [share for of_layer, kind in of for share in of_layer if share.kind == kind]
            self._members.append(shares)
            self._bucket |= {id(share): number for share in shares}

    # ---- instructions ----

    @property
    def does(self) -> Effects:
        """The instructions that change these storages, and what each does."""
        return {
            AllGather: self.gather, Arrive: self.arrive, Release: self.release, Fill: self.fill, Update: self.update,
        }  # fmt: skip

    def gather(self, instruction: AllGather) -> None:
        """Allocates what a gather receives and, if it is for one layer, the parameters that the layer computes with."""
        what = instruction.what
        shares = self._members[what] if isinstance(what, int) else self._shares[what]
        if isinstance(what, str):
            shares = [share for share in shares if share.gathered]
            self._full[what] = {id(share): self.tracker.new(share.full, "gathered") for share in shares}
        travelling = np.sum([share.shards + share.shard for share in shares], axis=0)  # received and sent
        self._coming[what] = self.tracker.new(travelling, "gathered")

    def arrive(self, instruction: Arrive) -> None:
        """Frees what a gather has received, which has been copied to its place."""
        self.tracker.drop(self._coming.pop(instruction.what))

    def release(self, instruction: Release) -> None:
        """Frees the parameters that were gathered for a layer, which has computed."""
        self.tracker.drop(*self._full.pop(instruction.layer, {}).values())

    def fill(self, instruction: Fill) -> None:
        """Allocates what sums of sharded gradients leave. Sums of gathered parameters follow one after the other."""
        for number in instruction.buckets:
            shares = self._members[number]
            if not shares:
                continue  # replicated: gradients are summed in their bucket
            if shares[0].gathered:
                if self._summing is not None:
                    self.tracker.drop(self._flat.pop(self._summing))
                self._summing = number
            # This device's shard of the sum stays.
            self.tracker.new(np.sum([share.shard for share in shares], axis=0), "gradients")
            if self.model.devices.device_type == "cpu":  # messages are received into storages of their own
                others = np.sum([share.shards - share.shard for share in shares], axis=0)
                self._flat[number] += self.tracker.new(others, "gradients")

    def update(self, _: Update) -> None:
        """The optimizer steps, and Adam allocates its denominators.

        On a GPU it does so for all parameters at once (PyTorch's foreach,
        https://pytorch.org/docs/stable/generated/torch.optim.Adam.html). On a CPU it goes through parameters one by
        one: a root and a quotient of each, while the previous one's quotient is still alive.
        """
        self.tracker.drop(*self._flat.values())
        if self.model.options.optimizer != "adam":
            return
        before, on_cpu = np.zeros(self.model.devices.count), self.model.devices.device_type == "cpu"
        if not on_cpu:
            self.tracker.spike(sum(self._updated, before))
        for size in self._updated if on_cpu else ():
            self.tracker.spike(before + 2 * size)
            before = size

    # ---- the gradients of a layer, in its backward pass ----

    def gradients(self, layer: Layer) -> list[Ref]:
        """Allocates a layer's gradients. Those of sharded, not gathered parameters go into their bucket at once."""
        made = [self.tracker.new(one.size, "gradients") for one in self._trained[layer.name]]
        self._into_shards([share for share in self._shares.get(layer.name, ()) if not share.gathered])
        return made

    def put(self, layer: Layer, made: Sequence[Ref]) -> None:
        """Copies gradients into buckets, one after the other, and frees them; their sources have been freed before.

        A bucket counts as far as it has been written, because a CPU gives memory to what is written only. Parameters
        that are gathered for the layer are freed as soon as they have a gradient; the first of them allocates the
        shards of its bucket.
        """
        for one, gradient in zip(self._trained[layer.name], made, strict=True):
            self.tracker.new(one.shared, "gradients")
            if one.share is not None and one.share.gathered:
                self.tracker.drop(self._full[layer.name].pop(id(one.share)))
                self._into_shards([one.share])
            self.tracker.drop(gradient)

    def hand_out(self, layer: Layer) -> None:
        """Keeps the gradients that no other device shares. The others have been copied into their bucket."""
        for one in self._trained[layer.name]:
            self.tracker.new(one.alone, "gradients")
        self.release(Release(layer.name))

    def put_tied(self, layer: Layer) -> None:
        """Puts the gradient of a parameter that several layers use into its bucket."""
        for one in self._trained[layer.name]:
            self.tracker.new(one.shared, "gradients")
        self._into_shards(self._shares.get(layer.name, ()))

    def _into_shards(self, shares: Sequence[Share]) -> None:
        for share in shares:
            number = self._bucket[id(share)]
            if number not in self._flat:
                rows = np.sum([one.shards for one in self._members[number]], axis=0)
                self._flat[number] = self.tracker.new(rows, "gradients")
