"""Tree: a rank's parameters and buffers in modules of the model's names, classes and plain attributes.

A loop looks through it as through the model: which modules are layer norms, how wide they are, which parameters they
have. The layers are computed elsewhere: no module of the tree computes, and it has no tensor but this rank's.

`without_memory` is the network itself, once each rank has its part of the parameters.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network
from layerwise.ops.base import Role
from layerwise.ops.nn.norm import BatchNorm
from layerwise.run.guards.original import UnreadParameter
from layerwise.run.guards.refusals import REFUSED

Slot = tuple[dict[str, Any], str]  # where a module has a tensor: its `_parameters`, `_buffers` or attributes, and a key
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # by dimensions of the input
FRESH = frozenset(vars(nn.Module()))  # what every module has


class Names(nn.Module):
    """A module of which nothing but the name is known."""


class Tree:
    """A rank's tensors in stand-ins of the model's modules. root: the model's; attributes: its plain ones."""

    def __init__(self, network: Network) -> None:
        self._open = list[Slot]()  # what the model has, and is not placed here yet
        self._slots = dict[str, Slot]()  # of the tensors that layers compute with, by their names in the graph
        self._aliases = list[tuple[Slot, str]]()
        model = Names() if network.module is None else network.module
        self._trained = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
        stand_ins = {id(m): self._stand_in(m, path, network.written) for path, m in model.named_modules()}
        for module in model.modules():
            for name, child in module._modules.items():
                stand_ins[id(module)]._modules[name] = None if child is None else stand_ins[id(child)]
        self.root, self.attributes = stand_ins[id(model)], _plain(model, "", network.written)
        if network.module is None:
            self._add_norms(network.graph)

    def _stand_in(self, module: nn.Module, path: str, written: Set[str]) -> nn.Module:
        """Returns a module of the same class, without its tensors and modules.

        Of the very class, and not of one derived from it: where a loop asks `type(m) is nn.Linear`, as PyTorch's own
        page of `apply` does, parameters would go into other groups, or have other initial values, without a word.
        """
        stand_in: nn.Module = object.__new__(type(module))
        stand_in.__dict__.update({**vars(nn.Module()), **_plain(module, path, written), **REFUSED})
        stand_in.__dict__["training"] = module.training
        for slots, tensors in ((stand_in._parameters, module._parameters), (stand_in._buffers, module._buffers)):
            slots.update(dict.fromkeys(tensors))  # in their order
            self._open += [(slots, key) for key, tensor in tensors.items() if tensor is not None]
        stand_in._non_persistent_buffers_set = set(module._non_persistent_buffers_set)
        return stand_in

    def _add_norms(self, graph: LayerGraph) -> None:
        """Adds the batch norms of a network read from a file, for a loop that looks for them."""
        for layer in graph.layers:
            for stage in layer.stages:
                paths = {name.rpartition(".")[0] for name in layer.parameters[stage.parameters]}
                if isinstance(stage.op, BatchNorm) and stage.op.track and len(paths) == 1 and paths != {""}:
                    shape = stage.space.out.shape
                    kind: Any = NORMS[len(shape)]
                    norm = kind(shape[1], stage.op.eps, stage.op.momentum, stage.op.affine, device="meta")
                    parent, last = self._at(paths.pop())
                    parent._modules[last] = self._stand_in(norm, "", frozenset())
                    parent._modules[last].__dict__["num_batches_tracked"] = torch.zeros((), dtype=torch.int64)

    def place(self, name: str, value: Tensor, kind: type[nn.Parameter] | None, *, frozen: bool) -> None:
        """Puts a tensor where its dotted name says. kind: of a parameter; None for a buffer."""
        module, last = self._at(name)
        trained = kind is not None or frozen
        slots: dict[str, Any] = module._parameters if trained else module._buffers
        slots[last] = (kind or nn.Parameter)(value, requires_grad=not frozen) if trained else value
        self._slots[name] = slots, last

    def complete(self, keys: Mapping[str, str], extra: Mapping[str, Tensor]) -> None:
        """Completes the tree, once all are placed. keys: the model's further names. extra: what has a name and no slot.

        So the model's names can be followed, as torch.distributed.checkpoint does.
        """
        for key, name in keys.items():
            if name in self._slots and key not in self._slots:
                module, last = self._at(key)
                tensor = self.tensors()[name]
                slots: dict[str, Any] = module._parameters if isinstance(tensor, nn.Parameter) else module._buffers
                self._aliases.append(((slots, last), name))
        self._alias()
        for slots, key in self._open:
            if slots.get(key, self) is None:
                del slots[key]
        self._open.clear()
        for key, tensor in extra.items():
            module, last = self._at(key)
            if last not in module._parameters and last not in module._buffers:
                module.__dict__[last] = UnreadParameter.of(tensor) if key in self._trained else tensor

    def _alias(self) -> None:
        for (slots, key), name in self._aliases:
            held, last = self._slots[name]
            slots[key] = held[last]

    def tensors(self) -> dict[str, Tensor]:
        """Returns them by their names in the graph: parameters, then buffers."""
        tensors: dict[str, Any] = {name: slots.get(key) for name, (slots, key) in self._slots.items()}
        return dict(sorted(tensors.items(), key=lambda row: not isinstance(row[1], nn.Parameter)))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns those of the tensors that are parameters."""
        return {name: tensor for name, tensor in self.tensors().items() if isinstance(tensor, nn.Parameter)}

    def fill(self, values: Mapping[str, Any]) -> None:
        """Puts others into the places of the tensors of these names."""
        for name, value in values.items():
            slots, key = self._slots[name]
            slots[key] = value
        self._alias()

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Calls `fn` on all tensors, as nn.Module's `to` and the like do."""
        for module in self.root.modules():
            nn.Module._apply(module, fn, recurse=False)  # type: ignore[no-untyped-call]
        self._alias()

    def _at(self, name: str) -> tuple[nn.Module, str]:
        """Returns the module that a dotted name leads to, made where there is none, and the name there."""
        module, (*path, last) = self.root, name.split(".")
        for part in path:
            child = module._modules.get(part)
            if child is None:
                child = module._modules[part] = self._stand_in(Names(), "", frozenset())
            module = child
        return module, last


def _plain(module: nn.Module, path: str, written: Set[str]) -> dict[str, Any]:
    """Returns a module's attributes that have no tensor and no module in them, and that no call of the model sets."""
    lost = {name for name in vars(module) if (f"{path}.{name}" if path else name) in written}
    attributes = {name: value for name, value in vars(module).items() if name not in FRESH | lost}
    return {name: v for name, v in attributes.items() if not any(_belongs(x) for x in pytree.tree_leaves(v))}


def _belongs(leaf: object) -> bool:
    while isinstance(leaf, partial):
        leaf = leaf.func
    return isinstance(getattr(leaf, "__self__", leaf), Tensor | nn.Module)


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
    """Frees what tracing a module has left behind: closures of torch.export are cycles with the parameters in them."""
    parameters = () if module is None else module.parameters()
    if sum(p.numel() * p.element_size() for p in parameters if not p.is_meta) > MUCH:
        gc.collect()


def skeleton(module: nn.Module) -> nn.Module | None:
    """Returns a copy to be traced, whose parameters have no memory. None where a module cannot be copied."""
    memo: dict[int, object] = {}
    for p in module.parameters():
        empty = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for m in module.modules():
        for value in (m._buffers, *(value for name, value in vars(m).items() if name not in FRESH)):
            of_call = (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and not t.is_leaf)
            memo |= {id(t): t.detach() for t in of_call}
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # whatever a user's class meets
        return None
