"""An optimizer's state in a checkpoint: tensors under the model's names, groups and plain numbers in its seal."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from math import isfinite
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from layerwise.checkpoint.reader import SEAL, Reader
from layerwise.checkpoint.shards import written
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.run.local_tensor import local_tensor
from layerwise.run.state.state import Shard

STATE = "optimizer.state."  # prefix of its tensors' names, as get_optimizer_state_dict returns them
# Settings that select a kernel: the optimizer that loads keeps its own.
KERNEL = {"capturable", "differentiable", "foreach", "fused"}
MEMBERS = "params"
FLOAT = "float"  # key of a number that JSON lacks: {"float": "inf"}


class OptimizerFacts(TypedDict):
    """The facts that all ranks must share, and the parameters of each group that this rank has."""

    kind: str  # the class name
    groups: list[list[str]]  # the model's names
    settings: list[dict[str, JSON]]  # of each group
    numbers: dict[str, dict[str, JSON]]  # the state's numbers (Adam's `step`), by parameter and name


ParameterState = dict[str, object]  # of one parameter, as in Optimizer.state
Owned = Mapping[Parameter, Shard]  # a rank's parameters, each with its box of the model


def describe(optimizer: Optimizer, owned: Owned) -> tuple[OptimizerFacts, list[Shard]]:
    """Returns the facts of this rank's optimizer, and the state that it writes.

    Raises LayerwiseError for an optimizer of other parameters, or with state that cannot be split like its parameter.
    """
    kind = type(optimizer).__qualname__
    facts = OptimizerFacts(kind=kind, groups=[], settings=[], numbers={})
    shards: list[Shard] = []
    for local, group in _groups(optimizer, owned):
        facts["groups"].append([owned[parameter].name for parameter in local])
        settings = {key: value for key, value in group.items() if key not in (MEMBERS, "param_names")}
        facts["settings"].append({key: _setting(kind, key, value) for key, value in settings.items()})
        for parameter in local:
            shard = owned[parameter]
            for key, value in optimizer.state.get(parameter, {}).items():
                sound = isinstance(key, str) and "." not in key
                made = replace(shard, name=f"{STATE}{shard.name}.{key}", aliases=())
                if sound and isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    if written(shard):
                        shards.append(replace(made, tensor=local_tensor(value)))
                elif sound and (not value.dim() if isinstance(value, Tensor) else _is_number(value)):
                    facts["numbers"].setdefault(shard.name, {})[key] = _json(value)
                    if isinstance(value, Tensor) and written(shard) and not any(shard.box.lo):
                        shards.append(replace(made, shape=(), box=Box((), ()), tensor=value))
                else:
                    raise LayerwiseError(
                        f"{kind} stores {key!r} for {shard.name!r}, which is neither a number nor of the parameter's "
                        "shape, so it cannot be split: use an element-wise optimizer (SGD, Adam, AdamW, ...)"
                    )
    return facts, shards


def merged(ranks: Sequence[OptimizerFacts | None], members: Sequence[int]) -> dict[str, JSON] | None:
    """Returns the optimizer's entry in a checkpoint; None if there is no optimizer.

    Raises LayerwiseError if the optimizers of the ranks `members` differ.
    """
    reported = [facts for facts in ranks if facts is not None]
    if not reported:
        return None
    if None in ranks:
        raise LayerwiseError(
            f"rank {members[ranks.index(None)]} passed no optimizer, but others did: pass the same optimizer on all "
            "ranks"
        )
    numbers: dict[str, dict[str, JSON]] = {}
    for rank, facts in zip(members, reported, strict=True):
        if any(facts[what] != reported[0][what] for what in ("kind", "settings")):
            raise LayerwiseError(
                f"rank {rank} and rank {members[0]} have different optimizers or settings: use the same on all ranks"
            )
        for name, values in facts["numbers"].items():
            if numbers.setdefault(name, values) != values:
                raise LayerwiseError(f"the optimizer state of {name!r} differs between ranks: {values} on rank {rank}")
    groups = [
        {**settings, MEMBERS: list(dict.fromkeys(name for facts in reported for name in facts["groups"][i]))}
        for i, settings in enumerate(reported[0]["settings"])
    ]
    return {"kind": reported[0]["kind"], "groups": groups, "numbers": numbers}


def prepare(optimizer: Optimizer, owned: Owned, reader: Reader) -> Callable[[], None]:
    """Reads the saved state of this rank's parameters. Returns a function that gives it to the optimizer.

    Raises LayerwiseError if the saved optimizer is of another kind or has other parameters.
    """
    about, here = reader.about["optimizer"], type(optimizer).__qualname__
    if about is None:
        raise LayerwiseError(f"{reader.where} has no optimizer state: load without an optimizer")
    with reader.sense(SEAL):
        kind = str(about["kind"])
        groups = [{key: _python(value) for key, value in group.items()} for group in about["groups"]]
        names = [[str(name) for name in group.pop(MEMBERS)] for group in groups]
        states: dict[str, ParameterState] = {
            name: {key: _python(value) for key, value in numbers.items()} for name, numbers in about["numbers"].items()
        }
    if kind != here:
        raise LayerwiseError(f"the checkpoint has the state of {kind}, but this optimizer is {here}")
    if len(groups) != len(optimizer.param_groups):
        raise LayerwiseError(
            f"the checkpoint's {kind} has {len(groups)} parameter groups, but this optimizer has "
            f"{len(optimizer.param_groups)}"
        )
    restored: dict[Parameter, ParameterState] = {}
    keys: dict[str, list[str]] = {}
    for name in reader.tensors:
        if name.startswith(STATE):
            of, _, key = name.removeprefix(STATE).rpartition(".")
            keys.setdefault(of, []).append(key)
    ours = {shard.name for shard in owned.values()}
    for i, (local, group) in enumerate(_groups(optimizer, owned)):
        odd = {owned[parameter].name for parameter in local} ^ (ours & set(names[i]))
        if odd:
            raise LayerwiseError(
                f"{min(odd)!r} is in group {i} of only one of the two optimizers, the checkpoint's and this one"
            )
        on_device = bool(group.get("capturable") or group.get("fused"))  # these kernels need all state on the device
        for parameter in local:
            shard = owned[parameter]
            state = restored[parameter] = dict(states.get(shard.name, {}))
            for key in keys.get(shard.name, ()):
                name = f"{STATE}{shard.name}.{key}"
                shape, dtype = reader.tensors[name].spec
                if not shape:  # on the device where PyTorch's load_state_dict puts it
                    number = reader.full(name)
                    state[key] = number if key == "step" and not on_device else number.to(parameter.device)
                    continue
                if shape != shard.shape:
                    raise LayerwiseError(f"{name!r} has shape {shape} in the checkpoint, but {shard.shape} here")
                tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                reader.fill(name, shard.box, local_tensor(tensor))
                state[key] = tensor

    def restore() -> None:  # the optimizer's own load_state_dict would cast to the parameter's type
        for parameter, state in restored.items():
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
        for group, saved in zip(optimizer.param_groups, groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                elif key not in KERNEL:
                    group[key] = tuple(value) if isinstance(group.get(key), tuple) else value

    return restore


def _groups(optimizer: Optimizer, owned: Owned) -> Iterator[tuple[list[Parameter], dict[str, Any]]]:
    """Yields the groups. An empty parameter that is not the model's stands for a rank that holds nothing."""
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if p not in owned and p.numel()]
        if foreign:
            raise LayerwiseError(
                f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is not the model's: build the "
                "optimizer from model.parameters()"
            )
        yield [parameter for parameter in group["params"] if parameter in owned], group


def _setting(kind: str, key: str, value: object) -> JSON:
    if isinstance(value, tuple | list):
        return [_setting(kind, key, member) for member in value]
    if not (_is_number(value) or isinstance(value, str) or (isinstance(value, Tensor) and not value.dim())):
        raise LayerwiseError(
            f"{kind}'s setting {key!r} is a {type(value).__name__}, but a checkpoint holds only numbers and text"
        )
    return _json(value)


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | None)


def _json(value: Any) -> JSON:
    """Returns a number or text in a form that `_python` reads."""
    plain = value.item() if isinstance(value, Tensor) else value
    return {FLOAT: repr(plain)} if isinstance(plain, float) and not isfinite(plain) else plain


def _python(value: Any) -> Any:
    """Returns the original of `_json`'s value, or of a list of such."""
    if isinstance(value, list):
        return [_python(member) for member in value]
    return float(value[FLOAT]) if isinstance(value, dict) else value
