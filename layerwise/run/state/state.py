"""State: this rank's boxes of a network's parameters and buffers, and what the whole network's state dict has."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from layerwise.comm.base import Comm, Group
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import LayerGraph
from layerwise.importers.load import Network
from layerwise.partition.boxes import Each
from layerwise.partition.groups import sharing
from layerwise.partition.transfer import transfer
from layerwise.run.guards.refusing import Names
from layerwise.run.options import RuntimeOptions
from layerwise.run.schedule.redistribute import Redistribution
from layerwise.run.state.initial import drawn_as, initial
from layerwise.run.state.shard import Shard
from layerwise.tensorfile import dtype_name

COUNT = "num_batches_tracked"


class State:
    """tree: the boxes as parameters and buffers of nested modules, by the model's names. boxes: of every rank, by name.

    extra: what the network does not compute with (counters), whole, on every rank, on the CPU.
    """

    def __init__(self, network: Network, boxes: Mapping[str, Each], comm: Comm, options: RuntimeOptions) -> None:
        self.graph, self.boxes, self.comm, self.options = network.graph, boxes, comm, options
        self.tree = Names()
        self.extra: dict[str, Tensor] = {}
        self._keys, self._network = dict(network.keys), network
        self._batches = _batches(self.graph)
        self._fill()

    def _fill(self) -> None:
        """Creates the boxes."""
        users = drawn_as(self.graph)
        for layer in self.graph.layers:
            for name, own in layer.own_parameters():
                box, p = self.boxes[name][self.comm.rank], users.get(name, own)
                if box is not None:
                    value = initial(self._network, layer, name, p, box, self.options.seed, self._type(name))
                    _place(self.tree, name, value.to(self.options.device), p.trainable, frozen=name in layer.frozen)
        for key, name in self._keys.items():
            if name not in self.boxes:  # counters, and what the network does not use
                kept = self._read(name)
                if kept is not None:
                    value = torch.zeros(kept.shape, dtype=kept.dtype) if kept.is_meta else kept.detach().clone()
                    self.extra[key] = value.cpu()

    def count(self) -> None:
        """A training step more, for the counters."""
        for key, value in self.extra.items():
            module, _, name = self._keys[key].rpartition(".")
            if name == COUNT:
                value += self._batches[module]

    def cut(self) -> bool:
        """Whether some rank holds not all of some parameter that is trained."""
        held = (row for layer in self.graph.layers for row in layer.own_parameters())
        return any(box is None or box.shape != p.shape for name, p in held if p.trainable for box in self.boxes[name])

    def sharing(self, name: str) -> Group:
        """The ranks that hold the same box as this one."""
        return sharing(self.boxes[name], self.comm.rank)

    def shards(self) -> list[Shard]:
        """Every parameter and buffer that this rank holds."""
        result = []
        aliases: dict[str, list[str]] = {}
        for key, name in self._keys.items():
            if key != name:
                aliases.setdefault(name, []).append(key)
        shapes = self._shapes()
        for name, tensor in (*self.tree.named_parameters(), *self.tree.named_buffers()):
            box, also = self.boxes[name][self.comm.rank], tuple(aliases.get(name, ()))
            assert box is not None
            first, trainable = self.sharing(name)[0] == self.comm.rank, isinstance(tensor, nn.Parameter)
            result.append(Shard(name, also, shapes[name], box, tensor.detach(), trainable, first))
        for key, value in self.extra.items():
            shape = tuple(value.shape)
            result.append(Shard(key, (), shape, Box((0,) * len(shape), shape), value, False, self.comm.rank == 0))
        return result

    def _shapes(self) -> dict[str, tuple[int, ...]]:
        return {name: p.shape for layer in self.graph.layers for name, p in layer.own_parameters()}

    def full_state_dict(self) -> dict[str, Tensor]:
        """The whole model's state dict, on every rank, on the CPU: it loads into the model with strict=True."""
        held = {shard.name: shard.tensor for shard in self.shards()}
        shapes = self._shapes()
        whole = {key: value.clone() for key, value in self.extra.items()}
        for name, boxes in self.boxes.items():
            lowest: Each = tuple(box if box not in boxes[:rank] else None for rank, box in enumerate(boxes))
            every = Box((0,) * len(shapes[name]), shapes[name])
            part = transfer(lowest, (every,) * self.comm.size, self.comm.rank)
            mine = held.get(name) if lowest[self.comm.rank] is not None else None
            like = torch.empty(0, dtype=self._type(name), device=self.options.device)
            full = Redistribution(part, self.comm, f"state of {name}", "io").forward(mine, like)
            assert full is not None
            whole[name] = full.detach().cpu().clone()
        return {key: whole[name if name in self.boxes else key] for key, name in self._keys.items()}

    def _type(self, name: str) -> torch.dtype:
        """The same on every rank, whether it has a box or not."""
        value = self._network.value(name)
        if value is None:
            return self.options.dtype
        stored = dtype_name(value.dtype) if isinstance(value, Tensor) else str(np.asarray(value).dtype)
        return self.options.element_type(stored, self.graph)

    def _read(self, name: str) -> Tensor | None:
        """The network's own value, where it has one."""
        value = self._network.value(name)
        return value if isinstance(value, Tensor) else None

    def load(self, state_dict: Mapping[str, Any], *, strict: bool) -> tuple[list[str], list[str]]:
        """Takes boxes of this rank or whole tensors; returns the names that are missing, and those of nothing.

        LayerwiseError before anything is changed, also where it has other boxes of what this rank holds.
        """
        missing, values = [], list[tuple[Shard, Tensor]]()
        named = {name: key for key in state_dict if (name := _without_box(key)) != key}
        for shard in self.shards():
            key = next((key for key in (shard.key, shard.name, *shard.aliases) if key in state_dict), None)
            if key is not None:
                shape = shard.shape if key != shard.key else shard.box.shape
                if tuple(state_dict[key].shape) != shape:
                    raise LayerwiseError(
                        f"{key!r} has shape {tuple(state_dict[key].shape)} in the state dict; the model has {shape}"
                    )
                values.append((shard, state_dict[key]))
            elif shard.name in named:
                raise LayerwiseError(
                    f"the state dict has {named[shard.name]!r}, but this rank holds {shard.key!r}: it is another "
                    "rank's, or of another plan. Give each rank its own, or all of them full_state_dict()"
                )
            else:
                missing.append(shard.name)
        known = set(self._keys) | set(self.boxes)
        odd = [key for key in state_dict if key not in known and _without_box(key) not in known]
        if strict and (missing or odd):
            what = f"lacks {missing[0]!r}" if missing else f"has {odd[0]!r}, which the model does not have"
            raise LayerwiseError(f"the state dict {what}: give strict=False to ignore it")
        with torch.no_grad():
            for shard, value in values:
                part = value if tuple(value.shape) == shard.box.shape else value[shard.box.slices()]
                shard.tensor.copy_(part[...])
        return missing, odd


def _without_box(key: str) -> str:
    """The name of a parameter, of which this is a `Shard.key`."""
    return key.partition("[")[0]


def _batches(graph: LayerGraph) -> Counter[str]:
    """How often a step calls each batch norm, by its module's name. The counter of an instance norm stays 0."""
    counts: Counter[str] = Counter()
    for layer in graph.layers:
        kinds = (stage.op.kind for stage in layer.stages for _ in stage.space.parameters)
        for kind, name in zip(kinds, layer.parameters, strict=True):
            module, _, last = name.rpartition(".")
            if kind == "batch_norm" and last == "running_mean":
                counts[module] += 1
    return counts


def _place(tree: nn.Module, name: str, value: Tensor, trainable: bool, *, frozen: bool) -> None:
    """Puts a tensor into nested modules, as its dotted name says."""
    *path, last = name.split(".")
    for part in path:
        if part not in tree._modules:
            tree.add_module(part, Names())
        child = tree._modules[part]
        assert child is not None
        tree = child
    if trainable or frozen:
        tree.register_parameter(last, nn.Parameter(value, requires_grad=not frozen))
    else:
        tree._buffers[last] = value  # not by register_buffer: a constant may be called `to`, as a method is
