"""Calls of operators that no table knows: decomposed as PyTorch does into known ones, or run as they are.

Only such calls are traced again: making a full program functional and decomposing it
(`ExportedProgram.run_decompositions`) takes up to twice the time of the export, and loses detached tensors.
https://pytorch.org/docs/stable/torch.compiler_ir.html. Other calls run in PyTorch, on their full inputs, if that gives
eager PyTorch's result: not if they draw random numbers, write to their operands, or return a tensor whose shape depends
on values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import Argument as Bound
from layerwise.importers.registry import Built, Call, Operand, Result, canonical
from layerwise.importers.torch.calls.constants import constant_names
from layerwise.importers.torch.calls.functional import overwritten
from layerwise.importers.torch.exported import FxReader
from layerwise.importers.torch.ops.free import FREE, free_dims
from layerwise.importers.torch.ops.table import CHECKS, OWN, SHAPED_ONLY, base_name, row
from layerwise.importers.torch.traced_program import TRACING, Node, Ref, TracedProgram, Value, called
from layerwise.ops.opaque import Argument, ElementType, Here, Slot, TorchOp, unlogged
from layerwise.tensor import TensorSpec

MOST_NODES = 64  # that one call may become


def decomposed(program: TracedProgram) -> TracedProgram:
    """Returns the program with unknown calls decomposed, if everything that they become is known."""
    unknown = {node.name for node in program.nodes if not _known(node.target, node.overload)}
    if not unknown:
        return program
    constant = constant_names(program)
    values, nodes = program.values, list[Node]()
    for node in program.nodes:
        made = {v.name for v in node.outputs if v}
        plain = node.name not in unknown or made <= constant or why_not(node) is not None
        written = None if plain or overwritten(node) else _written_out(node, values)
        nodes += [node] if written is None else written
    return replace(program, nodes=tuple(nodes))


def _known(target: str, overload: torch._ops.OpOverload | None) -> bool:
    """True if a call becomes layers that can be split."""
    name = base_name(target)
    if target in OWN or row(target) is not None or target.partition("::")[2].startswith(CHECKS):
        return True
    if not target.startswith("aten::"):
        return False
    return name in FREE or (overload is not None and torch.Tag.pointwise in overload.tags)


@cache
def _table() -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    """PyTorch's decompositions of operators that no table here knows."""
    from torch._decomp import core_aten_decompositions

    found = dict(core_aten_decompositions())
    return {o: d for o, d in found.items() if not _known(canonical(str(o)), o)}


def _written_out(node: Node, values: Mapping[str, Value]) -> list[Node] | None:
    """The calls that one decomposes into, the last of which has its outputs; None if some are unknown."""
    traced = _trace(node, values)
    if traced is None or len(traced.graph.nodes) > MOST_NODES:
        return None
    reader = FxReader(traced, f"{node.name}.")
    inputs = (one for one in traced.graph.nodes if one.op == "placeholder")
    reader.values.update(zip(inputs, dict.fromkeys(node.operands), strict=True))
    try:
        (returned,) = reader.read(traced.graph) if len(node.outputs) == 1 else (reader.read(traced.graph),)
    except LayerwiseError:
        return None
    made = {v.name for one in reader.nodes for v in one.outputs if v}
    if not all(_sound(one, made) for one in reader.nodes):
        return None
    results = returned if isinstance(returned, tuple) else (returned,)
    named = {r.name: v for v, r in zip(node.outputs, results, strict=True) if v and isinstance(r, Ref)}
    if len(named) < sum(v is not None for v in node.outputs) or not named.keys() <= made:
        return None  # an operand unchanged, or one result twice
    return [
        replace(
            one,
            stack=node.stack,
            autocast=node.autocast,
            arguments={key: _renamed(argument, named) for key, argument in one.arguments.items()},
            outputs=tuple(named.get(v.name, v) if v else None for v in one.outputs),
        )
        for one in reader.nodes
    ]


