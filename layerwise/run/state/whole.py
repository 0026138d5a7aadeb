"""The modules of a tree with full parameters and buffers in them, for the moment: what `apply` is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor, nn

from layerwise.errors import LayerwiseError
from layerwise.run.guards.changes import Structure
from layerwise.run.guards.original import RefusedParameter
from layerwise.run.state.broadcast import broadcast_values
from layerwise.run.state.state import State


class LentParameter(RefusedParameter):
    """A full parameter after `apply`, where its function has kept it."""

    sentence = (
        "the function of apply() has kept a parameter, which is not the one that is trained: take it from "
        "model.parameters() or model.modules()"
    )


def run_on_whole(state: State, run: Callable[[], object]) -> None:
    """Calls `run` while the modules have full tensors; then every rank has its boxes of rank 0's. All ranks call it.

    LayerwiseError where gradients would not be seen, or where `run` replaces a tensor in place of writing into it.
    """
    tree, parts = state.tree, state.tree.tensors()
    with_gradient = next((name for name, p in tree.parameters().items() if p.grad is not None), None)
    if with_gradient is not None:
        raise LayerwiseError(
            f"apply() gives its function full parameters without gradients, but {with_gradient!r} has one: call "
            "zero_grad() before"
        )
    values = state.whole()
    tree.fill({name: _like(part, values.pop(name).to(state.options.device)) for name, part in parts.items()})
    lent, places = tree.tensors(), Structure(tree.root, buffers=True)
    try:
        run()
        if places.changed():
            raise LayerwiseError(
                "apply() put another tensor or module in the place of one of the model's: write into it, as nn.init "
                "does, or change the model before it is made parallel"
            )
        tree.fill(parts)
        _take(state, parts, lent)
    finally:
        tree.fill(parts)
        for tensor in lent.values():
            if isinstance(tensor, nn.Parameter):
                tensor.__class__ = LentParameter


def _take(state: State, parts: Mapping[str, Tensor], lent: Mapping[str, Tensor]) -> None:
    """Every rank has its boxes of what rank 0 has."""
    full = {name: tensor.detach() for name, tensor in lent.items()}
    broadcast_values({**state.extra, **full}, state.comm)
    state.load(full, strict=False)
    for name, part in parts.items():
        if isinstance(part, nn.Parameter):
            part.requires_grad_(lent[name].requires_grad)


def _like(part: Tensor, full: Tensor) -> Tensor:
    return nn.Parameter(full, requires_grad=part.requires_grad) if isinstance(part, nn.Parameter) else full
