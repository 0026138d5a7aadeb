"""A split model with full tensors in it: for a user's function, for a file, and for undoing parallelization."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from layerwise.comm.together import agree
from layerwise.errors import LayerwiseError
from layerwise.run.guards.refusals import Structure
from layerwise.run.guards.replaced import replace_parameter
from layerwise.run.state.initial import broadcast_values
from layerwise.run.state.state import State
from layerwise.run.state.tree import Slots


def fill(state: State, device: torch.device, values: Mapping[str, Tensor] | None = None) -> dict[str, Tensor]:
    """Puts full tensors into the model, and returns this rank's previous ones by name. All ranks must call it.

    values: the full tensors, if they exist already.
    """
    values, shards = state.full_tensors() if values is None else dict(values), state.tree.tensors()
    for name, shard in shards.items():
        full = values.pop(name).to(device)
        trained = isinstance(shard, nn.Parameter)
        state.tree.fill({name: nn.Parameter(full, requires_grad=shard.requires_grad) if trained else full})
    return shards


@contextmanager
def undone(state: State, model: nn.Module) -> Iterator[None]:
    """A context after which the model has this rank's tensors, its class and its attributes again."""
    slots, shards = Slots(model), state.tree.tensors()
    try:
        yield
    finally:
        state.tree.fill(shards)
        slots.put_back()


def apply(state: State, run: Callable[[], object]) -> None:
    """Calls `run` while the model has full tensors, then gives every rank its boxes of rank 0's. All ranks must call
    it.

    Raises LayerwiseError if gradients would not be seen, or if `run` replaces a tensor instead of writing into it.
    """
    tree = state.tree
    with_gradient = next((name for name, p in tree.parameters().items() if p.grad is not None), None)
    if with_gradient is not None:
        raise LayerwiseError(
            f"apply() passes full parameters without gradients to its function, but {with_gradient!r} has a gradient: "
            "call zero_grad() first"
        )
    shards = fill(state, state.options.device)
    lent, places = tree.tensors(), Structure(tree.root, buffers=True)
    try:
        run()
        if places.changed():
            raise LayerwiseError(
                "apply() replaced a tensor or module of the model: write into it, as nn.init does, or change the model "
                "before you parallelize it"
            )
        tree.fill(shards)
        values = {name: tensor.detach() for name, tensor in lent.items()}
        broadcast_values({**state.extra, **values}, state.comm)
        state.load(values, strict=False)
        for name, shard in shards.items():
            if isinstance(shard, nn.Parameter):
                shard.requires_grad_(lent[name].requires_grad)
    finally:
        tree.fill(shards)
        for name, shard in shards.items():
            if isinstance(shard, nn.Parameter):
                replace_parameter(lent[name], shard)


def write(state: State, save: Callable[[], Any]) -> Any:
    """Makes rank 0 call `save` while the model has full tensors on the CPU. All ranks must call it."""
    shards = fill(state, torch.device("cpu"))
    try:
        return agree(state.comm, lambda: (save() if state.comm.rank == 0 else None, None))[0]
    finally:
        state.tree.fill(shards)
