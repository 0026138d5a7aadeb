"""What travels of a torch.optim optimizer: state of a parameter's shape by boxes, numbers and settings as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypedDict

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from layerwise.checkpoint.chunks import Chunks
from layerwise.checkpoint.storage import Reader
from layerwise.errors import LayerwiseError
from layerwise.files import JSON
from layerwise.geometry import Box
from layerwise.run.parts import local_part
from layerwise.run.state.shard import Shard
from layerwise.tensorfile import DTYPE_OF, dtype_name

PREFIX = "optimizer.state."  # of the names of state, as DCP has them: optimizer.state.conv.weight.exp_avg
UNSAVED = {"params", "param_names", "capturable", "differentiable", "foreach", "fused"}  # who, and by which kernel


class ParameterGroup(TypedDict):
    """A group of parameters."""

    parameters: list[str]  # the model's names
    settings: dict[str, JSON]  # learning rate and the like


class OptimizerFacts(TypedDict):
    """All of an optimizer but its boxes."""

    kind: str  # the name of its class
    groups: list[ParameterGroup]
    numbers: dict[str, dict[str, JSON]]  # by parameter and name of the state (`step`)


State = dict[str, object]  # of one parameter, as in Optimizer.state
States = dict[Parameter, State]
Owned = Mapping[Parameter, Shard]  # a rank's parameters, each with the box of the model that it is


def checked(value: Any) -> OptimizerFacts:
    """The facts that a file gives. Something like TypeError, KeyError or ValueError where they are none."""
    groups = [
        ParameterGroup(parameters=[*map(str, g["parameters"])], settings=dict(g["settings"])) for g in value["groups"]
    ]
    for numbers in value["numbers"].values():
        for number in numbers.values():
            _from_json(number, torch.device("cpu"), False)
    return OptimizerFacts(kind=str(value["kind"]), groups=groups, numbers=value["numbers"])


def describe(optimizer: Optimizer, owned: Owned) -> tuple[OptimizerFacts, dict[str, Chunks]]:
    """What this rank knows of the optimizer, and the boxes of its state that this rank writes, by name.

    LayerwiseError for an optimizer of foreign parameters, or with state that cannot be cut as the parameters are.
    """
    kind = type(optimizer).__qualname__
    facts = OptimizerFacts(kind=kind, groups=[], numbers={})
    boxes: dict[str, Chunks] = {}
    for held, group in _groups(optimizer, owned):
        settings = {key: _setting(kind, key, value) for key, value in group.items() if key not in UNSAVED}
        facts["groups"].append(
            ParameterGroup(parameters=[owned[parameter].name for parameter in held], settings=settings)
        )
        for parameter in held:
            shard = owned[parameter]
            for key, value in optimizer.state.get(parameter, {}).items():
                sound = isinstance(key, str) and "." not in key
                tensor = isinstance(value, Tensor)
                if sound and tensor and value.dim() and value.shape == parameter.shape:
                    if shard.first and shard.box.volume:
                        name = f"{PREFIX}{shard.name}.{key}"
                        boxes[name] = Chunks(shard.shape, value.dtype)
                        boxes[name].add(shard.box, local_part(value))
                elif sound and (not value.dim() if tensor else isinstance(value, bool | int | float | None)):
                    facts["numbers"].setdefault(shard.name, {})[key] = _as_json(value)
                    if tensor and shard.first and shard.box.volume and not any(shard.box.lo):  # for torch's readers
                        boxes[f"{PREFIX}{shard.name}.{key}"] = Chunks((), value.dtype)
                        boxes[f"{PREFIX}{shard.name}.{key}"].add(Box((), ()), value)
                else:
                    raise LayerwiseError(
                        f"{kind} keeps {key!r} of {shard.name!r}, which is neither a number nor of the parameter's "
                        "shape: it cannot be cut into boxes; take an element-wise optimizer (SGD, Adam, AdamW, ...)"
                    )
    return facts, boxes


def merge(ranks: Sequence[OptimizerFacts]) -> OptimizerFacts:
    """What all ranks together know. LayerwiseError where they disagree."""
    merged = OptimizerFacts(kind=ranks[0]["kind"], groups=[], numbers={})
    settings = [group["settings"] for group in ranks[0]["groups"]]
    for rank, facts in enumerate(ranks):
        if facts["kind"] != merged["kind"] or [group["settings"] for group in facts["groups"]] != settings:
            raise LayerwiseError(
                f"rank {rank} and rank 0 differ in optimizer or settings of it: give all ranks the same"
            )
        for name, numbers in facts["numbers"].items():
            if merged["numbers"].setdefault(name, numbers) != numbers:
                raise LayerwiseError(f"optimizer state of {name!r} differs between ranks: {numbers} on rank {rank}")
    for i, shared in enumerate(settings):
        names = dict.fromkeys(name for facts in ranks for name in facts["groups"][i]["parameters"])
        merged["groups"].append(ParameterGroup(parameters=list(names), settings=shared))
    return merged


def prepare(
    optimizer: Optimizer, owned: Owned, facts: OptimizerFacts, reader: Reader
) -> tuple[States, dict[str, Chunks]]:
    """State for this rank's parameters as it was saved, and the boxes of it that are still to be read, by name.

    Changes nothing. LayerwiseError where the saved one is another optimizer, or one of other parameters.
    """
    kind, saved = type(optimizer).__qualname__, facts["groups"]
    if facts["kind"] != kind:
        raise LayerwiseError(f"the checkpoint has the state of {facts['kind']}, the optimizer here is {kind}")
    if len(saved) != len(optimizer.param_groups):
        raise LayerwiseError(
            f"the checkpoint's {kind} has {len(saved)} groups of parameters, the one here {len(optimizer.param_groups)}"
        )
    keys: dict[str, list[str]] = {}
    for name in reader.metadata.state_dict_metadata:
        if name.startswith(PREFIX):
            of, _, key = name.removeprefix(PREFIX).rpartition(".")
            keys.setdefault(of, []).append(key)
    states: States = {}
    boxes: dict[str, Chunks] = {}
    ours = {shard.name for shard in owned.values()}
    for i, (held, group) in enumerate(_groups(optimizer, owned)):
        on_device = bool(group.get("capturable") or group.get("fused"))  # such kernels want all of it there
        odd = {owned[parameter].name for parameter in held} ^ (ours & set(saved[i]["parameters"]))
        if odd:
            raise LayerwiseError(
                f"{min(odd)!r} is in group {i} of only one optimizer, the checkpoint's or the one here"
            )
        for parameter in held:
            shard = owned[parameter]
            state: State = {}
            for key in keys.get(shard.name, ()):
                if key in facts["numbers"].get(shard.name, {}):
                    continue
                name = f"{PREFIX}{shard.name}.{key}"
                shape, dtype = reader.spec(name)
                if shape != shard.shape:
                    raise LayerwiseError(f"{name!r} has shape {shape} in the checkpoint, {shard.shape} here")
                state[key] = tensor = torch.empty_like(parameter, dtype=dtype, requires_grad=False)
                if shard.box.volume:
                    boxes[name] = Chunks(shape, dtype)
                    boxes[name].add(shard.box, local_part(tensor))
            for key, value in facts["numbers"].get(shard.name, {}).items():
                state[key] = _from_json(value, parameter.device, on_device)
            states[parameter] = state
    return states, boxes


def restore(optimizer: Optimizer, states: States, facts: OptimizerFacts) -> None:
    """Gives the optimizer its states and settings. Not by its load_state_dict: that would cast to the parameter's type.

    Settings that choose a kernel (foreach, fused, capturable) stay as they are here.
    """
    for parameter, state in states.items():
        optimizer.state.pop(parameter, None)
        if state:
            optimizer.state[parameter] = state
    for group, saved in zip(optimizer.param_groups, facts["groups"], strict=True):
        for key, value in saved["settings"].items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = tuple(value) if isinstance(value, list) and isinstance(group.get(key), tuple) else value


def _groups(optimizer: Optimizer, owned: Owned) -> Iterator[tuple[list[Parameter], dict[str, Any]]]:
    """Each group of parameters. One without elements that is not the model's stands for a rank that holds nothing."""
    for group in optimizer.param_groups:
        foreign = [p for p in group["params"] if p not in owned and p.numel()]
        if foreign:
            raise LayerwiseError(
                f"the optimizer has a parameter of shape {tuple(foreign[0].shape)} that is not the module's: make it "
                "of module.parameters()"
            )
        yield [parameter for parameter in group["params"] if parameter in owned], group


def _setting(kind: str, key: str, value: object) -> JSON:
    if isinstance(value, Tensor) and not value.dim():
        value = value.item()
    if isinstance(value, tuple | list):
        return [_setting(kind, key, member) for member in value]
    if not isinstance(value, bool | int | float | str | None):
        raise LayerwiseError(
            f"{kind}'s setting {key!r} is a {type(value).__name__}: a checkpoint holds numbers and text"
        )
    return value


def _as_json(value: Tensor | bool | float | None) -> JSON:
    """Numbers as text, exact: JSON has no nan and no inf."""
    if isinstance(value, Tensor):
        number = value.item() if value.is_floating_point() else int(value.item())
        return {"dtype": dtype_name(value.dtype), "value": repr(number), "on_cpu": value.device.type == "cpu"}
    return value


def _from_json(value: JSON, device: torch.device, on_device: bool) -> object:
    if not isinstance(value, Mapping):
        return value
    dtype = DTYPE_OF[str(value["dtype"])]
    number = float(str(value["value"])) if dtype.is_floating_point else int(str(value["value"]))
    return torch.tensor(number, dtype=dtype, device="cpu" if value["on_cpu"] and not on_device else device)
