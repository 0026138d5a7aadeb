"""A network without the memory of its parameters, once each rank has its own part of them."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.importers.load import Network
from layerwise.ops.base import Role

MUCH = 2**24  # bytes of parameters: for less, a collection (some tenth of a second) does not pay


def without_memory(network: Network, types: Mapping[str, str], extra: Mapping[str, Tensor]) -> Network:
    """Returns the network, to be made parallel once more: parameters are read as meta tensors, constants as before.

    types: of what has values, by names in the graph. extra: what the network does not compute with. A module that
    cannot be copied stays as it is, with its memory.
    """
    module = None if network.module is None else skeleton(network.module)
    if network.module is not None and module is None:
        return network
    stored: dict[str, Callable[[], object]] = {
        network.keys.get(key, key): _reads(t.to("meta")) for key, t in extra.items()
    }
    for layer in network.graph.layers:
        if layer.role is Role.CONSTANT:
            name = layer.name if layer.name in network.stored else layer.name.partition(":")[0]
            stored[name] = _reads(network.value(name))
        for name, p in layer.own_parameters():
            if name in types:
                trained = p.trainable or name in layer.frozen
                empty = torch.empty(p.shape, dtype=getattr(torch, types[name]), device="meta")
                stored[name] = _reads(empty if trained else network.value(name))
    return replace(network, stored=stored, built={}, module=module)


def _reads(value: object) -> Callable[[], object]:
    return lambda: value


def collect(module: nn.Module | None) -> None:
    """What tracing it has left behind goes now: closures of torch.export are cycles with the parameters in them."""
    held = () if module is None else module.parameters()
    if sum(p.numel() * p.element_size() for p in held if not p.is_meta) > MUCH:
        gc.collect()


def skeleton(module: nn.Module) -> nn.Module | None:
    """A copy to be traced, whose parameters have no memory. None where a module cannot be copied."""
    memo: dict[int, object] = {}
    for p in module.parameters():
        empty = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for value in (value for m in module.modules() for value in vars(m).values()):  # what a call has kept
        memo |= {id(t): t.detach() for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and not t.is_leaf}
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # whatever a user's class meets
        return None
