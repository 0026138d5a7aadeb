"""Inputs: checks this rank's inputs, and supplies the network's constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.load import Network
from layerwise.importers.torch.calls.recipes import stored
from layerwise.ops.base import Role
from layerwise.plan import Plan
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.schedule import Schedule
from layerwise.tensorfile import dtype_name


class Inputs:
    """The inputs and constants that a rank's layers begin with."""

    def __init__(self, network: Network, plan: Plan, comm: Comm, options: RuntimeOptions) -> None:
        self.plan, self.comm, self.options = plan, comm, options
        graph, uses, self._undifferentiated = network.graph, network.graph.consumers(), network.inputs_without_gradient
        self._layers = [layer for layer in graph.layers if layer.role is Role.INPUT]
        self._types = {layer.name: [getattr(torch, layer.out.dtype)] for layer in self._layers}
        for layer in self._layers:  # beside the example's types
            if layer.out.differentiable:
                beside = (options.element_type(layer.out.dtype, graph), options.autocast)
                self._types[layer.name] += [dtype for dtype in beside if dtype is not None]
            elif all(
                use.main.ids and layer.name not in use.inputs[1:] for use in map(graph.__getitem__, uses[layer.name])
            ):
                self._types[layer.name] += [torch.int64, torch.int32]  # PyTorch takes both as ids
        constants = [layer.name for layer in graph.layers if layer.role is Role.CONSTANT]
        self._constants = {name: network.recipe(name) or _constant(network, name) for name in constants}
        self._boxes = dict[tuple[str, tuple[int, ...], Box], Tensor]()  # of constants, that layers read

    def fed_samples(self, inputs: Sequence[Tensor]) -> int:
        """Returns the number of samples. Raises LayerwiseError for too many inputs, or anything but tensors."""
        if len(inputs) != len(self._layers):
            raise LayerwiseError(
                f"the model takes {len(self._layers)} inputs ({', '.join(layer.name for layer in self._layers)}), but "
                f"was called with {len(inputs)}"
            )
        for layer, x in zip(self._layers, inputs, strict=True):
            if not isinstance(x, Tensor):
                raise LayerwiseError(f"input {layer.name!r} is of type {type(x).__name__}: pass a tensor")
        if self.plan.io == "boxes":
            return self.plan.batch
        pairs = zip(self._layers, inputs, strict=True)
        return next((x.shape[0] for layer, x in pairs if layer.out.index("n") == 0), self.plan.batch)

    def full(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Returns the inputs that every rank feeds in full: what all samples share, and with io "free" the batch. With
        io "boxes" each rank has a part of each.
        """
        if self.plan.io == "boxes":
            return []
        pairs = zip(self._layers, inputs, strict=True)
        return [x for layer, x in pairs if self.plan.io == "free" or layer.out.index("n") is None]

    def differentiated(self, inputs: Sequence[Tensor], scales: Sequence[float]) -> frozenset[str]:
        """Returns the inputs that need gradients. scales: the factors of the outputs' gradients.

        Raises LayerwiseError if they would not be those of this rank's own loss.
        """
        if not torch.is_grad_enabled():
            return frozenset()
        names = frozenset(layer.name for layer, x in zip(self._layers, inputs, strict=True) if x.requires_grad)
        if names and self.comm.size > 1 and (self.plan.io != "sample" or any(scale != 1 for scale in scales)):
            raise LayerwiseError(
                f"input {min(names)!r} requires a gradient, which layerwise computes only if all ranks feed the same "
                "number of samples and the loss is a mean: detach the input, or feed such a batch"
            )
        if names and self._undifferentiated is not None:
            raise LayerwiseError(
                f"input {min(names)!r} requires a gradient, which the layers compute differently from the model: "
                f"detach it, or parallelize with example_inputs that require a gradient ({self._undifferentiated})"
            )
        return names

    def fed(self, schedule: Schedule, inputs: Sequence[Tensor]) -> dict[str, Tensor]:
        """Returns each layer's box on the device, constants too. Raises LayerwiseError for a wrong shape or type."""
        fed = {
            layer.name: self._checked(schedule, layer.name, x) for layer, x in zip(self._layers, inputs, strict=True)
        }
        with torch.inference_mode(False), torch.autocast("cpu", enabled=False):  # training may use the same boxes later
            return fed | {name: self._box(schedule, name) for name in self._constants}

    def _box(self, schedule: Schedule, name: str) -> Tensor:
        """Returns this rank's box of a constant on the device."""
        spec, value = schedule.graph[name].out, self._constants[name]
        box = schedule.places[name].owned.each[self.comm.rank]
        assert box is not None
        key = name, spec.shape, box
        if key not in self._boxes:
            recipe = stored(value) if isinstance(value, Tensor) else value
            if (rows := recipe.with_rows(spec.shape)) is None:
                raise LayerwiseError(
                    f"constant {name!r} of shape {recipe.shape} cannot grow to {spec.shape}: its rows differ"
                )
            part = rows.make(box) if isinstance(value, Tensor) else rows.box(box)
            dtype = schedule.options.element_type(spec.dtype, schedule.graph)
            part = part.to(self.options.device, dtype)
            alone = part.untyped_storage().nbytes() == part.nbytes  # else a view, which would hold all of it
            self._boxes[key] = part if alone else part.clone(memory_format=torch.contiguous_format)
        return self._boxes[key]

    def _checked(self, schedule: Schedule, name: str, x: Tensor) -> Tensor:
        spec = schedule.graph[name].out
        own = schedule.places[name].owned.each[self.comm.rank]
        wanted = spec.shape if own is None else own.shape
        if self.plan.io == "boxes" and own is not None and tuple(x.shape) == spec.shape:
            x = x[own.slices()]  # of the full batch, which is not copied
        if tuple(x.shape) != wanted:
            raise LayerwiseError(f"input {name!r} must have shape {wanted} on this rank, not {tuple(x.shape)}")
        if x.dtype not in self._types[name]:
            raise LayerwiseError(
                f"input {name!r} is {dtype_name(x.dtype)}, but the model was made parallel for "
                f"{dtype_name(self._types[name][0])}: pass x.to({self._types[name][0]})"
            )
        return x.to(self.options.device, schedule.options.element_type(spec.dtype, schedule.graph))


def _constant(network: Network, name: str) -> Tensor:
    value = network.constant(name)
    if value is None or (isinstance(value, Tensor) and value.is_meta):
        raise LayerwiseError(f"constant {name!r} has no value, as the model is on the meta device: build it elsewhere")
    return value.detach().clone() if isinstance(value, Tensor) else torch.tensor(value)
