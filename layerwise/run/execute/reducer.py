"""GradientReducer: ranks that hold the same box of a parameter sum its gradients, in buckets, during the backward pass.

It works like DistributedDataParallel: gradients are views of flat buckets, filled in the order in which the backward
pass computes them; a full bucket is all-reduced while the pass goes on. Gradients are scaled to a mean as they are
copied in. Within `no_sync()` a rank accumulates the gradient as if all ranks of its group had the same; the next sum
outside takes the mean, which does not change what is already equal on all ranks.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Hashable, Mapping, Sequence, Set
from contextlib import nullcontext
from functools import cache, partial

import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group
from layerwise.errors import LayerwiseError
from layerwise.partition.buckets import ALONE, BUCKET_BYTES, fill
from layerwise.run.execute.buckets import BucketSlots, GradientBucket, ShardLayout, ready
from layerwise.run.guards.hooks import call_hooks, refuse_derivatives
from layerwise.run.local_tensor import is_dtensor, like, local_tensor
from layerwise.trace import Trace

BITS = 62  # bits in a number that ranks tell each other
WAITING = "waiting for gradients"  # trace span: the part of the sums that the backward pass does not hide


class GradientReducer:
    """The gradients of one rank's parameters. `order`: that of the backward pass; `groups`: the ranks that share each.

    shared_by: the groups of all ranks, if other ranks' may differ; gradients are sent together if these are equal, as
    in the step's program. scale: the factor for every gradient. layouts: of parameters cut into shards. bucket_bytes:
    the size at which a bucket is full. waiting: whether gradients of passes within no_sync() are still to be summed.
    asks: whether the ranks tell each other, at the end of a pass, which gradients they have computed: after the first
    pass, and from the first pass in which some rank missed one. missed: whether this rank missed one. report: what it
    tells the others about its last pass, in the next forward pass.
    """

    def __init__(
        self,
        parameters: Mapping[str, nn.Parameter],
        order: Sequence[str],
        groups: Mapping[str, Group],
        *,
        shared_by: Mapping[str, Hashable] | None = None,
        scale: float = 1.0,
        layouts: Mapping[str, ShardLayout] | None = None,
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:
        self.parameters, self.scale = parameters, scale
        self.buckets: list[GradientBucket] = []
        self.of: dict[str, GradientBucket] = {}
        self.waiting, self.asks, self.missed, self.report = False, True, False, 1
        self._order, layouts = list(order), layouts or {}
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

    def hear(self, reports: Sequence[int]) -> None:
        """Takes the ranks' reports of their last pass. Raises LayerwiseError if their gradients differed."""
        self.asks = any(report & 1 for report in reports)
        if len({report >> 1 for report in reports}) > 1:
            raise LayerwiseError(
                "in the last backward pass some ranks had zero gradients where others had none, so their parameters "
                "now differ: call the model and backward in the same way on all ranks, and resume from the last "
                "checkpoint"
            )

    def note_pass(self, made: Set[str]) -> None:
        """Makes the report of a pass that has summed all gradients: whether one was ever missed, and which are None.

        made: names of parameters that have a gradient of this pass.
        """
        trained = [(name, self.parameters[name]) for name in self._order if name not in made]
        left = [name for name, p in trained if p.grad is None and p.requires_grad]
        self.missed |= bool(left)
        self.report = (zlib.crc32(" ".join(left).encode()) if left else 0) << 1 | self.missed

    def hand_out(self, p: nn.Parameter, gradient: Tensor) -> None:
        """Puts a gradient into the parameter's `.grad`, in the parameter's memory format."""
        part = local_tensor(p)
        if gradient.stride() != part.stride():
            gradient = torch.empty_like(part).copy_(gradient)
        p.grad = like(p, gradient) if is_dtensor(p) else gradient


