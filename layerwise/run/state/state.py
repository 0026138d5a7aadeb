"""State: this rank's boxes of a network's parameters and buffers, and the full network's state dict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.importers.load import Network
from layerwise.partition.groups import sharing
from layerwise.partition.moved import transfer
from layerwise.partition.place import Each
from layerwise.run.guards.invariants import Values
from layerwise.run.local_tensor import is_dtensor, local_tensor
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.redistribute import Redistribution
from layerwise.run.state.initial import drawn_as, initial
from layerwise.run.state.tree import Tree, types_of

if TYPE_CHECKING:
    from layerwise.run.state.dtensors import MeshSharding


@dataclass(frozen=True, slots=True)
class Shard:
    """A box of one of the model's parameters or buffers. Boxes of one name are equal or disjoint."""

    name: str  # the model's name
    aliases: tuple[str, ...]  # its other names in the model
    shape: tuple[int, ...]  # of the full tensor
    box: Box  # the box that this rank holds
    tensor: Tensor  # the values of the box
    trainable: bool  # whether it is a parameter
    first: bool  # whether this rank is the lowest that holds this box

    @property
    def full(self) -> bool:
        """True if the box is the full tensor."""
        return self.box.shape == self.shape


def aliases_of(keys: Mapping[str, str]) -> dict[str, list[str]]:
    """Returns the model's other names for each parameter or buffer, by its name in the graph."""
    aliases: dict[str, list[str]] = {}
    for key, name in keys.items():
        if key != name:
            aliases.setdefault(name, []).append(key)
    return aliases


COUNT = "num_batches_tracked"


