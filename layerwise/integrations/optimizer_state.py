"""The full state of an optimizer whose parameters are split: what `optimizer.state_dict()` is on one device."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from layerwise.checkpoint.optimizer_state import Owned
from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import is_dtensor, local_tensor

NAMES = "param_names"  # of a group, as torch.optim has them where it is given named parameters
SPLIT = ("params", NAMES)  # what of a group follows from the plan


def full_state(optimizer: Optimizer, names: Mapping[Parameter, str], *, gather: bool = True) -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with full tensors on the CPU, and with names. All ranks call it.

    names: of the parameters. gather: else tensors are as the parameters lie. An optimizer of a plain model on one
    device takes it, too.
    """

    def full(value: Any) -> Any:
        tensor = value.full_tensor() if is_dtensor(value) else value
        return tensor.detach().cpu()

    state: dict[str, Any] = optimizer.state_dict()
    if gather:
        state = pytree.tree_map_only(Tensor, full, state)
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        saved[NAMES] = [names[p] for p in group["params"]]
    return state


def load_full_state(
    optimizer: Optimizer, state: Mapping[str, Any], names: Mapping[Parameter, str], owned: Owned
) -> None:
    """Gives an optimizer what `full_state` returned, whatever plan and number of ranks it is of.

    owned: the boxes of split parameters that this rank has. Also `state_dict()` of an optimizer on one device, whose
    parameters are in the same order. LayerwiseError where it is of other parameters.
    """
    here = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    named = [name for group in state["param_groups"] for name in group.get(NAMES, ())] or [names[p] for p in here]
    if sorted(named) != sorted(names[p] for p in here) or len(named) != len(numbers):
        raise LayerwiseError("the checkpoint has the state of an optimizer of other parameters: give the same groups")
    groups = {name: group for group in state["param_groups"] for name in group.get(NAMES, ())}
    states = {name: state["state"].get(number, {}) for name, number in zip(named, numbers, strict=True)}
    loaded = optimizer.state_dict()
    loaded["state"] = {i: _local(p, states[names[p]], owned) for i, p in enumerate(here) if states[names[p]]}
    for i, group in enumerate(optimizer.param_groups):  # which may be others where the plan is another
        first = next((names[p] for p in group["params"]), "")
        saved = groups.get(first, state["param_groups"][min(i, len(state["param_groups"]) - 1)])
        loaded["param_groups"][i] |= {key: value for key, value in saved.items() if key not in SPLIT}
    optimizer.load_state_dict(loaded)


def _local(p: Parameter, state: Mapping[str, Any], owned: Owned) -> dict[str, Any]:
    """A parameter's state with tensors of its shape as the parameter lies."""
    made = dict(state)
    for key, value in state.items():
        if is_dtensor(p) and isinstance(value, Tensor) and value.shape == p.shape and value.dim():
            made[key] = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
            box = owned[p].box
            if box.volume:
                local_tensor(made[key]).copy_(value[box.slices()])
    return made
