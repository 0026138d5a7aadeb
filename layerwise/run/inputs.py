"""Inputs: checks this rank's inputs, and supplies the network's constants."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.importers.load import Network
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
        self._constants = {
            layer.name: _constant(network, layer.name).to(options.device, options.element_type(layer.out.dtype, graph))
            for layer in graph.layers
            if layer.role is Role.CONSTANT
        }

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
        """Returns each layer's box on the device, constants included. Raises LayerwiseError for a
        wrong shape or type.
        """
        fed = {
            layer.name: self._checked(schedule, layer.name, x) for layer, x in zip(self._layers, inputs, strict=True)
        }
        for name, value in self._constants.items():
            shape = schedule.graph[name].out.shape
            fed[name] = value if tuple(value.shape) == shape else _repeated(name, value, shape)
        return fed

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


def _repeated(name: str, value: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns a constant with a row a sample, for another batch size. Raises LayerwiseError if its rows differ."""
    if value.dim() != len(shape) or not bool((value == value[:1]).all()):
        raise LayerwiseError(f"constant {name!r} of shape {tuple(value.shape)} cannot grow to {shape}: its rows differ")
    return value[:1].expand(shape)