class State:
    """A rank's boxes of parameters and buffers. tree: their places in the model. boxes: every rank's, by name.

    If some rank holds only a part of some of them, all are DTensors, on every rank; ranks that are not processes have
    their own boxes as plain tensors.
    shardings: the placements, by name; empty if they are not DTensors.
    types: the element types of the network's own values, by name.
    """

    def __init__(
        self,
        network: Network,
        boxes: Mapping[str, Each],
        order: Sequence[int],
        comm: Comm,
        options: RuntimeOptions,
        root: nn.Module,
    ) -> None:
        """order: the rank of each device of the plan."""
        self.graph, self.boxes, self.comm, self.options = network.graph, boxes, comm, options
        self.shardings = self._shardings(order)
        self.tree = Tree(network, root)
        self._keys = dict(network.keys)
        self.types = types_of(network)
        self._batches = _batches(network)
        self._fill(network)

    def _shardings(self, order: Sequence[int]) -> Mapping[str, MeshSharding]:
        shapes = self._shapes()
        full = {name: Box.full(shape) for name, shape in shapes.items()}
        if self.comm.size == 1 or all(box == full[name] for name, each in self.boxes.items() for box in each):
            return {}
        from layerwise.run.state.dtensors import shardings  # imports torch.distributed.tensor

        return shardings(self.boxes, shapes, order, self.comm)

    def _fill(self, network: Network) -> None:
        """Creates the boxes, then puts them into the model, and drops the network's own values."""
        users, values = drawn_as(self.graph), dict[str, Tensor]()
        for layer in self.graph.layers:
            for name, own in layer.own_parameters():
                box, p = self.boxes[name][self.comm.rank], users.get(name, own)
                if box is None:  # this rank has no part of the layer
                    value = torch.empty(0, dtype=self._type(name))
                else:
                    value = initial(network, layer, name, p, box, self.options.seed, self._type(name))
                value = value.to(self.options.device)
                if name in self.shardings:
                    value = self.shardings[name].wrap(value)
                frozen = name in layer.frozen
                if self.tree.is_parameter(name, otherwise=p.trainable or frozen):
                    value = nn.Parameter(value, requires_grad=p.trainable and not frozen)
                values[name] = value
        extra = dict[str, Tensor]()
        for key, name in self._keys.items():
            if name not in self.boxes:  # counters, and what the network does not use
                stored = network.value(name)
                if isinstance(stored, Tensor):
                    value = torch.zeros(stored.shape, dtype=stored.dtype) if stored.is_meta else stored.detach()
                    extra[key] = value.to(self.options.device)
        self.tree.place(values, extra)

    @property
    def extra(self) -> dict[str, Tensor]:
        """Returns full tensors that the network does not compute with (counters), by the model's names."""
        return self.tree.extra()

    def count(self) -> None:
        """Adds one training step to the counters."""
        for key, value in self.extra.items():
            module, _, name = self._keys[key].rpartition(".")
            if name == COUNT:
                value += self._batches[module]

    def cut(self) -> bool:
        """True if some rank holds only a part of some trained parameter."""
        parameters = (row for layer in self.graph.layers for row in layer.own_parameters())
        rows = ((p.shape, box) for name, p in parameters if p.trainable for box in self.boxes[name])
        return any(box is None or box.shape != shape for shape, box in rows)

    def apply(self, fn: Callable[[Tensor], Tensor]) -> None:
        """Calls `fn` on all tensors, like nn.Module's `to`; DTensors stay the same objects."""
        if not self.shardings:
            self.tree.apply(fn)
            return
        from layerwise.run.state.dtensors import move

        with torch.no_grad():
            for tensor in self.tree.tensors().values():
                for x in (tensor, tensor.grad):
                    if x is not None and (local := fn(local_tensor(x))) is not local_tensor(x):
                        move(x, local)

    def parameters(self) -> dict[str, nn.Parameter]:
        """Returns the parameters by their names in the network."""
        return self.tree.parameters()

    def values(self, names: Collection[str]) -> Values:
        """Returns the present values of the buffers with these names in the network."""
        there = {self._keys[key]: value for key, value in self.extra.items()} | self.tree.tensors()
        some = {name: there[name] for name in sorted(names) if name in there}
        return Values(lambda: some)

    def sharing(self, name: str) -> Group:
        """Returns the ranks that hold the same box as this one."""
        return sharing(self.boxes[name], self.comm.rank)

    def shards(self) -> list[Shard]:
        """Returns every parameter and buffer that this rank holds some of."""
        result, aliases, shapes = [], aliases_of(self._keys), self._shapes()
        for name, tensor in self.tree.tensors().items():
            box, also = self.boxes[name][self.comm.rank], tuple(aliases.get(name, ()))
            if box is None:
                continue
            first, trainable = self.sharing(name)[0] == self.comm.rank, isinstance(tensor, nn.Parameter)
            result.append(Shard(name, also, shapes[name], box, local_tensor(tensor).detach(), trainable, first))
        for key, value in self.extra.items():
            shape = tuple(value.shape)
            result.append(Shard(key, (), shape, Box.full(shape), value, False, self.comm.rank == 0))
        return result

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: p.shape for layer in self.graph.layers for name, p in layer.own_parameters()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """Returns the full model's state dict, on every rank, on the CPU."""
        full = {**{key: value.cpu().clone() for key, value in self.extra.items()}, **self.full_tensors()}
        return {key: full[name if name in self.boxes else key] for key, name in self._keys.items()}

    def full_tensors(self) -> dict[str, Tensor]:
        """Returns the full tensors that the network computes with, by its names, on every rank, on the CPU."""
        local_tensors, shapes, tensors = self.tree.tensors(), self._shapes(), dict[str, Tensor]()
        for name, boxes in self.boxes.items():
            lowest: Each = tuple(box if box not in boxes[:rank] else None for rank, box in enumerate(boxes))
            every = Box.full(shapes[name])
            part = transfer(lowest, (every,) * self.comm.size, self.comm.rank)
            own = local_tensor(local_tensors[name]).detach() if lowest[self.comm.rank] is not None else None
            like = torch.empty(0, dtype=self._type(name), device=self.options.device)
            full = Redistribution(part, self.comm, f"state of {name}", "io").begin(own, like).finish()
            assert full is not None
            tensors[name] = full.detach().cpu().clone()
        return tensors

    def _type(self, name: str) -> torch.dtype:
        """Returns a tensor's element type, the same on every rank, even on one without a box of it."""
        if name not in self.types:
            return self.options.dtype
        return self.options.element_type(self.types[name], self.graph)

    def load(self, state_dict: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
        """Loads full tensors or DTensors; returns missing names, and names that the model does not have.

        Raises LayerwiseError before it changes anything. Ranks that are not processes also take what `state_dict`
        returned.
        """
        if not all(isinstance(key, str) for key in state_dict):
            raise LayerwiseError("the state dict has keys that are not strings: pass tensors by parameter name")
        shards, aliases = {shard.name: shard for shard in self.shards()}, aliases_of(self._keys)
        missing, values = [], list[tuple[Shard, Tensor]]()
        extra = [name for name in shards if name not in self.boxes]
        constants = self.boxes.keys() - set(self._keys.values())  # computed by the forward pass: not in state dicts
        for name in (*self.boxes, *extra):  # in one order on all ranks, as loading may gather
            shard = shards.get(name)
            if shard is None and name not in self.shardings:
                continue  # this rank has none of it, nor does its state dict
            key = next((key for key in (name, *aliases.get(name, ())) if key in state_dict), None)
            if key is not None:
                part = self._part(key, state_dict[key], name, shard)
                if shard is not None:
                    values.append((shard, part))
            elif name not in constants:
                missing.append(name)
        names_here = set(self._keys) | set(self.boxes)
        odd = [key for key in state_dict if key not in names_here]
        if strict and (missing or odd):
            what = f"lacks {missing[0]!r}" if missing else f"has {odd[0]!r}, which the model does not have"
            raise LayerwiseError(f"the state dict {what}: pass strict=False to ignore it")
        with torch.no_grad():
            for shard, part in values:
                shard.tensor.copy_(part[...])
        return missing, odd

    def _part(self, key: str, value: Tensor, name: str, shard: Shard | None) -> Tensor:
        """Returns this rank's part of a state dict's value. Raises LayerwiseError if the shape differs."""
        shape = self._shapes()[name] if shard is None else shard.shape
        if not hasattr(value, "shape") or isinstance(value, np.ndarray):  # lazy values may be read when they are needed
            raise LayerwiseError(f"{key!r} is of type {type(value).__name__} in the state dict: pass tensors")
        if shard is not None and not (self.shardings or shard.full) and tuple(value.shape) == shard.box.shape:
            return value
        if tuple(value.shape) != shape:
            raise LayerwiseError(f"{key!r} has shape {tuple(value.shape)} in the state dict, but {shape} in the model")
        if is_dtensor(value):
            if name in self.shardings and self.shardings[name].says(value):
                return local_tensor(value)
            value = value.full_tensor()  # type: ignore[attr-defined]  # a collective
            if tuple(value.shape) != shape:
                raise LayerwiseError(
                    f"{key!r} is a DTensor on some ranks only, which are not the plan's: pass full_state_dict()"
                )
        return value if shard is None or shard.full else value[shard.box.slices()]


def _batches(network: Network) -> Counter[str]:
    """Returns how often a step calls each batch norm, by its module's name.

    It is 0 for an instance norm, and for a module whose statistics are only passed to `F.batch_norm`.
    """
    modules = () if network.module is None else network.module.named_modules(remove_duplicate=False)
    own = nn.modules.batchnorm._BatchNorm.forward
    idle = {path for path, m in modules if getattr(type(m), "forward", None) is own} - network.called
    counts: Counter[str] = Counter()
    for layer in network.graph.layers:
        kinds = (stage.op.kind for stage in layer.stages for _ in stage.space.parameters)
        for kind, name in zip(kinds, layer.parameters, strict=True):
            module, _, last = name.rpartition(".")
            if kind == "batch_norm" and last == "running_mean" and module not in idle:
                counts[module] += 1
    return counts
