"""Decompositions: a call that no table knows, written out in others that the tables know, as PyTorch itself has it.

The results are eager's to rounding, not bit by bit: where a plan runs the model itself (one device, samples only), it
runs it as it is written. https://pytorch.org/docs/stable/torch.compiler_ir.html
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from layerwise.importers.registry import canonical
from layerwise.importers.torch.calls.constants import constant_names
from layerwise.importers.torch.calls.whole import why_not, without_underscore
from layerwise.importers.torch.ops.free import FREE
from layerwise.importers.torch.ops.table import CHECKS, OWN, SHAPED_ONLY, base_name, row
from layerwise.importers.torch.program import TRACING, Node, Program, Ref, Value, bind

MOST_NODES = 64  # that one call becomes


def decomposed(program: Program) -> Program:
    """The same program; calls that no table knows are written out where all that they become is known."""
    unknown = {node.name for node in program.nodes if not _known(node.target, node.overload)}
    if not unknown:
        return program
    constant = constant_names(program)
    values = {v.name: v for node in program.nodes for v in node.outputs if v}
    values |= {source.value.name: source.value for source in program.sources}
    nodes: list[Node] = []
    for node in program.nodes:
        made = {v.name for v in node.outputs if v}
        plain = node.name not in unknown or made <= constant or why_not(node, from_file=program.from_file) is not None
        written = None if plain else _written_out(node, values)
        nodes += [node] if written is None else written
    return replace(program, nodes=tuple(nodes))


def _known(target: str, overload: torch._ops.OpOverload | None) -> bool:
    """Whether a call becomes layers that can be split."""
    name = base_name(target)
    if target in OWN or row(target) is not None or target.partition("::")[2].startswith(CHECKS):
        return True
    if not target.startswith("aten::"):
        return False
    return name in FREE or (overload is not None and torch.Tag.pointwise in overload.tags)


@cache
def _table() -> Mapping[torch._ops.OpOverload, Callable[..., Any]]:
    """PyTorch's decompositions of what no table here knows."""
    from torch._decomp import core_aten_decompositions

    found = dict(core_aten_decompositions())
    return {o: d for o, d in found.items() if not _known(canonical(str(o)), o)}


def _written_out(node: Node, values: Mapping[str, Value]) -> list[Node] | None:
    """The calls that one becomes, the last of which has its outputs; None where some of them are not known."""
    traced = _trace(node, values)
    if traced is None or len(traced.nodes) > MOST_NODES:
        return None
    operands = iter(dict.fromkeys(node.operands))
    held: dict[fx.Node, object] = {}
    nodes: list[Node] = []
    for one in traced.nodes:
        if one.op == "placeholder":
            held[one] = next(operands)
        elif one.op == "output":
            return _ended(node, nodes, _bound(one.args[0], held))
        elif one.target is operator.getitem:
            held[one] = _bound(one.args[0], held)[one.args[1]]
        else:
            made = _node(f"{node.name}.{one.name}", one, node, held)
            if made is None:
                return None
            nodes.append(made)
            refs = tuple(Ref(v.name) for v in made.outputs if v)
            held[one] = refs if isinstance(one.meta["val"], (list, tuple)) else refs[0]
    return None


