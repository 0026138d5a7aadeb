"""Tree: where the model has a rank's parameters and buffers; they are put there last, and can be taken back.

`without_memory` is the network itself, once each rank has its part of the parameters.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Mapping, Set
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils import _pytree as pytree

from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.load import Network
from layerwise.ops.base import Role
from layerwise.ops.nn.norm import BatchNorm
from layerwise.run.guards.original import UnreadParameter
from layerwise.run.guards.refusals import REFUSED

Slot = tuple[dict[str, Any], str]  # where a module has a tensor: its `_parameters` or `_buffers`, and a key
NORMS = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d, 5: nn.BatchNorm3d}  # by dimensions of the input
FRESH = frozenset(vars(nn.Module()))  # what every module has


class Names(nn.Module):
    """A module of which nothing but the name is known: what a file's network is trained as."""

    def forward(self, *inputs: Any) -> Any:
        """It has layers alone."""
        raise NotImplementedError


class Tree:
    """The places of a network's tensors in the model. root: the model."""

    def __init__(self, network: Network, root: nn.Module) -> None:
        self._root = weakref.ref(root)
        self._slots = dict[str, list[Slot]]()  # by names in the graph: tied tensors have several
        self._own = dict[str, Tensor]()  # of the graph, that have no place in the model: what its forward pass makes
        self._given = list[tuple[Slot, Any]]()  # what was in the slots before
        self._unread = list[nn.Parameter]()
        if network.module is None:
            self._add_norms(network.graph)
        by_tensor: dict[int, list[Slot]] = {}
        for module in root.modules():
            for slots in (module._parameters, module._buffers):
                for key, tensor in slots.items():
                    if tensor is not None:
                        by_tensor.setdefault(id(tensor), []).append((slots, key))
        for named in (root.named_parameters, root.named_buffers):
            self._slots |= {name: by_tensor[id(t)] for name, t in named(remove_duplicate=False)}
        self._from_file = network.module is None

    @property
    def root(self) -> nn.Module:
        """Returns the model."""
        root = self._root()
        assert root is not None
        return root

    def _add_norms(self, graph: LayerGraph) -> None:
        """Adds the batch norms of a network read from a file, for a loop that looks for them."""
        for layer in graph.layers:
            for stage in layer.stages:
                paths = {name.rpartition(".")[0] for name in layer.parameters[stage.parameters]}
                if isinstance(stage.op, BatchNorm) and stage.op.track and len(paths) == 1 and paths != {""}:
                    shape = stage.space.out.shape
                    kind: Any = NORMS[len(shape)]
                    norm = kind(shape[1], stage.op.eps, stage.op.momentum, stage.op.affine, device="meta")
                    norm.num_batches_tracked = torch.zeros((), dtype=torch.int64)
                    parent, last = self._at(paths.pop())
                    parent._modules[last] = norm

    def place(self, values: Mapping[str, Tensor]) -> None:
        """Puts tensors where the model has those of these names."""
        for name, value in values.items():
            if name not in self._slots and self._from_file:
                module, last = self._at(name)
                self._slots[name] = [((module._parameters if isinstance(value, nn.Parameter) else module._buffers), last)]
            if name not in self._slots:
                self._own[name] = value
            for slots, key in self._slots.get(name, ()):
                given = slots.get(key)
                self._given.append(((slots, key), given))
                if isinstance(given, nn.Parameter):  # what the loop has told it
                    value.__dict__.update(given.__dict__)
                    value._post_accumulate_grad_hooks = given._post_accumulate_grad_hooks
                slots[key] = value
        self._names = list(values)

    def unread(self, key: str, value: Tensor) -> Tensor:
        """Returns the model's own tensor of this name, which no layer computes with; `value` where it has none."""
        at = self._slots.get(key)
        if at is None or at[0][0][at[0][1]].is_meta:
            for slots, last in at or ():
                self._given.append(((slots, last), slots[last]))
                slots[last] = value
            return value
        own: Tensor = at[0][0][at[0][1]]
        if isinstance(own, nn.Parameter) and own.requires_grad:
            self._unread.append(own)
        return own.detach()

    def take_back(self) -> None:
        """Puts what was there before into its places."""
        for (slots, key), value in reversed(self._given):
            slots[key] = value
        self._given.clear()

    def keep(self) -> None:
        """Forgets what was there before: parameters that somebody has, such as an optimizer, stand for those of now."""
        for (slots, key), given in self._given:
            if type(given) is nn.Parameter:
                MovedParameter.to(given, slots[key])
        self._given.clear()
        for p in self._unread:
            if type(p) is nn.Parameter:
                p.__class__ = UnreadParameter

    def is_parameter(self, name: str, *, otherwise: bool) -> bool:
        """True if the model has it as a parameter."""
        at = self._slots.get(name)
        return isinstance(at[0][0][at[0][1]], nn.Parameter) if at and not self._from_file else otherwise

    def tensors(self) -> dict[str, Tensor]:
        """Returns them by their names in the graph: parameters, then buffers."""
        tensors: dict[str, Any] = {}
        for name in self._names:
            at = self._slots.get(name)
            tensors[name] = at[0][0].get(at[0][1]) if at else self._own[name]
        return dict(sorted(tensors.items(), key=lambda row: not isinstance(row[1], nn.Parameter)))

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns those of the tensors that are parameters."""
        return {name: tensor for name, tensor in self.tensors().items() if isinstance(tensor, nn.Parameter)}

    def fill(self, values: Mapping[str, Any]) -> None:
        """Puts others into the places of the tensors of these names."""
        for name, value in values.items():
            if name in self._own:
                self._own[name] = value
            for slots, key in self._slots.get(name, ()):
                slots[key] = value

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Calls `fn` on all tensors, as nn.Module's `to` and the like do."""
        for module in self.root.modules():
            nn.Module._apply(module, fn, recurse=False)  # type: ignore[no-untyped-call]
        self._own = {name: fn(tensor) for name, tensor in self._own.items()}

    def _at(self, name: str) -> tuple[nn.Module, str]:
        """Returns the module that a dotted name leads to, made where there is none, and the name there."""
        module, (*path, last) = self.root, name.split(".")
        for part in path:
            child = module._modules.get(part)
            if child is None:
                child = module._modules[part] = Names()
            module = child
        return module, last


