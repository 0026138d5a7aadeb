"""GradientReducer: ranks that hold the same box of a parameter sum its gradients, in buckets, beside the backward pass.

As DistributedDataParallel does it: gradients are views of flat buckets, filled in the order in which the backward pass
makes them; a full bucket is all-reduced while the pass goes on. What is summed is scaled to a mean as it is copied in.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import MappingProxyType

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group
from layerwise.errors import LayerwiseError
from layerwise.partition.buckets import ALONE, BUCKET_BYTES, fill
from layerwise.run.execute.buckets import (
    BucketSlots,
    GradientBucket,
    ShardLayout,
    is_nothing,
    ready,
    same_memory,
    scaled,
)
from layerwise.run.guards.hooks import call_hooks, refuse_derivatives
from layerwise.run.local_tensor import is_dtensor, like, local_tensor
from layerwise.trace import Trace

NONE: Mapping[str, ShardLayout] = MappingProxyType({})
WAITING = "waiting for gradients"  # in a trace: the part of the sums that no work of the backward pass hides


class GradientReducer:
    """The gradients of one rank's parameters. `order`: as the backward pass makes them; `groups`: who shares each.

    shared_by: the groups of all ranks, where those elsewhere may differ: gradients travel together where these are
    equal, as the program of the step has it. scale: what every gradient is multiplied by. parts: of those that their
    group shares out. bucket_bytes: at which a bucket is full.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        order: Sequence[str],
        groups: Mapping[str, Group],
        *,
        shared_by: Mapping[str, Hashable] | None = None,
        scale: float = 1.0,
        layouts: Mapping[str, ShardLayout] = NONE,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters, self.scale = parameters, scale
        self.buckets: list[GradientBucket] = []
        self.of: dict[str, GradientBucket] = {}
        # Of gradients that are partly summed and partly not: PyTorch's counter of writes, as the last pass left it.
        self.versions: dict[str, int] = {}
        self._zeros: dict[tuple[torch.dtype, torch.device], Tensor] = {}
        # Whose .grad holds gradients not yet summed over the ranks (no_sync), and what it holds that is.
        self.local: dict[str, Tensor | None] = {}
        # What was trained in passes within no_sync() since the last sum, also where it is frozen now; as on all ranks.
        self.owed: set[str] = set()
        shared = [name for name in order if len(groups[name]) > 1]
        gradients = list[tuple[Hashable, float]]()
        for name in shared:
            p, part = local_tensor(parameters[name]), layouts.get(name)
            size = p.nbytes if part is None else part.row * len(part.group) * p.element_size()
            layer = "" if part is None else part.gathered
            by = groups[name] if shared_by is None else shared_by[name]
            gradients.append(((by, p.dtype, layer, part is None), ALONE if layer else size))
        for places in fill(gradients, bucket_bytes):
            names = [shared[i] for i in places]
            slots = BucketSlots(names, layouts) if names[0] in layouts else None
            self.buckets.append(GradientBucket(groups[names[0]], names, slots))
            self.of |= dict.fromkeys(names, self.buckets[-1])

    def zero(self, like: Tensor) -> Tensor:
        """Returns the zero that a gradient is added to, so that it has no -0.0 (see `Gradients`)."""
        key = like.dtype, like.device
        if key not in self._zeros:
            self._zeros[key] = like.new_zeros(())
        return self._zeros[key]

    def forget(self) -> None:
        """Gives up all memory, where the parameters are of another element type now."""
        for bucket in self.buckets:
            bucket.forget()

    def check_sums(self) -> None:
        """LayerwiseError where a loop has written to a gradient of which one part is summed over the ranks already."""
        for name, version in self.versions.items():
            gradient = self.parameters[name].grad
            if gradient is not None and local_tensor(gradient)._version != version:
                raise LayerwiseError(
                    f"the gradient of parameter {name!r} was written to between passes of which some are within "
                    "no_sync(): what is of all ranks and what of this one cannot be told apart any more. Write to it "
                    "after the last pass, or zero it by set_to_none=True"
                )
        self.versions = {}

    def hand_out(self, p: nn.Parameter, gradient: Tensor) -> None:
        """Puts a gradient into the parameter's `.grad`, in the parameter's memory format."""
        part = local_tensor(p)
        if gradient.stride() != part.stride():
            gradient = torch.empty_like(part).copy_(gradient)
        p.grad = like(p, gradient) if is_dtensor(p) else gradient


