"""Gathers: parameters of which each rank holds a shard, full for the layers that compute with them.

A layer computes with a working parameter, an autograd leaf of the box that the plan says. Every forward pass fills it:
at its beginning, overlapped with computation ("sharded"), or just before its layer ("gathered"). In the second case the
memory is freed after the layer, and gathered again before the layer's backward pass. All ranks gather in one order.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.utils.weak import TensorWeakRef

from layerwise.comm.base import Comm, Group, Handle
from layerwise.graph.layer_graph import LayerGraph
from layerwise.run.execute.buckets import BucketSlots, ShardLayout
from layerwise.run.execute.reducer import GradientReducer
from layerwise.run.guards.refusals import check_unwritten
from layerwise.run.local_tensor import Version, local_tensor, version


class ParameterGather:
    """The all-gather of some parameters of one group. working: the parameters to fill, by name."""

    def __init__(
        self, slots: BucketSlots, parameters: Mapping[str, nn.Parameter], working: Mapping[str, Tensor], comm: Comm
    ) -> None:
        self.names, self._slots, self._comm = tuple(slots.layouts), slots, comm
        self._parameters = {name: parameters[name] for name in self.names}
        self.working = {name: working[name] for name in self.names}
        self._member, self._what = slots.group.index(comm.rank), f"gather of {self.names[0]}"
        # the shards' versions that the working parameters were last filled with
        self._versions: Mapping[str, Version] = {}
        self._flight: tuple[Handle, Tensor] | None = None

    def begin(self) -> None:
        """Starts the all-gather."""
        with torch.no_grad():
            parts = {name: local_tensor(p).detach() for name, p in self._parameters.items()}
            first = parts[self.names[0]]
            shards, out = self._slots.new(first, slots=1), self._slots.new(first)
            for name, part in parts.items():
                self._slots.shard(shards, name, self._member).copy_(part)
            self._flight = self._comm.all_gather(out, shards, self._slots.group, "gathers", self._what), out

    def finish(self) -> None:
        """Waits, and fills the working parameters. Autograd is told only if the values may differ."""
        if self._flight is None:
            return
        (handle, out), self._flight = self._flight, None
        handle.wait()
        with torch.no_grad():
            now = {name: version(p) for name, p in self._parameters.items()}
            for name, working in self.working.items():
                same = self._versions.get(name) == now[name]
                full = working.data if same else working.detach()  # `.data` has a version counter of its own
                for there, part in self._slots.pairs(out, name, full):
                    part.copy_(there)
            self._versions = now

    def check(self) -> None:
        """Raises LayerwiseError if this rank's shard of a parameter was written to after it was gathered."""
        check_unwritten(self._parameters, self._versions)


class LayerGathers:
    """The gathers of one layer whose parameters are full only while it computes: one for each group of ranks."""

    def __init__(self, gathers: Sequence[ParameterGather]) -> None:
        self._gathers = gathers
        self._working = {name: working for gather in gathers for name, working in gather.working.items()}
        self.names = tuple(self._working)
        self._sizes = {name: working.untyped_storage().nbytes() for name, working in self._working.items()}
        self._begun = False
        self._marks: list[TensorWeakRef] = []  # held by graphs
        self.drop()

    def begin(self) -> None:
        """Starts the gathers, once."""
        if not self._begun:
            for name, working in self._working.items():
                working.untyped_storage().resize_(self._sizes[name])
            for gather in self._gathers:
                gather.begin()
            self._begun = True

    def finish(self) -> None:
        """Waits until the layer may compute."""
        self.begin()
        for gather in self._gathers:
            gather.finish()
        self._begun = False

    def finish_once_more(self) -> None:
        """Waits until the layer may be differentiated, or recomputed.

        Raises LayerwiseError if parameters differ from those of the forward pass.
        """
        for gather in self._gathers:
            gather.check()
        self.finish()

    def mark(self) -> Tensor:
        """Returns a tensor. A graph that holds it reads the parameters without a gather, so their memory stays."""
        mark = torch.empty(0)
        self._marks = [*self._living(), TensorWeakRef(mark)]
        return mark

    def _living(self) -> list[TensorWeakRef]:
        return [mark for mark in self._marks if mark() is not None]

    def give_up(self) -> None:
        """Drops everything before a forward pass, as gathers of a pass that failed may be under way."""
        self._begun = False
        self.drop()

    def drop(self, out: Tensor | None = None) -> None:
        """Frees the memory of the parameters, except those that `out`, the layer's output, is a view of."""
        for name in self._working:
            self.drop_one(name, out)

    def drop_one(self, name: str, out: Tensor | None = None) -> None:
        """Frees the memory of one parameter, unless something still reads it."""
        storage = self._working[name].untyped_storage()
        within = out is not None and out.untyped_storage()._cdata == storage._cdata
        if not (self._begun or within or self._living()):
            storage.resize_(0)


