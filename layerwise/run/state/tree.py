"""Tree: the places in a model for a network's parameters and buffers, where each rank puts its own.

`without_memory` returns the network itself, once each rank has its part of the parameters.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.importers.load import Network
from layerwise.ops.base import Role
from layerwise.run.guards.refusals import REFUSED
from layerwise.run.guards.replaced import UnkeptTensor, UnreadParameter, replace_parameter
from layerwise.tensorfile import dtype_name

Slot = tuple[dict[str, Any], str]  # a module's `_parameters` or `_buffers`, and a key in it
FRESH = frozenset(vars(nn.Module()))  # attributes that every module has


class Names(nn.Module):
    """A module with nothing but a name: a network read from a file, and its submodules."""

    def forward(self, *inputs: Any) -> Any:
        """Raises NotImplementedError: the network has layers only."""
        raise NotImplementedError


class Tree:
    """The places of a network's tensors in the model `root`, by their names in the graph; tied ones have several."""

    def __init__(self, network: Network, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._of_file = network.module is None
        self._names = list[str]()  # of tensors that layers compute with
        self._extra = list[str]()  # of the other tensors
        self._own = dict[str, Tensor]()  # computed by the model's forward pass, which has no place for it
        self._replaced = list[tuple[object, nn.Parameter]]()  # a slot's former and present content
        by_tensor: dict[int, list[Slot]] = {}
        for module in root.modules():
            for slots in (module._parameters, module._buffers):
                for key, tensor in slots.items():
                    if tensor is not None:
                        by_tensor.setdefault(id(tensor), []).append((slots, key))
        every = (*root.named_parameters(remove_duplicate=False), *root.named_buffers(remove_duplicate=False))
        self._slots = {name: by_tensor[id(tensor)] for name, tensor in every}

    @property
    def root(self) -> nn.Module:
        """Returns the model."""
        root = self._root()
        assert root is not None
        return root

    def place(self, values: Mapping[str, Tensor], extra: Mapping[str, Tensor]) -> None:
        """Puts this rank's tensors into the model's places with these names.

        extra: tensors that layers do not compute with. The model's own stay there.
        """
        self._names, self._extra = list(values), list(extra)
        for name, value in {**values, **extra}.items():
            if self._of_file and name not in self._slots:
                module, last = self._at(name)
                slots: dict[str, Any] = module._parameters if isinstance(value, nn.Parameter) else module._buffers
                self._slots[name] = [(slots, last)]
            if name not in self._slots:
                self._own[name] = value
            for slots, key in self._slots.get(name, ()):
                before: Any = slots.get(key)
                if name in extra:
                    if before is None or before.is_meta or before.data_ptr() != value.data_ptr():
                        value = value.clone()
                        a_parameter = isinstance(before, nn.Parameter)
                        slots[key] = nn.Parameter(value, requires_grad=before.requires_grad) if a_parameter else value
                    continue
                # attributes that the loop has set
                if isinstance(value, nn.Parameter) and isinstance(before, nn.Parameter):
                    value.__dict__.update(before.__dict__)
                    value._post_accumulate_grad_hooks = before._post_accumulate_grad_hooks
                    self._replaced.append((before, value))
                slots[key] = value

    def keep(self) -> None:
        """Makes any use of the former parameters raise, and of those that the forward pass does not read."""
        for before, now in self._replaced:
            replace_parameter(before, now)
        self._replaced.clear()
        for p in self._at_slots(self._extra).values():
            if type(p) is nn.Parameter and p.requires_grad:
                p.__class__ = UnreadParameter

    def let_go(self) -> None:
        """Turns parameters that the forward pass does not read back into plain ones."""
        for p in self._at_slots(self._extra).values():
            if isinstance(p, UnreadParameter):
                p.__class__ = nn.Parameter  # type: ignore[assignment]

    def is_parameter(self, name: str, *, otherwise: bool) -> bool:
        """True if the model has it as a parameter."""
        at = self._slots.get(name)
        return isinstance(at[0][0][at[0][1]], nn.Parameter) if at and not self._of_file else otherwise

    def _at_slots(self, names: list[str]) -> dict[str, Any]:
        first = {name: at[0] for name in names if (at := self._slots.get(name))}
        return {name: slots.get(key) for name, (slots, key) in first.items()}

    def tensors(self) -> dict[str, Tensor]:
        """Returns the tensors that layers compute with, by their names in the graph: parameters, then buffers."""
        tensors = self._own | self._at_slots(self._names)
        return dict(sorted(tensors.items(), key=lambda row: not isinstance(row[1], nn.Parameter)))

    def extra(self) -> dict[str, Tensor]:
        """Returns the other tensors, by the model's names."""
        return {name: tensor.detach() for name, tensor in self._at_slots(self._extra).items()}

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns those of the tensors that are parameters."""
        return {name: tensor for name, tensor in self.tensors().items() if isinstance(tensor, nn.Parameter)}

    def fill(self, values: Mapping[str, Any]) -> None:
        """Puts these values into the places with these names."""
        for name, value in values.items():
            if name in self._own:
                self._own[name] = value
            for slots, key in self._slots.get(name, ()):
                slots[key] = value

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Calls `fn` on all tensors, like nn.Module's `to`."""
        for module in self.root.modules():
            nn.Module._apply(module, fn, recurse=False)  # type: ignore[no-untyped-call]
        self._own = {name: fn(tensor) for name, tensor in self._own.items()}

    def _at(self, name: str) -> tuple[nn.Module, str]:
        """Returns the module that a dotted name leads to, created if missing, and the name within it."""
        module, (*path, last) = self.root, name.split(".")
        for part in path:
            child = module._modules.get(part)
            if child is None:
                child = module._modules[part] = Names()
            module = child
        return module, last


class Slots:
    """A model's class and the content of its attributes, to be restored."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._kind = model, type(model)
        slots = (d for m in model.modules() for d in (vars(m), m._parameters, m._buffers, m._modules))
        self._slots = [(d, dict(d)) for d in slots]

    def put_back(self) -> None:
        """Restores the model."""
        self._model.__class__ = self._kind
        for slots, before in self._slots:
            slots.clear()
            slots.update(before)


class Before(Slots):
    """A model's content, its parameters' values included, to be restored if parallelizing fails."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._parameters = [(p, p.data, p._post_accumulate_grad_hooks) for p in model.parameters()]

    def put_back(self) -> None:
        super().put_back()
        for p, data, hooks in self._parameters:
            p.data, p._post_accumulate_grad_hooks = data, hooks


def refuse_calls(root: nn.Module, written: Set[str] = frozenset()) -> None:
    """Makes the layers refuse calls and hooks; removes tensors that forward passes leave in attributes."""
    for path in written:
        module, _, name = path.rpartition(".")
        if name not in FRESH:
            of_layer = root.get_submodule(module).__dict__
            if isinstance(of_layer.pop(name, None), Tensor) and module:  # the root has an error of its own for it
                of_layer[name] = torch.empty(0).as_subclass(UnkeptTensor)
    for part in root.modules():
        if part is not root:
            part.__dict__.update({**REFUSED, "apply": partial(_apply_to, weakref.ref(root), weakref.ref(part))})


def _apply_to(root: weakref.ref[Any], part: weakref.ref[Any], fn: Callable[[nn.Module], object]) -> nn.Module:
    """Returns a submodule after its `apply`."""
    module: Any = part()
    root()._layerwise.apply(partial(type(module).apply, module), fn)  # type: ignore[union-attr]
    return module  # type: ignore[no-any-return]


def allow_calls(root: nn.Module) -> None:
    """Undoes `refuse_calls`."""
    for module in root.modules():
        for name in (*REFUSED, "apply"):
            ours = module.__dict__.get(name)
            if ours is not None and (ours is REFUSED.get(name) or isinstance(ours, partial)):
                del module.__dict__[name]


MUCH = 2**24  # bytes of parameters; for less, garbage collection (some 0.1 s) does not pay


def types_of(network: Network) -> dict[str, str]:
    """Returns the element types of the network's own values, by name."""
    types: dict[str, str] = {}
    for layer in network.graph.layers:
        for name, _ in layer.own_parameters():
            value = network.value(name)
            if value is not None:
                types[name] = dtype_name(value.dtype) if isinstance(value, Tensor) else str(np.asarray(value).dtype)
    return types


def without_memory(network: Network) -> Network:
    """Returns the network without parameters' memory, for another run: parameters read as meta tensors, constants as
    before.

    A module that cannot be copied is not traced again.
    """
    module, types = None if network.module is None else skeleton(network.module), types_of(network)
    stored: dict[str, Callable[[], object]] = {}
    for name in set(network.keys.values()) - {name for x in network.graph.layers for name, _ in x.own_parameters()}:
        if isinstance(value := network.value(name), Tensor):
            stored[name] = reads(value.detach().to("meta"))
    for layer in network.graph.layers:
        if layer.role is Role.CONSTANT:
            name = layer.name if layer.name in network.stored else layer.name.partition(":")[0]
            stored[name] = network.recipe(name) or reads(network.value(name))
        for name, p in layer.own_parameters():
            if name in types:
                trained = p.trainable or name in layer.frozen
                empty = torch.empty(p.shape, dtype=getattr(torch, types[name]), device="meta")
                stored[name] = reads(empty if trained else network.value(name))
    return replace(network, stored=stored, built={}, module=module)


def reads(value: object) -> Callable[[], object]:
    """Returns a function that returns this value."""
    return lambda: value


def collect(module: nn.Module | None) -> None:
    """Frees what tracing leaves behind: torch.export's closures are cycles that hold the parameters."""
    parameters = () if module is None else module.parameters()
    if sum(p.numel() * p.element_size() for p in parameters if not p.is_meta) > MUCH:
        gc.collect()


def skeleton(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module | None:
    """Returns a copy to trace, whose parameters have no memory; None if the module cannot be copied."""
    memo = {} if memo is None else memo
    for p in module.parameters():
        empty = torch.zeros((), dtype=p.dtype, device=p.device).expand(p.shape)
        memo[id(p)] = nn.Parameter(empty, requires_grad=p.requires_grad)
    for m in module.modules():
        for value in (m._buffers, *(value for name, value in vars(m).items() if name not in FRESH)):
            of_call = (t for t in pytree.tree_leaves(value) if isinstance(t, Tensor) and not t.is_leaf)
            memo |= {id(t): t.detach() for t in of_call}
    try:
        return copy.deepcopy(module, memo)
    except Exception:  # whatever a user's class raises
        return None
