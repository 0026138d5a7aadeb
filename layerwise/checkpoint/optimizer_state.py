"""The state of a torch.optim optimizer as DCP's `get_state_dict` has it: by the model's names, with its groups."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from layerwise.checkpoint.contribution import Entry
from layerwise.checkpoint.reader import Reader
from layerwise.errors import LayerwiseError
from layerwise.run.local_tensor import local_tensor
from layerwise.run.state.state import Shard

STATE, GROUPS = ("optimizer", "state"), ("optimizer", "param_groups")
# By which kernel: the optimizer that loads keeps its own.
KERNEL = {"capturable", "differentiable", "foreach", "fused"}
MEMBERS = "params"


class OptimizerFacts(TypedDict):
    """The facts that the ranks must have alike, and which of a group's parameters this one has."""

    kind: str  # the name of its class
    groups: list[list[str]]  # the model's names
    settings: list[str]  # of each group, as text
    numbers: dict[str, dict[str, str]]  # by parameter and name of the state (`step`), as text


ParameterState = dict[str, object]  # of one parameter, as in Optimizer.state
Owned = Mapping[Parameter, Shard]  # a rank's parameters, each with the box of the model that it is


def describe(optimizer: Optimizer, owned: Owned) -> tuple[OptimizerFacts, list[Entry]]:
    """Returns the facts of the optimizer that this rank has, and the state that it writes.

    LayerwiseError for an optimizer of foreign parameters, or with state that cannot be cut as the parameters are.
    """
    kind = type(optimizer).__qualname__
    facts = OptimizerFacts(kind=kind, groups=[], settings=[], numbers={})
    entries: list[Entry] = []
    for local, group in _groups(optimizer, owned):
        facts["groups"].append([owned[parameter].name for parameter in local])
        facts["settings"].append(
            repr({key: _plain(_setting(kind, key, value)) for key, value in _settings(group).items()})
        )
        for parameter in local:
            shard = owned[parameter]
            for key, value in optimizer.state.get(parameter, {}).items():
                sound = isinstance(key, str) and "." not in key
                keys = (*STATE, shard.name, key)
                if sound and isinstance(value, Tensor) and value.dim() and value.shape == parameter.shape:
                    if shard.first and shard.box.volume:
                        entries.append(Entry(keys, local_tensor(value), shard.shape, shard.box.lo))
                elif sound and (not value.dim() if isinstance(value, Tensor) else _is_number(value)):
                    facts["numbers"].setdefault(shard.name, {})[key] = repr(_plain(value))
                    if shard.first and shard.box.volume and not any(shard.box.lo):
                        entries.append(Entry(keys, value))
                else:
                    raise LayerwiseError(
                        f"{kind} keeps {key!r} of {shard.name!r}, which is neither a number nor of the parameter's "
                        "shape: it cannot be cut into boxes; take an element-wise optimizer (SGD, Adam, AdamW, ...)"
                    )
    return facts, entries


def of_groups(optimizer: Optimizer, ranks: Sequence[OptimizerFacts | None], members: Sequence[int]) -> list[Entry]:
    """Returns the groups that one rank writes. LayerwiseError where the optimizers of the ranks `members` differ."""
    if None in ranks:
        raise LayerwiseError(
            f"rank {members[ranks.index(None)]} gave no optimizer, others did: give all ranks the same"
        )
    reported = [facts for facts in ranks if facts is not None]
    numbers: dict[str, dict[str, str]] = {}
    for rank, facts in zip(members, reported, strict=True):
        if any(facts[what] != reported[0][what] for what in ("kind", "settings")):
            raise LayerwiseError(
                f"rank {rank} and rank {members[0]} differ in optimizer or settings of it: give all ranks the same"
            )
        for name, values in facts["numbers"].items():
            if numbers.setdefault(name, values) != values:
                raise LayerwiseError(f"optimizer state of {name!r} differs between ranks: {values} on rank {rank}")
    entries = []
    for i, group in enumerate(optimizer.param_groups):
        settings = {key: _setting(type(optimizer).__qualname__, key, value) for key, value in _settings(group).items()}
        names = list(dict.fromkeys(name for facts in reported for name in facts["groups"][i]))
        entries += [Entry((*GROUPS, i, key), value) for key, value in {**settings, MEMBERS: names}.items()]
    return entries


@dataclass(slots=True)
class Prepared:
    """An optimizer's state as it was saved: tensors are still to be filled from the checkpoint's of these names."""

    states: dict[Parameter, ParameterState] = field(default_factory=dict)
    groups: list[dict[str, Any]] = field(default_factory=list)
    pending: list[tuple[str, Shard, Tensor]] = field(default_factory=list)

    def restore(self, optimizer: Optimizer) -> None:
        """Gives the state to the optimizer. Not by its load_state_dict: that would cast to the parameter's type."""
        for parameter, state in self.states.items():
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state
        for group, saved in zip(optimizer.param_groups, self.groups, strict=True):
            for key, value in saved.items():
                if isinstance(group.get(key), Tensor):
                    group[key].fill_(value)
                else:
                    as_here = isinstance(value, list) and isinstance(group.get(key), tuple)
                    group[key] = tuple(value) if as_here else value