class GatheredParameters:
    """The tensors that layers compute with, by name. Reading one waits for its gather."""

    def __init__(self, tensors: Mapping[str, Tensor], gathers: Sequence[ParameterGather]) -> None:
        self._tensors = tensors
        self._coming = {name: gather for gather in gathers for name in gather.names}

    def __getitem__(self, name: str) -> Tensor:
        gather = self._coming.pop(name, None)
        if gather is not None:
            gather.finish()
        return self._tensors[name]

    def finish(self) -> None:
        """Waits for all gathers that nobody has asked for yet."""
        for name in list(self._coming):
            self[name]


class Gathers:
    """All gathers of a rank. of_layers: by layer, of parameters full only while it computes, in layer order."""

    def __init__(
        self,
        graph: LayerGraph,
        layouts: Mapping[str, ShardLayout],
        reducer: GradientReducer,
        working: Mapping[str, Tensor],
        comm: Comm,
    ) -> None:
        trained, buckets = reducer.parameters, [one for one in reversed(reducer.buckets) if not one.gathered]
        self._lasting = [ParameterGather(one.slots, trained, working, comm) for one in buckets if one.slots is not None]
        self.of_layers: dict[str, LayerGathers] = {}
        self._of: dict[str, LayerGathers] = {}  # by parameter
        for layer in graph.layers:
            groups = dict[Group, list[str]]()
            for name, _ in layer.own_parameters():
                if name in layouts and layouts[name].gathered:
                    groups.setdefault(layouts[name].group, []).append(name)
            if groups:
                gathers = LayerGathers(
                    [ParameterGather(BucketSlots(names, layouts), trained, working, comm) for names in groups.values()]
                )
                self.of_layers[layer.name] = gathers
                self._of |= dict.fromkeys(gathers.names, gathers)

    def begin(self, tensors: Mapping[str, Tensor]) -> GatheredParameters:
        """Starts a forward pass's gathers. Returns the tensors that layers compute with, by name."""
        for gathers in self.of_layers.values():
            gathers.give_up()
        for gather in self._lasting:
            gather.begin()
        return GatheredParameters(tensors, self._lasting)

    def made(self, name: str) -> None:
        """Frees a parameter once it has its gradient, as nobody needs its values any more."""
        if name in self._of:
            self._of[name].drop_one(name)

    def end(self) -> None:
        """Frees what is left at the end of the backward pass."""
        for gathers in self.of_layers.values():
            gathers.drop()


def gather_once_more(gathers: Mapping[str, LayerGathers], name: str, before: str | None) -> Sequence[Tensor]:
    """Gathers a layer's parameters before it is differentiated, and starts gathering the next layer's.

    Returns what this backward pass's graph must hold, if there is one: differentiating the layer again reads it.
    """
    own = gathers.get(name)
    if own is not None:
        own.finish_once_more()
    if before is not None and before in gathers:
        gathers[before].begin()
    return () if own is None else (own.mark(),)
