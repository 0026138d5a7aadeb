"""Working parameters: the tensors that layers compute with in place of the parameters, and their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from weakref import WeakMethod

import torch
from torch import Tensor

from layerwise.comm.base import Group
from layerwise.ops.base import Role
from layerwise.partition.groups import sharing
from layerwise.partition.place import Each
from layerwise.partition.sharding import Sharding
from layerwise.run.execute.buckets import shard_layout
from layerwise.run.execute.gathers import GatheredParameters, Gathers, LayerGathers
from layerwise.run.execute.reducer import GradientReducer, Gradients
from layerwise.run.execute.unused import Unused
from layerwise.run.guards.hooks import check_parameters, hook_of
from layerwise.run.local_tensor import local_tensor
from layerwise.run.schedule.schedule import Schedule
from layerwise.run.state.state import State
from layerwise.trace import NOTHING


class WorkingParameters:
    """An autograd leaf for each parameter, whose gradients are summed before the parameters get them.

    A leaf shares the parameter's memory; the leaf of a sharded parameter is empty until its layer computes. Buffers,
    and everything on one device, are used as they are.

    parts: of parameters that are cut into shards, by name. groups: of trained parameters, the ranks that compute with
    the same box, for each rank. reducer: sums gradients over these. unused: parameters that no loss depends on.
    """

    def __init__(
        self,
        state: State,
        schedule: Schedule,
        boxes: Mapping[str, Each],
        shared_out: Mapping[str, tuple[Sharding, str]],
        scale: float,
        gradients: Callable[[], Gradients],
    ) -> None:
        """boxes: that ranks compute with. shared_out: shardings and states. gradients: a method that returns them."""
        self._state, self._comm, self._graph = state, state.comm, schedule.graph
        self._gradients = WeakMethod(gradients)  # the method's owner owns this
        owners = {name: layer.name for layer in self._graph.layers for name, _ in layer.own_parameters()}
        self.layouts = {
            name: shard_layout(boxes[name], one, self._comm.rank, gathered=owners[name] if states == "gathered" else "")
            for name, (one, states) in shared_out.items()
            if boxes[name][self._comm.rank] is not None
        }
        self._elsewhere = {name for one in schedule.layers for name in one.elsewhere}
        self._tied = {layer.name for layer in self._graph.layers if layer.role is Role.TIED}
        every = state.tree.parameters()
        trained = [name for name, p in every.items() if p.requires_grad]
        self.groups = {name: [sharing(boxes[name], rank) for rank in range(self._comm.size)] for name in trained}
        named = [[p for p in reversed(one.parameters) if p is not None] for one in reversed(schedule.layers)]
        # The program has the same order.
        order = [p for names in named for p in sorted(names, key=lambda p: p not in shared_out)]
        order += [layer.name for layer in reversed(self._graph.layers) if layer.name in self._tied]
        local: dict[str, Group] = {name: groups[self._comm.rank] for name, groups in self.groups.items()}
        ordered, size = [name for name in order if name in local], schedule.bucket_bytes
        of_all = {name: tuple(groups) for name, groups in self.groups.items()}
        self.reducer = GradientReducer(
            every, ordered, local, shared_by=of_all, scale=scale, layouts=self.layouts, bucket_bytes=size
        )
        self.unused = Unused(self._graph, self._comm)
        self._tensors: Mapping[str, Tensor] = {}

    def renew(self) -> None:
        """Drops the leaves after parameters got other memory, as by `to`, or another element type."""
        self._tensors = {}

    def now(self) -> Mapping[str, Tensor]:
        """Returns the leaves by name, new ones for parameters that the loop gave other memory (p.data = x)."""
        summed = self.reducer.parameters if self._comm.size > 1 else {}
        if not self._tensors:
            tensors = {name: local_tensor(tensor) for name, tensor in self._state.tree.tensors().items()}
            self._tensors = {name: self._leaf(name, t) if name in summed else t for name, t in tensors.items()}
            self._gathers = Gathers(self._graph, self.layouts, self.reducer, self._tensors, self._comm)
        if summed:
            tensors = dict(self._tensors)
            for name, p in summed.items():
                if name not in self.layouts and tensors[name].data_ptr() != local_tensor(p).data_ptr():
                    tensors[name] = self._leaf(name, local_tensor(p))
                tensors[name].requires_grad_(p.requires_grad)
            self._tensors = tensors
        return self._tensors

    def begin(self, constants: Mapping[str, Tensor]) -> tuple[GatheredParameters, Mapping[str, LayerGathers]]:
        """Begins a forward pass. Returns the tensors it computes with, and the gathers of layers."""
        tensors = {**self.now(), **constants}
        return self._gathers.begin(tensors), self._gathers.of_layers

    def check_hooks(self) -> None:
        """Raises LayerwiseError if a parameter has a hook that would not be called with its gradient."""
        parameters = self.reducer.parameters
        names = parameters if self._comm.size > 1 else self._tied & parameters.keys()
        check_parameters((name, parameters[name]) for name in names)

    def begin_backward(self) -> None:
        """Begins a backward pass."""
        self.unused.begin()
        self.check_hooks()

    def finish(self, gradients: Gradients) -> None:
        """Ends the backward pass, which has passed every communication."""
        self._gathers.end()
        gradients.no_gradient = self.unused.parameters()

    def _leaf(self, name: str, tensor: Tensor) -> Tensor:
        leaf = tensor.detach()
        if name in self.layouts:
            leaf = leaf.new_empty(self.layouts[name].shape)
        leaf.requires_grad_()
        leaf.register_post_accumulate_grad_hook(hook_of(self, name))  # type: ignore[no-untyped-call]
        return leaf

    def made(self, name: str, leaf: Tensor) -> None:
        """Takes a leaf's gradient, which autograd has accumulated."""
        begun = self._gradients()
        assert begun is not None
        gradients = begun()
        gradient, leaf.grad = leaf.grad, None
        self._gathers.made(name)
        if gradient is None:  # autograd came by without a gradient: this rank's loss does not use the output
            if name in self.layouts and self.layouts[name].gathered:  # others may wait for its sum
                gradients.absent(name)
            return
        # Entering a context takes longer than what is in it.
        with torch.no_grad() if torch.is_grad_enabled() else NOTHING:
            if name in self._elsewhere:
                gradients.absent(name)
            else:
                gradients.add(name, gradient)