def prepare(optimizer: Optimizer, owned: Owned, reader: Reader) -> Prepared:
    """Returns the saved state for this rank's parameters. Changes nothing.

    LayerwiseError where the saved one is another optimizer, or one of other parameters.
    """
    prepared, saved, here = Prepared(), _saved_groups(reader), type(optimizer).__qualname__
    kind = here if reader.about is None else reader.about["optimizer"]
    if kind != here:
        raise LayerwiseError(f"the checkpoint has the state of {kind}, the optimizer here is {here}")
    if len(saved) != len(optimizer.param_groups):
        raise LayerwiseError(
            f"the checkpoint's {kind} has {len(saved)} groups of parameters, the one here {len(optimizer.param_groups)}"
        )
    keys = _saved_state(reader)
    ours = {shard.name for shard in owned.values()}
    for i, (local, group) in enumerate(_groups(optimizer, owned)):
        members = saved[i].pop(MEMBERS)
        names = _named(members, [owned[parameter].name for parameter in local], len(group["params"]))
        odd = {owned[parameter].name for parameter in local} ^ (ours & set(names))
        if odd:
            raise LayerwiseError(
                f"{min(odd)!r} is in group {i} of only one optimizer, the checkpoint's or the one here"
            )
        prepared.groups.append({key: value for key, value in saved[i].items() if key not in KERNEL})
        on_device = bool(group.get("capturable") or group.get("fused"))  # such kernels want all of it there
        of = {name: str(member) for name, member in zip(names, members, strict=True)}
        for parameter in local:
            shard = owned[parameter]
            prepared.states[parameter] = state = ParameterState()
            for key in keys.get(of[shard.name], ()):
                name = ".".join((*STATE, of[shard.name], key))
                state[key] = _state(reader, name, key, parameter, shard, prepared, on_device=on_device)
    return prepared


def _state(
    reader: Reader, name: str, key: str, parameter: Parameter, shard: Shard, prepared: Prepared, *, on_device: bool
) -> object:
    """Returns one entry of a parameter's state, on the device where PyTorch's load_state_dict puts it."""
    if name in reader.description.values:
        return reader.value(name)
    shape, dtype = reader.spec(name)
    if not shape:
        number = reader.full(name)
        return number if key == "step" and not on_device else number.to(parameter.device)
    if shape != shard.shape:
        raise LayerwiseError(f"{name!r} has shape {shape} in the checkpoint, {shard.shape} here")
    tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
    prepared.pending.append((name, shard, local_tensor(tensor)))
    return tensor


def _saved_groups(reader: Reader) -> list[dict[str, Any]]:
    """Returns the settings of each group of parameters, in order."""
    groups: dict[int, dict[str, Any]] = {}
    every = (*reader.description.values, *reader.description.tensors)
    for name in every:
        first, second, number, key = (*name.split(".", 3), "", "", "")[:4]
        if (first, second) == GROUPS:
            if not number.isdigit():
                raise LayerwiseError(
                    f"{reader.where} has an optimizer's groups by parameter, as flatten_optimizer_state_dict=True "
                    "makes them: load it by torch.distributed.checkpoint"
                )
            stored = name in reader.description.values
            groups.setdefault(int(number), {})[key] = reader.value(name) if stored else reader.full(name).item()
    if not groups:
        raise LayerwiseError(f"{reader.where} has no optimizer's state: load without")
    with reader.sense("its optimizer"):
        return [{MEMBERS: list(groups[i][MEMBERS]), **groups[i]} for i in range(len(groups))]


def _saved_state(reader: Reader) -> dict[str, list[str]]:
    """Returns the keys of each parameter's state, by the name that the file has for it."""
    keys: dict[str, list[str]] = {}
    prefix = ".".join(STATE) + "."
    for name in (*reader.description.tensors, *reader.description.values):
        if name.startswith(prefix):
            of, _, key = name.removeprefix(prefix).rpartition(".")
            keys.setdefault(of, []).append(key)
    return keys


def _named(members: Sequence[object], here: Sequence[str], count: int) -> list[str]:
    """Returns the names of a saved group's parameters, for which optimizer.state_dict() has numbers, in their order."""
    if not members or not isinstance(members[0], int):
        return [str(member) for member in members]
    if len(members) != len(here) or count != len(here):
        raise LayerwiseError(
            f"the checkpoint's optimizer numbers its {len(members)} parameters, and there are {len(here)} here: save "
            "what torch.distributed.checkpoint.state_dict.get_state_dict gives, which has names"
        )
    return list(here)


def _groups(optimizer: Optimizer, owned: Owned) -> Iterator[tuple[list[Parameter], dict[str, Any]]]:
    """Yields the groups. A parameter without elements that is not the model's stands for a rank that holds nothing."""
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if p not in owned and p.numel()]
        if foreign:
            raise LayerwiseError(
                f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is not the module's: make it "
                "of module.parameters()"
            )
        yield [parameter for parameter in group["params"] if parameter in owned], group


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a group's settings: all but its parameters."""
    return {key: value for key, value in group.items() if key not in (MEMBERS, "param_names")}


def _setting(kind: str, key: str, value: object) -> object:
    if isinstance(value, Tensor) and not value.dim():
        return value
    if isinstance(value, tuple | list):
        return type(value)(_plain(_setting(kind, key, member)) for member in value)
    if not (_is_number(value) or isinstance(value, str)):
        raise LayerwiseError(
            f"{kind}'s setting {key!r} is a {type(value).__name__}: a checkpoint holds numbers and text"
        )
    return value


def _is_number(value: object) -> bool:
    return isinstance(value, bool | int | float | None)


def _plain(value: object) -> object:
    return value.item() if isinstance(value, Tensor) else value
