"""Tree: a rank's parameters and buffers in modules of the model's names, classes and plain attributes.

A loop looks through it as through the model: which modules are layer norms, how wide they are, which parameters they
have. The layers are computed elsewhere: no module of the tree is called, and it has no tensor but this rank's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from layerwise.graph.layer import LayerGraph
from layerwise.ops.nn.norm import BatchNorm
from layerwise.run.guards.code import written
from layerwise.run.guards.refusing import REFUSED

Slot = tuple[dict[str, Any], str]  # where a module has a tensor: its `_parameters`, `_buffers` or attributes, and a key
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # by dimensions of the input
FRESH = frozenset(vars(nn.Module()))  # what every module has


class Names(nn.Module):
    """A module of which nothing but the name is known."""


class Tree:
    """root: its modules."""

    def __init__(self, original: nn.Module | None, graph: LayerGraph) -> None:
        """original: the user's module; None where there is a graph alone."""
        self._open = list[Slot]()  # what the original has, and is not placed here yet
        self._slots = dict[str, Slot]()  # of the tensors that layers compute with, by their names in the graph
        self._aliases = list[tuple[Slot, str]]()
        self.root = _without_calls(Names()) if original is None else self._mirrored(original, {})
        if original is None:
            self._add_norms(graph)

    def _mirrored(self, original: nn.Module, known: dict[int, nn.Module]) -> nn.Module:
        """The same without its tensors. known: by the original's id; a module may have several names."""
        if id(original) in known:
            return known[id(original)]
        made: nn.Module = object.__new__(type(original))
        known[id(original)] = made
        lost = FRESH | written(type(original))  # what a call would keep is not there, as none is called
        attributes = {key: value for key, value in vars(original).items() if key not in lost and is_plain(value)}
        made.__dict__.update(vars(nn.Module()), **attributes)
        made.__dict__["training"] = original.training
        for mine, theirs in ((made._parameters, original._parameters), (made._buffers, original._buffers)):
            mine.update(dict.fromkeys(theirs))  # in their order
            self._open += [(mine, key) for key, tensor in theirs.items() if tensor is not None]
        made._non_persistent_buffers_set = set(original._non_persistent_buffers_set)
        for name, child in original._modules.items():
            made._modules[name] = None if child is None else self._mirrored(child, known)
        return _without_calls(made)

    def _add_norms(self, graph: LayerGraph) -> None:
        """Where a loop looks for the batch norms of a file, it finds such."""
        for layer in graph.layers:
            for stage in layer.stages:
                paths = {name.rpartition(".")[0] for name in layer.parameters[stage.parameters]}
                if isinstance(stage.op, BatchNorm) and stage.op.track and len(paths) == 1 and paths != {""}:
                    shape = stage.space.out.shape
                    kind: Any = NORMS[len(shape)]
                    norm = kind(shape[1], stage.op.eps, stage.op.momentum, stage.op.affine, device="meta")
                    parent, last = self._at(paths.pop())
                    parent._modules[last] = self._mirrored(norm, {})
                    parent._modules[last].__dict__["num_batches_tracked"] = torch.zeros((), dtype=torch.int64)

    def place(self, name: str, value: Tensor, kind: type[nn.Parameter] | None, *, frozen: bool) -> None:
        """Puts a tensor where its dotted name says. kind: of a parameter; None for a buffer."""
        module, last = self._at(name)
        trained = kind is not None or frozen
        slots: dict[str, Any] = module._parameters if trained else module._buffers
        slots[last] = (kind or nn.Parameter)(value, requires_grad=not frozen) if trained else value
        self._slots[name] = slots, last

    def complete(self, keys: Mapping[str, str], extra: Mapping[str, Tensor]) -> None:
        """All are placed. keys: the model's further names. extra: what is found under its name, and is not in a slot.

        So the model's names can be followed, as torch.distributed.checkpoint does.
        """
        for key, name in keys.items():
            if name in self._slots and key not in self._slots:
                module, last = self._at(key)
                held = self.tensors()[name]
                slots: dict[str, Any] = module._parameters if isinstance(held, nn.Parameter) else module._buffers
                self._aliases.append(((slots, last), name))
        self._alias()
        for slots, key in self._open:
            if slots.get(key, self) is None:
                del slots[key]
        self._open.clear()
        for key, tensor in extra.items():
            module, last = self._at(key)
            if last not in module._parameters and last not in module._buffers:
                module.__dict__[last] = tensor

    def _alias(self) -> None:
        for (slots, key), name in self._aliases:
            held, last = self._slots[name]
            slots[key] = held[last]

    @property
    def tied(self) -> bool:
        """Whether all names of a tensor still lead to the same one."""
        return all(
            slots.get(key) is self._slots[name][0].get(self._slots[name][1]) for (slots, key), name in self._aliases
        )

    def tensors(self) -> dict[str, Tensor]:
        """By their names in the graph: parameters, then buffers."""
        held: dict[str, Any] = {name: slots.get(key) for name, (slots, key) in self._slots.items()}
        return dict(sorted(held.items(), key=lambda row: not isinstance(row[1], nn.Parameter)))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Those of the tensors that are."""
        return {name: tensor for name, tensor in self.tensors().items() if isinstance(tensor, nn.Parameter)}

    def fill(self, values: Mapping[str, Any]) -> None:
        """Puts others into the places of the tensors of these names."""
        for name, value in values.items():
            slots, key = self._slots[name]
            slots[key] = value
        self._alias()

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """To all tensors, as nn.Module's `to` and the like do it."""
        for module in self.root.modules():
            nn.Module._apply(module, fn, recurse=False)  # type: ignore[no-untyped-call]
        self._alias()

    def _at(self, name: str) -> tuple[nn.Module, str]:
        """The module that a dotted name leads to, made where there is none, and the name there."""
        module, (*path, last) = self.root, name.split(".")
        for part in path:
            child = module._modules.get(part)
            if child is None:
                child = module._modules[part] = _without_calls(Names())
            module = child
        return module, last


def is_plain(value: object) -> bool:
    """Whether an attribute has no tensor, and nothing of another module, in it."""
    return not any(_belongs(leaf) for leaf in pytree.tree_leaves(value))


def _belongs(leaf: object) -> bool:
    while isinstance(leaf, partial):
        leaf = leaf.func
    return isinstance(getattr(leaf, "__self__", leaf), Tensor | nn.Module)


def _without_calls(module: nn.Module) -> nn.Module:
    """On the instance, so that it stays of its class."""
    module.__dict__.update(REFUSED)
    return module
