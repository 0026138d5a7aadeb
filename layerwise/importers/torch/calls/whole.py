"""Calls of operators that no table knows: run as PyTorch does, on all of their inputs, and not split.

Only where that is what eager PyTorch gives: not for what draws random numbers, writes to its operands, or makes a
tensor whose shape depends on values. Of what a file names, only the public operators of PyTorch itself are run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Argument as Bound
from layerwise.importers.registry import Built, Call, Operand, Result, canonical
from layerwise.importers.torch.ops.free import FREE, free_dims
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.program import Node, Ref
from layerwise.ops.opaque import Argument, ElementType, Here, Slot, TorchOp
from layerwise.tensor import TensorSpec

# What reads memory beside its operand's elements, or whatever memory there is.
MEMORY = {"as_strided", "as_strided_copy", "as_strided_scatter", "empty_strided", "set", "resize", "resize_as"}


def functional(node: Node) -> torch._ops.OpOverload | None:
    """The overload that a call runs; of one in place (`foo_`), that of `foo`. None where there is none."""
    return node.overload if node.overload is None else without_underscore(node.overload)


def without_underscore(overload: torch._ops.OpOverload) -> torch._ops.OpOverload | None:
    """`aten::relu` of `aten::relu_`; an overload that is not in place is itself."""
    target = canonical(str(overload))
    if not target.startswith("aten::") or base_name(target) == target.partition("::")[2].partition(".")[0]:
        return overload
    return getattr(getattr(torch.ops.aten, base_name(target), None), overload._overloadname, None)


def why_not(node: Node, *, from_file: bool) -> str | None:
    """Why a call cannot be run as it is, None where it can."""
    overload = functional(node)
    name = base_name(node.target)
    if overload is None:
        return "is unknown"
    if from_file and (overload.namespace != "aten" or (name.startswith("_") and name not in FREE)):
        return "is unknown, and of what a file names only public operators of PyTorch are run"
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return "draws random numbers, which would differ from rank to rank"
    if overload._schema.is_mutable:
        return "writes to what it is given, which would be lost"
    if name in MEMORY:
        return "depends on how its operand lies in memory"
    return None


def torch_call(node: Node, call: Call, used: Callable[[str], bool], shapes: Mapping[str, TensorSpec]) -> Result:
    """The layer of a call that no table knows; one an output that is used. shapes: of the model's own parameters.

    Parameters live in a layer that is not split; else, or where several types or shapes are read, they are its inputs.
    """
    overload = functional(node)
    assert overload is not None
    pointwise = torch.Tag.pointwise in overload.tags
    several = sum(used(value.name) for value in node.outputs if value) > 1
    made: list[Built | None] = []
    for number, value in enumerate(node.outputs):
        if value is None or not used(value.name):
            made.append(None)
            continue
        free = free_dims(call, value.shape, pointwise=pointwise)
        trained = [] if free or several else _held(call, shapes)
        inputs: list[Operand] = []
        arguments = []
        for argument in overload._schema.arguments:
            raw, bound = node.arguments[argument.name], call.arguments[argument.name]
            default = argument.default_value
            given = raw != (tuple(default) if isinstance(default, list) else default)
            if given or not argument.has_default_value():
                arguments.append((argument.name, _argument(raw, bound, inputs, trained)))
        held = tuple((p.shape, p.spec.dtype) for p in trained)
        target = node.target if overload is node.overload else _target(overload)
        op = TorchOp(target, tuple(arguments), number, held, free)
        made.append(Built(op, tuple(inputs), tuple(trained)))
    return tuple(made) if len(made) > 1 else made[0]


def _held(call: Call, shapes: Mapping[str, TensorSpec]) -> list[Operand]:
    """The parameters of a call that can live in its layer."""
    own = [p for p in dict.fromkeys(call.tensors) if p.role == "parameter"]
    plain = all(not p.transposed and p.shape == shapes[p.name].shape for p in own)
    alike = len({p.spec.dtype for p in own}) == 1 and len({p.name for p in own}) == len(own)
    return own if plain and alike and any(x.activation for x in call.tensors) else []


def _argument(raw: object, bound: Bound, inputs: list[Operand], held: list[Operand]) -> Argument:
    """As a TorchOp has it; appends the tensor that it is to `inputs`, unless it is one of those that are held."""
    match raw:
        case Ref():
            if not isinstance(bound, Operand):
                raise LayerwiseError(f"its operand {raw.name!r} has no elements, which is not supported")
            if bound in held:
                return Slot(held.index(bound), parameter=True)
            inputs.append(bound)
            return Slot(len(inputs) - 1)
        case tuple():
            assert isinstance(bound, tuple)
            return tuple(_argument(r, b, inputs, held) for r, b in zip(raw, bound, strict=True))
        case torch.dtype():
            return ElementType(str(raw).removeprefix("torch."))
        case torch.device():
            return Here()
        case None | bool() | int() | float() | complex() | str():
            return raw
    if raw in (torch.strided, torch.contiguous_format, torch.preserve_format):
        return None
    raise LayerwiseError(f"its argument {raw!r} is not supported")


def _target(overload: torch._ops.OpOverload) -> str:
    name = overload._schema.name
    return f"{name}.{overload._overloadname}" if overload._overloadname != "default" else name