class MovedParameter(nn.Parameter):
    """A parameter of before the model was made parallel, which an optimizer has: all goes to the one of now."""

    @classmethod
    def to(cls, p: nn.Parameter, now: nn.Parameter) -> None:
        """Makes `p` stand for `now`, without memory of its own."""
        if not _following:
            _following.append(register_optimizer_step_pre_hook(_follow))
        p.data, p.grad = p.data.new_empty(0), None
        p.__class__ = cls
        p.__dict__["_now"] = now

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Returns what `func` makes of the parameters of now."""
        args, kwargs = pytree.tree_map(
            lambda x: x.__dict__["_now"] if type(x) is cls else x, (args, kwargs or {})
        )
        return func(*args, **kwargs)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(self.__dict__["_now"], memo)


_following = list[Any]()


def _follow(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Gives an optimizer of before the parameters of now, at its first step."""
    for group in optimizer.param_groups:
        if any(type(p) is MovedParameter for p in group["params"]):
            for p in (p for p in group["params"] if type(p) is MovedParameter):
                if p in optimizer.state:
                    optimizer.state[parameter_now(p)] = optimizer.state.pop(p)
            group["params"] = [parameter_now(p) for p in group["params"]]


def parameter_now(p: nn.Parameter) -> nn.Parameter:
    """Returns the parameter that one of before the model was made parallel stands for."""
    now: nn.Parameter = p.__dict__["_now"] if type(p) is MovedParameter else p
    return now


def refuse_calls(root: nn.Module, written: Set[str] = frozenset()) -> None:
    """Has the layers refuse what they cannot do: be called, have hooks; what a forward pass keeps of a call goes."""
    for path in written:
        module, _, name = path.rpartition(".")
        if name not in FRESH:
            root.get_submodule(module).__dict__.pop(name, None)
    for module in root.modules():
        if module is not root:
            module.__dict__.update(REFUSED)


def allow_calls(root: nn.Module) -> None:
    """Makes the layers as they were."""
    for module in root.modules():
        for name in (*REFUSED, "apply"):
            mine = module.__dict__.get(name)
            if mine is not None and (mine is REFUSED.get(name) or isinstance(mine, partial)):
                del module.__dict__[name]


MUCH = 2**24  # bytes of parameters: for less, a collection (some tenth of a second) does not pay


def without_memory(network: Network) -> Network:
    """Returns the network, to be made parallel once more: parameters are read as meta tensors, constants as before.

    A module that cannot be copied is not traced again.
    """
    module = None if network.module is None else skeleton(network.module)
    computed_with = {name for layer in network.graph.layers for name, _ in layer.own_parameters()}
    stored: dict[str, Callable[[], object]] = {}
    for name in network.keys.values():
        if name not in computed_with and isinstance(value := network.value(name), Tensor):
            stored[name] = _reads(value.to("meta"))
    for layer in network.graph.layers:
        if layer.role is Role.CONSTANT:
            name = layer.name if layer.name in network.stored else layer.name.partition(":")[0]
            stored[name] = _reads(network.value(name))
        for name, p in layer.own_parameters():
            value = network.value(name)
            if isinstance(value, Tensor) and (p.trainable or name in layer.frozen):
                value = torch.empty(p.shape, dtype=value.dtype, device="meta")
            if value is not None:
                stored[name] = _reads(value.clone() if isinstance(value, Tensor) else value)
    return replace(network, stored=stored, built={}, module=module)


def _reads(value: object) -> Callable[[], object]:
    return lambda: value


def collect(module: nn.Module | None) -> None:
    """Frees what tracing a module has left behind: closures of torch.export are cycles with the parameters in them."""
    parameters = () if module is None else module.parameters()
    if sum(p.numel() * p.element_size() for p in parameters if not p.is_meta) > MUCH:
        gc.collect()


def skeleton(module: nn.Module, memo: dict[int, Any] | None = None) -> nn.Module | None:
    """Returns a copy to be traced, whose parameters have no memory. None where a module cannot be copied."""
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
    except Exception:  # whatever a user's class meets
        return None