def _node(name: str, one: fx.Node, node: Node, held: Mapping[fx.Node, object]) -> Node | None:
    """A call of the trace; None where it is not known, or gives something else than tensors."""
    val = one.meta.get("val")
    tensors = [t for t in (val if isinstance(val, (list, tuple)) else [val]) if isinstance(t, torch.Tensor)]
    if len(tensors) != (len(val) if isinstance(val, (list, tuple)) else 1) or not all(t.numel() for t in tensors):
        return None
    overload = one.target if isinstance(one.target, torch._ops.OpOverload) else None
    if overload is not None and overload._schema.is_mutable:
        overload = without_underscore(overload) if _overwrites_its_own(one) else None
    if overload is None or overload._schema.is_mutable:
        return None
    target = canonical(str(overload))
    random = torch.Tag.nondeterministic_seeded in overload.tags
    if random or not (_known(target, overload) or base_name(target) in SHAPED_ONLY):
        return None
    arguments = bind(overload, _bound(one.args, held), _bound(dict(one.kwargs), held))
    names = [name] if val is tensors[0] else [f"{name}[{i}]" for i in range(len(tensors))]
    outputs = tuple(
        Value(called, tuple(int(s) for s in t.shape), str(t.dtype).removeprefix("torch."))
        for called, t in zip(names, tensors, strict=True)
    )
    return Node(name, target, arguments, outputs, node.stack, overload, node.autocast)


def _overwrites_its_own(one: fx.Node) -> bool:
    """Whether a call in place overwrites what nobody else sees: a tensor of its own memory, made for this call."""
    source = one.args[0]
    while isinstance(source, fx.Node) and source.target is operator.getitem and len(source.users) == 1:
        source = source.args[0]
        if isinstance(source, fx.Node) and any(user.target is not operator.getitem for user in source.users):
            return False
    if not isinstance(source, fx.Node) or not isinstance(source.target, torch._ops.OpOverload):
        return False
    alone = len(source.users) == 1 or source is not one.args[0]
    return alone and not any(r.alias_info and not r.alias_info.is_write for r in source.target._schema.returns)


def _ended(node: Node, nodes: list[Node], returned: object) -> list[Node] | None:
    """The calls, with the names that the rest of the program knows the results by."""
    results = returned if isinstance(returned, tuple) else (returned,)
    named: dict[str, Value] = {}
    for value, result in zip(node.outputs, results, strict=True):
        if value is None:
            continue
        made = {v.name for n in nodes for v in n.outputs if v}
        if not isinstance(result, Ref) or result.name in named or result.name not in made:
            return None  # an operand as it is, or one result twice
        named[result.name] = value
    names = {made: Ref(value.name) for made, value in named.items()}
    return [
        replace(
            one,
            arguments={key: _renamed(argument, names) for key, argument in one.arguments.items()},
            outputs=tuple(named.get(v.name, v) if v else None for v in one.outputs),
        )
        for one in nodes
    ]


def _trace(node: Node, values: Mapping[str, Value]) -> fx.Graph | None:
    """What a call becomes of tensors that have no values; None where PyTorch has no other way to write it."""
    refs = list(dict.fromkeys(node.operands))
    overload = node.overload
    assert overload is not None

    def call(*tensors: torch.Tensor) -> object:
        given = dict(zip(refs, tensors, strict=True))
        return overload(**{key: _real(value, given) for key, value in node.arguments.items()})

    try:
        with TRACING, FakeTensorMode():
            examples = [torch.empty(values[r.name].shape, dtype=getattr(torch, values[r.name].dtype)) for r in refs]
            traced = make_fx(call, decomposition_table=dict(_table()))(*examples)
    except Exception:  # whatever it is: the call stays as it is
        return None
    traced.graph.eliminate_dead_code()
    return traced.graph


def _real(value: object, given: Mapping[Ref, torch.Tensor]) -> object:
    if isinstance(value, Ref):
        return given[value]
    if isinstance(value, tuple):
        return [_real(v, given) for v in value]
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _bound(value: object, held: Mapping[fx.Node, object]) -> Any:
    """Arguments as a Program has them."""
    if isinstance(value, fx.Node):
        return held[value]
    if isinstance(value, (list, tuple)):
        return tuple(_bound(v, held) for v in value)
    if isinstance(value, dict):
        return {key: _bound(v, held) for key, v in value.items()}
    return value


def _renamed(value: object, names: Mapping[str, Ref]) -> object:
    if isinstance(value, Ref):
        return names.get(value.name, value)
    if isinstance(value, tuple):
        return tuple(_renamed(v, names) for v in value)
    return value