def _sound(one: Node, made: set[str]) -> bool:
    """True if a call is known, draws nothing, returns tensors with elements, and writes only into tensors made here."""
    assert one.overload is not None
    random = torch.Tag.nondeterministic_seeded in one.overload.tags
    known = _known(one.target, one.overload) or base_name(one.target) in SHAPED_ONLY
    full = all(v is not None and 0 not in v.shape for v in one.outputs)
    return known and full and not random and set(overwritten(one)) <= made


def _trace(node: Node, values: Mapping[str, Value]) -> torch.fx.GraphModule | None:
    """Traces a call on tensors without values; returns None if PyTorch has no decomposition."""
    refs = list(dict.fromkeys(node.operands))

    def call(*tensors: torch.Tensor) -> object:
        return called(node, dict(zip(refs, tensors, strict=True)).__getitem__, "cpu")

    try:
        with TRACING, unlogged(), FakeTensorMode():
            examples = [torch.empty(values[r.name].shape, dtype=getattr(torch, values[r.name].dtype)) for r in refs]
            traced = make_fx(call, decomposition_table=dict(_table()))(*examples)
    except Exception:  # whatever it raises: the call stays as it is
        return None
    traced.graph.eliminate_dead_code()
    return traced


def _renamed(value: object, named: Mapping[str, Value]) -> object:
    if isinstance(value, Ref):
        return Ref(named[value.name].name) if value.name in named else value
    return tuple(_renamed(v, named) for v in value) if isinstance(value, tuple) else value


# Operators that read memory beyond their operand's elements, or any memory.
MEMORY = {"as_strided", "as_strided_copy", "as_strided_scatter", "empty_strided", "set", "resize", "resize_as"}


def out_of_place(node: Node) -> torch._ops.OpOverload | None:
    """The overload that a call runs; for an in-place one (`foo_`), that of `foo`. None if there is none."""
    overload, target = node.overload, canonical(str(node.overload)) if node.overload else ""
    if overload is None or not target.startswith("aten::"):
        return overload
    if base_name(target) == target.partition("::")[2].partition(".")[0]:
        return overload
    return getattr(getattr(torch.ops.aten, base_name(target), None), overload._overloadname, None)


def why_not(node: Node) -> str | None:
    """Why a call cannot run as it is; None if it can."""
    overload = out_of_place(node)
    name = base_name(node.target)
    if overload is None:
        return "is unknown"
    if torch.Tag.nondeterministic_seeded in overload.tags:
        return "draws random numbers, which would differ between ranks"
    if overload._schema.is_mutable:
        return "writes to its inputs, which would be lost"
    if name in MEMORY:
        return "depends on its operand's memory layout"
    return None


def torch_call(node: Node, call: Call, used: Callable[[str], bool], shapes: Mapping[str, TensorSpec]) -> Result:
    """The layers of a call that no table knows: one for each output that is used. shapes: of the model's parameters.

    Parameters belong to the layer, which is then not split; if several types or shapes are read, they are inputs.
    """
    overload = out_of_place(node)
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
        target = node.target if overload is node.overload else canonical(str(overload))
        op = TorchOp(target, tuple(arguments), number, held, free)
        made.append(Built(op, tuple(inputs), tuple(trained)))
    return tuple(made) if len(made) > 1 else made[0]


def _held(call: Call, shapes: Mapping[str, TensorSpec]) -> list[Operand]:
    """The parameters of a call that can belong to its layer."""
    own = [p for p in dict.fromkeys(call.tensors) if p.role == "parameter"]
    plain = all(not p.transposed and p.shape == shapes[p.name].shape for p in own)
    alike = len({p.spec.dtype for p in own}) == 1 and len({p.name for p in own}) == len(own)
    return own if plain and alike and any(x.activation for x in call.tensors) else []


def _argument(raw: object, bound: Bound, inputs: list[Operand], held: list[Operand]) -> Argument:
    """An argument for a TorchOp; appends a tensor argument to `inputs`, unless it is one of `held`."""
    match raw:
        case Ref():
            if not isinstance(bound, Operand):
                raise LayerwiseError(f"its operand {raw.name!r} is empty, which is not supported")
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