class Gradients:
    """One backward pass's gradients, from the first to `finish`.

    Buckets are sent in the same order on every rank, whatever order autograd computes the gradients in. The `.grad` of
    before is put aside, so that what autograd adds there meanwhile, as for a weight penalty, can be told apart.
    """

    def __init__(self, reducer: GradientReducer, comm: Comm, *, synchronise: bool, trace: Trace | None = None) -> None:
        self.reducer, self.comm, self.synchronise, self.trace = reducer, comm, synchronise, trace
        self.before: dict[str, Tensor] = {}
        self.local: dict[str, Tensor] = {}  # not summed, or not yet
        self.made: set[str] = set()  # parameters that have a gradient
        self.trained = {name for name, p in reducer.parameters.items() if p.requires_grad}
        # Parameters whose gradient is zero because no rank's loss depends on them: they are to have none.
        self.no_gradient: frozenset[str] = frozenset()
        self.elsewhere: set[str] = set()  # parameters whose gradient only other ranks compute
        self.begun = False  # whether the pass has reached what all ranks sum, even if this rank adds nothing
        for name, p in reducer.parameters.items() if comm.size > 1 else ():  # on one rank autograd adds to .grad itself
            if p.grad is not None:
                self.before[name], p.grad = p.grad, None
        for bucket in reducer.buckets:
            trained = self.trained.intersection(bucket.names)
            # True also for parameters frozen since they were trained within no_sync().
            summed = bool(trained) or reducer.waiting
            bucket.begin_pass(trained, summed=summed and self._sums(bucket))

    def _sums(self, bucket: GradientBucket) -> bool:
        """True if this pass sums a bucket: within no_sync() only if this rank has no room for the full gradient."""
        return self.synchronise or bucket.slots is not None

    def add(self, name: str, gradient: Tensor) -> None:
        """Adds the gradient of one parameter; its bucket is sent once it and all buckets before it are full."""
        reducer = self.reducer
        if name not in self.trained:  # frozen after loading
            return
        self.made.add(name)
        bucket = reducer.of.get(name)
        if bucket is None or not self._sums(bucket):
            self.local[name] = gradient
            return
        if bucket.slots is not None:
            bucket.put(name, gradient, reducer.scale)
        else:
            view = bucket.place(name, reducer.parameters)
            torch.mul(gradient, reducer.scale, out=view)
            if reducer.waiting and name in self.before:
                view.add_(local_tensor(self.before[name]), alpha=1 / len(bucket.group))
        bucket.missing.discard(name)
        self._send_full()

    def absent(self, name: str) -> None:
        """Notes that other ranks compute the gradient of this parameter, if any does."""
        if name not in self.trained:
            return
        self.begun, bucket = True, self.reducer.of.get(name)
        if bucket is None:  # this rank has none of it
            self.elsewhere.add(name)
            return
        bucket.missing.discard(name)
        self._send_full()

    def _send_full(self) -> None:
        """Begins the sums of the buckets that are full."""
        going = self.reducer.buckets
        for bucket in ready(bucket for bucket in going if not bucket.gathered):
            self._send(bucket)
        # Buckets of one layer each are sent in the order of the layers. So every rank begins each before it goes on to
        # the next layer's, and can wait for the one before: at most two exist at a time.
        of_layers = [bucket for bucket in going if bucket.gathered]
        for bucket in ready(of_layers):
            for earlier in of_layers:
                earlier.end()
            self._send(bucket)

    def _send(self, bucket: GradientBucket) -> None:
        what, trace, parameters = f"gradients of {bucket.names[0]}", self.trace, self.reducer.parameters
        written = self.made
        begun = None if trace is None else trace.begin(what, "sync")
        if self.reducer.waiting and bucket.slots is None:
            written = self.made | self.before.keys()
            for name in (self.before.keys() & bucket.names) - self.made:
                torch.mul(local_tensor(self.before[name]), 1 / len(bucket.group), out=bucket.place(name, parameters))
        handle = bucket.begin(self.comm, what, parameters, written)
        if trace is not None and begun is not None:
            handle.when_done(partial(trace.end, begun))

    def finish(self) -> None:
        """Waits for the sums, and gives every parameter its gradient. Changes nothing if the pass computed none."""
        reducer = self.reducer
        telling = self._tell() if reducer.asks and self.comm.size > 1 else None
        begun = bool(self.begun or self.made or (telling is not None and telling()))
        if not begun and self.trained:
            self._restore()
            return
        for bucket in reducer.buckets:
            bucket.missing = set()
        self._send_full()
        running = [bucket for bucket in reducer.buckets if bucket.handle is not None]
        with self.trace.span(WAITING, "sync") if self.trace is not None and running else nullcontext():
            told = None if telling is None else telling()
            for bucket in running:
                bucket.end()
        self._take_sums(told)
        self._take_local()
        for name in self.elsewhere if told is None else told - reducer.of.keys():
            if name in self.trained - self.made and self._wanted(name):
                self.made.add(name)
                if name not in self.before:
                    p = reducer.parameters[name]
                    reducer.hand_out(p, torch.zeros_like(local_tensor(p)))
        self._restore()
        if self.synchronise:
            reducer.note_pass(self.made)
        reducer.waiting = not self.synchronise

    def _tell(self) -> Callable[[], set[str]]:
        """Starts to tell all ranks which gradients this one has; the returned function names those that any has."""
        names = list(self.reducer.parameters)
        here = list(map(self._here, names))
        numbers = [sum(has << i for i, has in enumerate(here[k : k + BITS])) for k in range(0, len(here), BITS)]
        ranks = cache(self.comm.tell(numbers))
        return lambda: {name for i, name in enumerate(names) if any(row[i // BITS] >> i % BITS & 1 for row in ranks())}

    def _wanted(self, name: str) -> bool:
        """True if a parameter is to get the gradient: not zeros that no loss depends on, if it had none before."""
        return name not in self.no_gradient or name in self.before

    def _take_sums(self, told: set[str] | None) -> None:
        """Gives parameters the sums. What only others computed counts if they say so, or if it is not zero."""
        reducer = self.reducer
        for bucket in reducer.buckets:
            added = reducer.waiting and bucket.slots is None
            for name in bucket.names if bucket.views or bucket.local is not None else ():
                given = self._here(name)
                if not given and name in self.trained:
                    reducer.missed = True
                    given = bool(bucket.summed(name, self.comm.rank).any()) if told is None else name in told
                    self.made |= {name} if given else set()
                if given and self._wanted(name):
                    self._give(name, bucket.summed(name, self.comm.rank), added=added)
                else:
                    self.made.discard(name)
            bucket.give_up()

    def _here(self, name: str) -> bool:
        """True if this rank has a gradient to sum, from this pass or earlier ones within no_sync()."""
        return name in self.made or (self.reducer.waiting and name in self.before)

    def _take_local(self) -> None:
        """Gives parameters the gradients that are not summed: their own, or within no_sync() their share of the mean.

        They are scaled in place, as the pass no longer reads them.
        """
        if self.no_gradient:
            for name in [name for name in self.local if not self._wanted(name)]:
                self.made.discard(name)
                del self.local[name]
        scale, of = self.reducer.scale, self.reducer.of
        factors = [scale if self.synchronise or name not in of else scale * len(of[name].group) for name in self.local]
        if set(factors) - {1}:
            torch._foreach_mul_(list(self.local.values()), factors)
        for name, gradient in self.local.items():
            self._give(name, gradient, added=False)
        self.local = {}

    def _give(self, name: str, gradient: Tensor, *, added: bool) -> None:
        """Puts a gradient into `.grad`. added: it already includes what was there before."""
        p, before = self.reducer.parameters[name], self.before.pop(name, None)
        outside = p.grad
        if before is None or added:
            self.reducer.hand_out(p, gradient)
        else:
            local_tensor(before).add_(gradient)
            p.grad = before
        if outside is not None:
            assert p.grad is not None
            local_tensor(p.grad).add_(local_tensor(outside))

    def _restore(self) -> None:
        """Gives parameters back their earlier `.grad`, plus what autograd has added since."""
        for name, before in self.before.items():
            p = self.reducer.parameters[name]
            if p.grad is not None:
                local_tensor(before).add_(local_tensor(p.grad))
            p.grad = before
        self.before = {}

    def fail(self) -> None:
        """Gives parameters back their earlier `.grad` after an error has ended the pass."""
        for name, p in self.reducer.parameters.items() if self.comm.size > 1 else ():
            p.grad = self.before.get(name)
        self.before = {}

    def refuse_derivatives(self) -> None:
        """Makes gradients of a `create_graph=True` pass raise when they are differentiated."""
        for name in self.made:
            p = self.reducer.parameters[name]
            if p.grad is not None:
                p.grad = refuse_derivatives(name, p.grad)

    def call_hooks(self) -> None:
        """Calls the loop's hooks of parameters that now have their gradient, in one order on all ranks."""
        if self.synchronise:
            for name, p in self.reducer.parameters.items():
                if name in self.made:
                    call_hooks(p)
