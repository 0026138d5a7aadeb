"""The user's module as the state of a run: its tensors, the buffers that it writes, and tensors in attributes."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.comm.base import Comm, Group
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import Layer
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network
from layerwise.ops.facts import Parameter
from layerwise.run.options import RuntimeOptions
from layerwise.run.state.initial import broadcast_values, drawn_as, initial
from layerwise.run.state.state import Shard, aliases_of
from layerwise.tensorfile import dtype_name


def settle_values(module: nn.Module, network: Network, graph: LayerGraph, options: RuntimeOptions) -> None:
    """Moves the module's tensors in place; those on the meta device are replaced by drawn values."""
    described = {
        name: (layer, drawn_as(graph).get(name, p)) for layer in graph.layers for name, p in layer.own_parameters()
    }
    names = {id(tensor): network.keys[key] for key, tensor in module.state_dict(keep_vars=True).items()}
    settled: dict[int, Tensor] = {}  # a tensor may occur several times in the module
    for child in module.modules():
        for slots in (child._parameters, child._buffers):
            for key, tensor in slots.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in settled:
                        settled[id(tensor)] = _made(tensor, names[id(tensor)], described, network, options)
                    slots[key] = settled[id(tensor)]  # type: ignore[assignment]

    def run_as(tensor: Tensor) -> Tensor:
        return tensor.to(options.device, options.element_type(dtype_name(tensor.dtype), graph))

    if any(run_as(t) is not t for t in (*module.parameters(), *module.buffers())):
        module._apply(run_as)  # type: ignore[no-untyped-call]


def _made(
    tensor: Tensor,
    name: str,
    described: Mapping[str, tuple[Layer, Parameter]],
    network: Network,
    options: RuntimeOptions,
) -> Tensor:
    """Returns a value as `State` would create it: drawn by position; zeros if the network does not compute with it."""
    if name in described:
        layer, p = described[name]
        dtype = options.element_type(dtype_name(tensor.dtype), network.graph)
        box = Box.full(p.shape)
        value = initial(network, layer, name, p, box, options.seed, dtype).view(tensor.shape)
    else:
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
    value = value.to(options.device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value


def map_kept_losses(module: nn.Module, treat: Callable[[Tensor], Tensor]) -> None:
    """Replaces differentiable tensors in the module's attributes by `treat` of them."""
    for owner in module.modules():
        for name, value in list(vars(owner).items()):
            holds = isinstance(value, Tensor | list | tuple | dict) and not name.startswith("_")
            if holds and any(isinstance(x, Tensor) and x.grad_fn is not None for x in pytree.tree_leaves(value)):
                owner.__dict__[name] = pytree.tree_map_only(Tensor, treat, value)


class ModelState:
    """Shards and the full state dict, by the network's names."""

    def __init__(self, keys: Mapping[str, str], graph: LayerGraph, module: nn.Module, comm: Comm) -> None:
        self._module, self.comm, self._aliases = weakref.ref(module), comm, aliases_of(keys)
        computed_with = {name for layer in graph.layers for name, _ in layer.own_parameters()}
        # What the network computes with, then the rest: counters.
        names = dict.fromkeys(keys.values())
        self._names = sorted(names, key=lambda name: name not in computed_with)

    @property
    def module(self) -> nn.Module:
        """Returns the user's module."""
        module = self._module()
        assert module is not None
        return module

    def shards(self) -> list[Shard]:
        """Returns every parameter and buffer."""
        tensors = self.module.state_dict(keep_vars=True)
        shards = []
        for name in self._names:
            if name in tensors:
                tensor, first = tensors[name], self.comm.rank == 0
                box = Box.full(tensor.shape)
                aliases = tuple(self._aliases.get(name, ()))
                trainable = isinstance(tensor, nn.Parameter)
                shards.append(Shard(name, aliases, box.shape, box, tensor.detach(), trainable, first))
        return shards

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the module's parameters, by name."""
        return dict(self.module.named_parameters())

    def sharing(self, name: str) -> Group:
        """Returns all ranks: each holds every tensor."""
        return tuple(range(self.comm.size))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns copies on the CPU; rank 0's, if ranks have running statistics of their own."""
        full = {key: tensor.detach().clone().contiguous() for key, tensor in self.module.state_dict().items()}
        broadcast_values(full, self.comm)
        return {key: value.cpu() for key, value in full.items()}

    def load(self, state_dict: Mapping[str, Any], *, strict: bool, assign: bool) -> Any:
        """Loads a state dict into the module, lazy tensors included. Raises LayerwiseError if it does not fit."""
        values = {key: value if isinstance(value, Tensor) else value[...] for key, value in state_dict.items()}
        if hasattr(state_dict, "_metadata"):  # module versions, by which old state dicts are converted
            values = type("Versioned", (dict,), {"_metadata": state_dict._metadata})(values)
        try:
            own: Any = self.module._layerwise.own_class  # type: ignore[union-attr]
            return own.load_state_dict(self.module, values, strict=strict, assign=assign)
        except RuntimeError as error:
            raise LayerwiseError(" ".join(str(error).split())) from None
