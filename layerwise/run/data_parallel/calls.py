"""Calls of the model on this rank, and which samples of the global batch each call has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.importers.torch.read.arguments import Arguments
from layerwise.ops.base import Role
from layerwise.ops.random import signed
from layerwise.run.batch import Batch
from layerwise.run.data_parallel.replacements import Draws
from layerwise.run.guards.hooks import in_backward


@dataclass(frozen=True, slots=True, eq=False)
class ModelCall:
    """One call of the model on this rank: its random seed and its samples of the global batch."""

    seed: int  # of the call's random numbers
    batch: Batch | None = None  # None: nothing depends on the other ranks' samples

    @property
    def first(self) -> int:
        """Returns the index of this rank's first sample."""
        return 0 if self.batch is None else self.batch.share.start

    @property
    def samples(self) -> int:
        """Returns the number of this rank's samples."""
        return 1 if self.batch is None else self.batch.share.stop - self.batch.share.start

    @property
    def total(self) -> int:
        """Returns the number of samples of all ranks; on one device, where nothing depends on it, 1."""
        return 1 if self.batch is None else self.batch.total


class FedSamples:
    """Counts a call's samples: the size of the input's sample dimension."""

    def __init__(self, graph: LayerGraph, arguments: Arguments) -> None:
        along = {layer.name: layer.out.index("n") for layer in graph.layers if layer.role is Role.INPUT}
        self._arguments, leaves = arguments, arguments.leaves.items()
        self._paths = [path for path, leaf in leaves if along.get(str(leaf.name), -1) == 0]
        self._shared = [path for path, leaf in leaves if along.get(str(leaf.name), -1) is None]

    def given(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> int:
        """Returns this rank's number of samples. Raises LayerwiseError if no tensor is passed."""
        flat = self._arguments.named(inputs, named)
        candidates = (*(flat.get(path) for path in self._paths), *flat.values())
        x = next((x for x in candidates if isinstance(x, Tensor) and x.dim()), None)
        if x is None:
            raise LayerwiseError(
                "the model was called without a tensor, so the number of samples is unknown: pass at least one tensor"
            )
        return x.shape[0]

    def shared(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> list[Tensor]:
        """Returns the tensors that are the same for all samples."""
        flat = self._arguments.named(inputs, named) if self._shared else {}
        return [x for path in self._shared if isinstance(x := flat.get(path), Tensor)]


class Calls:
    """The call under way. Activation checkpointing asks for it too, when it recomputes modules in the backward pass."""

    def __init__(self) -> None:
        self.forward: ModelCall | None = None
        self.seeds: Tensor | None = None  # dropout seeds as compiled code reads them: one int64 for each
        self._draws: list[Draws] = []
        self._backward: tuple[int, ModelCall | None] = (-1, None)  # the pass and its call (None: several calls)

    def draw(self, draws: Draws) -> int:
        """Registers a dropout, which draws in every call. Returns its index in `seeds`."""
        self._draws.append(draws)
        return len(self._draws) - 1

    def seed(self, call: ModelCall, device: torch.device) -> None:
        """Sets `seeds` for a call, in a new tensor: the backward pass of an earlier call still reads its own."""
        if self._draws:
            self.seeds = torch.tensor([signed(draws.seed(call.seed)) for draws in self._draws], device=device)

    def begin_backward(self, call: ModelCall) -> None:
        """Notes that a backward pass reaches the outputs of this call."""
        task, (last, recorded) = torch._C._current_graph_task_id(), self._backward
        self._backward = (task, call if task != last or recorded == call else None)

    def now(self) -> ModelCall | None:
        """Returns the call under way; None if a module is called by itself."""
        if self.forward is not None or not in_backward():
            return self.forward
        return self.recomputed()

    def recomputed(self) -> ModelCall:
        """Returns the call that a backward pass recomputes. Raises LayerwiseError if that is ambiguous."""
        call = self._backward[1]
        if call is None:
            raise LayerwiseError(
                "torch.utils.checkpoint recomputes the model, and layerwise cannot tell for which call: run a separate "
                "backward pass for each call, and checkpoint with use_reentrant=False"
            )
        return call
