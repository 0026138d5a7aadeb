"""The module's tensors as a run has them: values where it has none, and the run's device and element type."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from layerwise.geometry import Box
from layerwise.graph.layer import Layer, LayerGraph
from layerwise.importers.load import Network
from layerwise.ops.facts import Parameter
from layerwise.run.options import RuntimeOptions
from layerwise.run.state.initial import drawn_as, initial
from layerwise.tensorfile import dtype_name


def settle(module: nn.Module, network: Network, graph: LayerGraph, options: RuntimeOptions) -> None:
    """Moves the module's tensors, in place; those of the meta device are replaced by drawn ones."""
    described = {
        name: (layer, drawn_as(graph).get(name, p)) for layer in graph.layers for name, p in layer.own_parameters()
    }
    names = {id(tensor): network.keys[key] for key, tensor in module.state_dict(keep_vars=True).items()}
    made: dict[int, Tensor] = {}  # a tensor may have several places in the module
    for child in module.modules():
        for held in (child._parameters, child._buffers):
            for key, tensor in held.items():
                if tensor is not None and tensor.is_meta:
                    if id(tensor) not in made:
                        made[id(tensor)] = _made(tensor, names[id(tensor)], described, network, options)
                    held[key] = made[id(tensor)]  # type: ignore[assignment]

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
    """As `State` makes it: drawn by position; zeros for what the network does not compute with."""
    if name in described:
        layer, p = described[name]
        dtype = options.element_type(dtype_name(tensor.dtype), network.graph)
        box = Box((0,) * len(p.shape), p.shape)
        value = initial(network, layer, name, p, box, options.seed, dtype).view(tensor.shape)
    else:
        value = torch.zeros(tensor.shape, dtype=tensor.dtype)
    value = value.to(options.device)
    return nn.Parameter(value, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else value
