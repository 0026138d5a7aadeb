"""OwnState: the user's module as the state of a run. Every rank holds all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from layerwise.comm.base import Comm, Group
from layerwise.errors import LayerwiseError
from layerwise.geometry import Box
from layerwise.graph.layer import LayerGraph
from layerwise.run.state.broadcast import broadcast_values
from layerwise.run.state.shard import Shard


class OwnState:
    """Shards and the whole state dict, by the names that the network has."""

    def __init__(self, keys: Mapping[str, str], graph: LayerGraph, module: nn.Module, comm: Comm) -> None:
        self.module, self.comm, self._keys = module, comm, keys
        self._aliases: dict[str, list[str]] = {}
        for key, name in self._keys.items():
            if key != name:
                self._aliases.setdefault(name, []).append(key)
        known = {name for layer in graph.layers for name, _ in layer.own_parameters()}
        # What the network computes with, then the rest: counters.
        names = dict.fromkeys(self._keys.values())
        self._names = [*(name for name in names if name in known), *(name for name in names if name not in known)]

    def shards(self) -> list[Shard]:
        """Every parameter and buffer."""
        held = self.module.state_dict(keep_vars=True)
        shards = []
        for name in self._names:
            if name in held:
                tensor, first = held[name], self.comm.rank == 0
                box = Box((0,) * tensor.dim(), tuple(tensor.shape))
                aliases = tuple(self._aliases.get(name, ()))
                trainable = isinstance(tensor, nn.Parameter)
                shards.append(Shard(name, aliases, box.shape, box, tensor.detach(), trainable, first))
        return shards

    def parameters(self) -> dict[str, nn.Parameter]:
        """The module's."""
        return dict(self.module.named_parameters())

    def sharing(self, name: str) -> Group:
        """All ranks hold it."""
        return tuple(range(self.comm.size))

    def full_state_dict(self) -> dict[str, Tensor]:
        """Copies on the CPU; rank 0's, where ranks have running statistics of their own."""
        full = {key: tensor.detach().clone().contiguous() for key, tensor in self.module.state_dict().items()}
        broadcast_values(full, self.comm)
        return {key: value.cpu() for key, value in full.items()}

    def load(self, state_dict: Mapping[str, Any], *, strict: bool, assign: bool) -> Any:
        """`load_state_dict` of the module, also of lazy tensors. LayerwiseError where it does not fit."""
        given = {key: value if isinstance(value, Tensor) else value[...] for key, value in state_dict.items()}
        if hasattr(state_dict, "_metadata"):  # versions of modules, which old state dicts are converted by
            given = type("Versioned", (dict,), {"_metadata": state_dict._metadata})(given)
        try:
            return self.module.load_state_dict(given, strict=strict, assign=assign)
        except RuntimeError as error:
            raise LayerwiseError(" ".join(str(error).split())) from None
