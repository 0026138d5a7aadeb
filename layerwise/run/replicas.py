"""Replicas: ranks that hold the same box of a parameter sum its gradients, in buckets, beside the backward pass.

As DistributedDataParallel does it: gradients are views of flat buckets, filled in the order in which the backward pass
makes them; a full bucket is all-reduced while the pass goes on. The scaling to a mean happened at the sink.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group, Handle
from layerwise.config import BUCKET_BYTES
from layerwise.run.trace import Trace

FIRST_BUCKET_BYTES = 2**20  # so that communication begins early: DistributedDataParallel's _DEFAULT_FIRST_BUCKET_BYTES


@dataclass(slots=True)
class Bucket:
    """Parameters whose gradients travel together among the ranks of `group`."""

    group: Group
    names: list[str] = field(default_factory=list)
    bytes: int = 0
    flat: Tensor | None = None
    missing: set[str] = field(default_factory=set)
    handle: Handle | None = None


class Replicas:
    """The gradients of one rank's parameters. `order`: as the backward pass makes them; `groups`: who shares each."""

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], order: Sequence[str], groups: Mapping[str, Group]
    ) -> None:
        self.parameters = parameters
        self.buckets: list[Bucket] = []
        self.of: dict[str, Bucket] = {}
        self.views: dict[str, Tensor] = {}
        self.local: set[str] = set()  # gradients not yet summed over the ranks (no_sync)
        open_buckets: dict[tuple[Group, torch.dtype], Bucket] = {}
        for name in order:
            if len(groups[name]) < 2:
                continue
            p = parameters[name]
            key = (groups[name], p.dtype)
            bucket = open_buckets.get(key)
            limit = FIRST_BUCKET_BYTES if self.buckets and bucket is self.buckets[0] else BUCKET_BYTES
            if bucket is None or bucket.bytes >= limit:
                bucket = open_buckets[key] = Bucket(groups[name])
                self.buckets.append(bucket)
            bucket.names.append(name)
            bucket.bytes += p.numel() * p.element_size()
            self.of[name] = bucket

    def groups(self) -> set[Group]:
        """All groups that gradients are summed over."""
        return {bucket.group for bucket in self.buckets}


class Gradients:
    """One backward pass's gradients, from the first to `finish`."""

    def __init__(self, replicas: Replicas, comm: Comm, *, synchronise: bool, trace: Trace | None = None) -> None:
        self.replicas, self.comm, self.synchronise, self.trace = replicas, comm, synchronise, trace
        self.spans: dict[int, int] = {}  # of the buckets under way, where they are traced
        self.earlier: dict[str, Tensor] = {}  # of earlier passes, already summed over the ranks
        self.alone: dict[str, Tensor] = {}
        for bucket in replicas.buckets:
            bucket.missing = set(bucket.names)

    def add(self, name: str, gradient: Tensor) -> None:
        """The gradient of one parameter; its bucket leaves when this was the last one missing."""
        replicas = self.replicas
        bucket, p = replicas.of.get(name), replicas.parameters[name]
        if bucket is None:
            self.alone[name] = gradient
            return
        if bucket.flat is None:
            self._allocate(bucket)
        view = replicas.views[name]
        if p.grad is not None and name in replicas.local:
            total = gradient + p.grad  # of the passes under no_sync, summed over the ranks together with this one
            view.copy_(total)
        else:
            if p.grad is not None:
                self.earlier[name] = p.grad.clone() if p.grad.data_ptr() == view.data_ptr() else p.grad
            view.copy_(gradient)
        bucket.missing.discard(name)
        if not bucket.missing and self.synchronise:
            assert bucket.flat is not None
            what = f"gradients of {bucket.names[0]}"
            if self.trace is not None:
                self.spans[id(bucket)] = self.trace.begin(what, "sync")
            bucket.handle = self.comm.all_reduce(bucket.flat, bucket.group, "sync", what)

    def finish(self) -> None:
        """Waits for the sums, and gives every parameter its gradient."""
        replicas = self.replicas
        for bucket in replicas.buckets:
            assert not bucket.missing, f"no gradient for {sorted(bucket.missing)}"
            if bucket.handle is not None:
                bucket.handle.wait()
                bucket.handle = None
                if self.trace is not None:
                    self.trace.end(self.spans.pop(id(bucket)))
            for name in bucket.names:
                view = replicas.views[name]
                if name in self.earlier:
                    view += self.earlier[name]
                replicas.parameters[name].grad = view
                (replicas.local.discard if self.synchronise else replicas.local.add)(name)
        for name, gradient in self.alone.items():
            p = replicas.parameters[name]
            p.grad = gradient if p.grad is None else p.grad + gradient

    def _allocate(self, bucket: Bucket) -> None:
        parameters = [self.replicas.parameters[name] for name in bucket.names]
        bucket.flat = torch.empty(
            sum(p.numel() for p in parameters), dtype=parameters[0].dtype, device=parameters[0].device
        )
        at = 0
        for name, p in zip(bucket.names, parameters, strict=True):
            self.replicas.views[name] = bucket.flat[at : at + p.numel()].view_as(p)
            at += p.numel()