class Gradients:
    """One backward pass's gradients, from the first to `finish`.

    Buckets leave in their order, on every rank, whatever order autograd makes the gradients in.
    """

    def __init__(self, reducer: GradientReducer, comm: Comm, *, synchronise: bool, trace: Trace | None = None) -> None:
        self.reducer, self.comm, self.synchronise, self.trace = reducer, comm, synchronise, trace
        self.earlier: dict[str, Tensor] = {}  # of earlier passes, already summed over the ranks
        self.alone: dict[str, Tensor] = {}
        self.made: set[str] = set()  # of which parameters there is one
        # Whose gradient is zeros because no rank's loss depends on them: they are to have none.
        self.no_gradient: frozenset[str] = frozenset()
        self.unused: set[str] = set()  # of which this rank has none, but others may
        self.elsewhere: set[str] = set()  # whose gradient other ranks have, and this one none of it
        reducer.check_sums()
        for bucket in reducer.buckets:
            bucket.renew(reducer.parameters)
            bucket.end()  # of a pass that was ended by an error
            bucket.missing = {name for name in bucket.names if self._to_sum(name)}
            bucket.sent = not bucket.missing  # all of it is frozen
            for name in bucket.names:
                p, view = reducer.parameters[name], bucket.views.get(name)
                if (
                    not p.requires_grad
                    and p.grad is not None
                    and view is not None
                    and same_memory(local_tensor(p.grad), view)
                ):
                    # Of before it was frozen: to stay as it is while its bucket is summed.
                    reducer.hand_out(p, local_tensor(p.grad).clone())

    def _to_sum(self, name: str) -> bool:
        """True if a gradient in a bucket is yet to come, or is there and not yet that of all ranks."""
        return self.reducer.parameters[name].requires_grad or (self.synchronise and name in self.reducer.owed)

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of one parameter; its bucket is sent when nothing is missing in it and in those before."""
        reducer = self.reducer
        bucket, p = reducer.of.get(name), reducer.parameters[name]
        if not (self._to_sum(name) if bucket is not None else p.requires_grad):  # frozen after loading
            return
        self.made.add(name)
        if bucket is None:
            self.alone[name] = scaled(gradient, reducer.scale)
            return
        if bucket.slots is not None:
            bucket.put(name, gradient, reducer.scale, reducer.zero(gradient))
        else:
            bucket.allocate(reducer.parameters)
            self._place(name, p, gradient, bucket.views[name])
        bucket.missing.discard(name)
        self._send_full()

    def _send_full(self) -> None:
        """Begins the sums of the buckets that are full.

        Also within no_sync() of those of which this rank keeps a part: it has no room for a gradient of all of it.
        """
        going = [bucket for bucket in self.reducer.buckets if self.synchronise or bucket.slots is not None]
        for bucket in ready(bucket for bucket in going if not bucket.gathered):
            self._send(bucket)
        # Those of one layer each leave in the order of the layers. So every rank begins each of them before it goes on
        # to the next layer's, and can wait for the one before: no more than two are there at a time.
        of_layers = [bucket for bucket in going if bucket.gathered]
        for bucket in ready(of_layers):
            for earlier in of_layers:
                earlier.end()
            self._send(bucket)

    def _send(self, bucket: GradientBucket) -> None:
        what, trace = f"gradients of {bucket.names[0]}", self.trace
        begun = None if trace is None else trace.begin(what, "sync")
        handle = bucket.begin(self.comm, what)
        if trace is not None and begun is not None:
            handle.when_done(partial(trace.end, begun))

    def _place(self, name: str, p: nn.Parameter, gradient: Tensor, view: Tensor) -> None:
        """Adds this gradient, and those of earlier passes that are yet to be summed over the ranks, to the bucket."""
        local, accumulated = self.reducer.local, None if p.grad is None else local_tensor(p.grad)
        zero, scale = self.reducer.zero(view), self.reducer.scale
        if accumulated is None:
            local.pop(name, None)
            torch.add(zero, gradient, alpha=scale, out=view)
        elif name in local:
            summed, total = local[name], torch.add(accumulated, gradient, alpha=scale)
            if self.synchronise and summed is not None:
                total -= summed
                self.earlier[name] = summed
            torch.add(zero, total, out=view)
        elif self.synchronise:
            self.earlier[name] = accumulated.clone() if same_memory(accumulated, view) else accumulated
            torch.add(zero, gradient, alpha=scale, out=view)
        else:
            local[name] = accumulated.clone()
            torch.add(accumulated, gradient, alpha=scale, out=view)
        p.grad = None  # what autograd adds here from now on, of a weight penalty, is not of the module

    def finish(self) -> None:
        """Waits for the sums, and gives every parameter its gradient. Where nothing was made it leaves all as it is."""
        reducer = self.reducer
        if not self.made and any(p.requires_grad for p in reducer.parameters.values()):
            return
        self._without_gradient()
        running = [bucket for bucket in reducer.buckets if bucket.handle is not None]
        if running:
            with self.trace.span(WAITING, "sync") if self.trace is not None else nullcontext():
                for bucket in running:
                    bucket.end()
        for bucket in reducer.buckets:
            if bucket.slots is not None:
                self._hand_out_shards(bucket)
                continue
            for name in bucket.names:
                p = reducer.parameters[name]
                if not self._to_sum(name):
                    continue
                if not self.synchronise:
                    reducer.owed.add(name)
                view = bucket.views[name]
                if name in self.unused and (not self.synchronise or is_nothing(view)):
                    self.made.discard(name)
                    continue  # on no rank
                before = p.grad is not None or name in self.earlier or name in reducer.local
                if name in self.no_gradient and not before:
                    continue
                for more in (self.earlier.get(name), p.grad):
                    if more is not None:
                        view += local_tensor(more)
                reducer.hand_out(p, view)
                if self.synchronise:
                    reducer.local.pop(name, None)
                else:
                    reducer.local.setdefault(name, None)
        for name in self.elsewhere - self.no_gradient:
            p = reducer.parameters[name]
            if p.grad is None:
                reducer.hand_out(p, torch.empty_like(local_tensor(p)))
        for name, gradient in self.alone.items():
            p = reducer.parameters[name]
            if p.grad is not None or name not in self.no_gradient:
                reducer.hand_out(p, gradient if p.grad is None else local_tensor(p.grad) + gradient)
        if self.synchronise:
            reducer.owed.clear()
        else:
            mixed = (name for name, summed in reducer.local.items() if summed is not None)
            gradients = ((name, reducer.parameters[name].grad) for name in mixed)
            reducer.versions = {name: local_tensor(g)._version for name, g in gradients if g is not None}

    def _hand_out_shards(self, bucket: GradientBucket) -> None:
        """Gives each parameter this rank's shard of the sum, added to what it has."""
        for name in bucket.names if bucket.local is not None else ():
            p = self.reducer.parameters[name]
            if not p.requires_grad:
                continue
            part = bucket.summed(name, self.comm.rank)
            if name in self.unused and is_nothing(part):
                self.made.discard(name)
            elif p.grad is not None:
                local_tensor(p.grad).add_(part)
            elif name not in self.no_gradient:
                self.reducer.hand_out(p, part)
        bucket.flat = bucket.local = None

    def refuse_derivatives(self) -> None:
        """Makes gradients of a pass that was to make a graph say that they have none, when they are differentiated."""
        for name in self.made:
            p = self.reducer.parameters[name]
            if p.grad is not None:
                p.grad = refuse_derivatives(name, p.grad)

    def call_hooks(self) -> None:
        """Calls the loop's hooks of parameters that have their gradient now, in one order on all ranks."""
        reducer = self.reducer
        if not self.synchronise or (not self.made and any(p.requires_grad for p in reducer.parameters.values())):
            return
        for name, p in reducer.parameters.items():
            if name in self.made and name not in self.no_gradient:
                call_hooks(p)

    def absent(self, name: str) -> None:
        """Notes that other ranks make the gradient of this parameter, if any does."""
        if self.reducer.parameters[name].requires_grad:
            self.made.add(name)
            bucket = self.reducer.of.get(name)
            if bucket is None:  # this rank has none of it
                self.elsewhere.add(name)
                return
            self._fill(bucket, name)
            self._send_full()

    def _without_gradient(self) -> None:
        """Fills the buckets, for parameters that the loss does not depend on."""
        for bucket in self.reducer.buckets:
            for name in [name for name in bucket.names if name in bucket.missing]:
                self._fill(bucket, name)
        self._send_full()

    def _fill(self, bucket: GradientBucket, name: str) -> None:
        """Fills in what stands for no gradient: where no rank has one the parameter is left as it is, as on one device.

        So it stands for zeros with a sign: a sum of -0.0 alone is -0.0, and any other gradient makes it 0.0.
        """
        reducer, p = self.reducer, self.reducer.parameters[name]
        if bucket.slots is not None:
            bucket.put_none(name, reducer.zero(local_tensor(p)))
            bucket.missing.discard(name)
            self.unused.add(name)
            return
        if name in reducer.local and p.grad is not None:  # of an earlier pass, to be summed now
            self.add(name, torch.zeros_like(local_tensor(p)))
            return
        bucket.allocate(reducer.parameters)
        if p.grad is not None and same_memory(local_tensor(p.grad), bucket.views[name]):
            reducer.hand_out(p, local_tensor(p.grad).clone())
        bucket.views[name].fill_(-0.0)
        bucket.missing.discard(name)
        self.unused.add(name)
