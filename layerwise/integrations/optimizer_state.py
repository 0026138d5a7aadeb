"""The full state of an optimizer whose parameters are split: what `optimizer.state_dict()` is on one device."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.optim import Optimizer
from torch.utils import _pytree as pytree

from layerwise.checkpoint.optimizer_state import Owned
from layerwise.checkpoint.save_and_load import owned
from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import is_dtensor, local_tensor
from layerwise.run.parallel import ParallelModule

NAMES = "param_names"  # of a group, as torch.optim has them where it is given named parameters
SPLIT = ("params", NAMES)  # what of a group follows from the plan


def parallel_modules(module: nn.Module, path: str = "") -> Iterator[tuple[str, ParallelModule]]:
    """The parallel modules in a module, by path; "" where it is one."""
    if isinstance(module, ParallelModule):
        yield path, module
        return
    for name, child in module._modules.items():
        if child is not None:
            yield from parallel_modules(child, f"{path}.{name}" if path else name)


def full_state(optimizer: Optimizer, module: nn.Module, *, prefix: str = "") -> dict[str, Any]:
    """Returns `optimizer.state_dict()` with full tensors on the CPU, and with names. All ranks call it.

    An optimizer of the plain module on one device takes it, too.

    Args:
        optimizer: Of parameters of the module.
        module: A parallel one, or one that holds some.
        prefix: What names in the module begin with, and those in the state do not.
    """
    names = _names(module, prefix)

    def full(value: Any) -> Any:
        tensor = value.full_tensor() if is_dtensor(value) else value
        return tensor.detach().cpu()

    state: dict[str, Any] = pytree.tree_map_only(Tensor, full, optimizer.state_dict())
    for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True):
        saved[NAMES] = [names[p] for p in group["params"]]
    return state


def load_full_state(
    optimizer: Optimizer, state: Mapping[str, Any], module: nn.Module, *, partial: bool = False, prefix: str = ""
) -> None:
    """Gives an optimizer what `full_state` returned, whatever plan and number of ranks it is of.

    Also `state_dict()` of an optimizer on one device, whose parameters are in the same order. partial: one of the two
    may lack parameters, as a network whose loss does not reach them. LayerwiseError where it is of other parameters.
    """
    names = _names(module, prefix)
    shards = {p: shard for _, part in parallel_modules(module) for p, shard in owned(part).items()}
    here = [p for group in optimizer.param_groups for p in group["params"]]
    numbers = [number for group in state["param_groups"] for number in group["params"]]
    named = [name for group in state["param_groups"] for name in group.get(NAMES, ())] or [names[p] for p in here]
    if len(named) != len(numbers) or not (partial or sorted(named) == sorted(names[p] for p in here)):
        raise LayerwiseError("the checkpoint has the state of an optimizer of other parameters: give the same groups")
    groups = {name: group for group in state["param_groups"] for name in group.get(NAMES, ())}
    states = {name: state["state"].get(number, {}) for name, number in zip(named, numbers, strict=True)}
    loaded = optimizer.state_dict()
    loaded["state"] = {i: _local(p, states[names[p]], shards) for i, p in enumerate(here) if states.get(names[p])}
    for i, group in enumerate(optimizer.param_groups):  # which may be others where the plan is another
        first = next((names[p] for p in group["params"]), "")
        saved = groups.get(first, state["param_groups"][min(i, len(state["param_groups"]) - 1)])
        loaded["param_groups"][i] |= {key: value for key, value in saved.items() if key not in SPLIT}
    optimizer.load_state_dict(loaded)


def _names(module: nn.Module, prefix: str) -> dict[Parameter, str]:
    return {p: name.removeprefix(prefix) for name, p in module.named_parameters()}


def _local(p: Parameter, state: Mapping[str, Any], shards: Owned) -> dict[str, Any]:
    """A parameter's state with tensors of its shape as the parameter lies."""
    made = dict(state)
    for key, value in state.items():
        if is_dtensor(p) and isinstance(value, Tensor) and value.shape == p.shape and value.dim():
            made[key] = torch.empty_like(p, dtype=value.dtype, requires_grad=False)
            box = shards[p].box
            if box.volume:
                local_tensor(made[key]).copy_(value[box.slices()])
    return made
