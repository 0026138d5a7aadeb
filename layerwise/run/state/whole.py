"""The modules of a tree with all of every parameter and buffer in them, for the moment: what `apply` is given."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Mapping

from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.state.broadcast import broadcast_values
from layerwise.run.state.state import State


def run_on_whole(state: State, run: Callable[[], object]) -> None:
    """Calls `run` while the modules have whole tensors; then every rank has its boxes of rank 0's. All ranks call it.

    LayerwiseError where gradients would not be seen, or what `run` makes would be lost.
    """
    tree, parts = state.tree, state.tree.tensors()
    with_gradient = next((name for name, p in tree.parameters().items() if p.grad is not None), None)
    if with_gradient is not None:
        raise LayerwiseError(
            f"apply() gives its function whole parameters without gradients, but {with_gradient!r} has one: call "
            "zero_grad() before"
        )
    values = state.whole()
    tree.fill({name: _like(part, values.pop(name).to(state.options.device)) for name, part in parts.items()})
    given = [weakref.ref(tensor) for tensor in tree.tensors().values()]
    try:
        run()
        tied, made = tree.tied, tree.tensors()
    finally:
        tree.fill(parts)
    if not tied:
        raise LayerwiseError("apply() gave parameters that the model uses twice two values: tie them before")
    for name, tensor in made.items():
        shape, dtype = state.shape(name), parts[name].dtype
        if not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape or tensor.dtype != dtype:
            raise LayerwiseError(
                f"apply() put something else in the place of {name!r}, which the plan has with shape {shape} and type "
                f"{dtype}: change the model before it is made parallel"
            )
    given += [weakref.ref(tensor) for tensor in made.values()]
    _take(state, parts, made)
    made.clear()
    del tensor
    if any(ref() is not None for ref in given):
        gc.collect()
    if any(ref() is not None for ref in given):
        raise LayerwiseError(
            "the function of apply() keeps parameters, which are not those that are trained: take them from "
            "model.parameters() or model.modules()"
        )


def _take(state: State, parts: Mapping[str, Tensor], made: Mapping[str, Tensor]) -> None:
    """Every rank has its boxes of what rank 0 has."""
    whole = {name: tensor.detach() for name, tensor in made.items()}
    broadcast_values({**state.extra, **whole}, state.comm)
    state.load(whole, strict=False)
    for name, part in parts.items():
        if isinstance(part, nn.Parameter):
            part.requires_grad_(made[name].requires_grad)


def _like(part: Tensor, whole: Tensor) -> Tensor:
    return nn.Parameter(whole, requires_grad=part.requires_grad) if isinstance(part, nn.Parameter) else whole
