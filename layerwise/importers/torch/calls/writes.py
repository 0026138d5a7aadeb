"""What is written into a part of a tensor, such as `shifted[:, 1:] = ids[:, :-1]`: a tensor of its own from then on."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace

import torch

from layerwise.errors import LayerwiseError
from layerwise.importers.torch.calls.constants import constant_names
from layerwise.importers.torch.calls.memory import Memory, overwritten, shared
from layerwise.importers.torch.ops.table import base_name
from layerwise.importers.torch.ops.views import WRITTEN
from layerwise.importers.torch.program import Node, Program, Ref, Source, Value, bind, module_path

COUNTER = "num_batches_tracked"
RETYPED = ("view", "view_as_real", "view_as_complex", "real", "imag")  # views of another type


def separate_writes(program: Program) -> Program:
    """The same program without writes through views, where nothing else that shows the memory is used afterwards."""
    constant = constant_names(program)
    shapes = {v.name: v for node in program.nodes for v in node.outputs if v}
    shapes |= {source.value.name: source.value for source in program.sources}
    made: dict[str, Node] = {}
    last = {r.name: i for i, node in enumerate(program.nodes) for r in node.operands}
    last |= {ref.name: len(program.nodes) for ref in program.outputs}
    views: dict[str, set[str]] = defaultdict(set)  # of each tensor, all that show its memory
    shown: dict[str, str] = {}  # views -> the tensor whose memory they show
    now: dict[str, str] = {}  # what was written into -> what it is from then on
    nodes: list[Node] = []
    for place, before in enumerate(program.nodes):
        node = replace(before, arguments={k: _renamed(v, now) for k, v in before.arguments.items()})
        made |= {v.name: node for v in node.outputs if v}
        for view, seen in shared(node):
            # Of another type `to` has made a copy.
            if shapes[view].dtype == shapes[seen].dtype or base_name(node.target) in RETYPED:
                views[seen].add(view)
                shown[view] = seen
        part = _part(node, made, shapes)
        if part is not None:
            base, dim, start, stop = part
            source = node.arguments.get("value" if base_name(node.target) == "fill" else "src", 0)  # zero_ has none
            fixed = base in constant and not (isinstance(source, Ref) and source.name not in constant)
            others = _showing(_whole(base, shown), views) - {base}
            if not fixed and not any(last.get(other, -1) > place for other in others):
                shape = tuple(stop - start if i == dim else e for i, e in enumerate(shapes[base].shape))
                value = Value(f"{node.name}.written", shapes[base].shape, shapes[base].dtype)
                filled = None if isinstance(source, Ref) else _full(node, shape, value.dtype, source)
                src = source if filled is None else Ref(filled.name)
                bound = {"self": Ref(base), "src": src, "dim": dim, "start": start, "stop": stop}
                made_here = Node(value.name, WRITTEN, bound, (value,), node.stack)
                nodes += [made_here] if filled is None else [filled, made_here]
                shapes[value.name], made[value.name], now[base] = value, made_here, value.name
                last[value.name] = last.get(base, -1)
                continue
        nodes.append(node)
    outputs = tuple(Ref(_last(ref.name, now)) for ref in program.outputs)
    return replace(program, nodes=tuple(nodes), outputs=outputs)


def check_written(node: Node, memory: Memory, sources: Mapping[str, Source]) -> None:
    """LayerwiseError where a call writes into a buffer or parameter of the model: what it keeps would be lost.

    But for the counters of batch norms: they are counted where layerwise trains (see `layerwise.run.state.state`).
    """
    for name in (node.operands[0].name,) if node.target == WRITTEN else overwritten(node):
        base = memory.base.get(name, name)
        source = sources.get(memory.base.get(base, base))
        if source is None or source.kind == "input" or source.target.startswith("lifted_tensor"):
            continue
        path = module_path(node.stack)
        where = f"layer {path!r}" if path else "the model"
        if source.kind == "parameter":
            if node.outputs and node.outputs[0] and node.outputs[0].dtype != source.value.dtype:
                continue  # of another type `to` has made a copy
            raise LayerwiseError(
                f"{where} writes into its parameter {source.target!r} in the forward pass, which layerwise would lose: "
                "update it outside of the model"
            )
        if not source.target.endswith(COUNTER):
            raise LayerwiseError(
                f"{where} writes into its buffer {source.target!r} in the forward pass (averages, counters, ...), "
                "which layerwise would lose; only the running statistics of batch and instance norm are kept, and the "
                "vectors of PyTorch's spectral norms: update it outside of the model"
            )


def _part(node: Node, made: dict[str, Node], shapes: dict[str, Value]) -> tuple[str, int, int, int] | None:
    """What a call writes into: the tensor and a range of one of its dimensions. None where it does not, or into all."""
    if node.target.partition("::")[2].partition(".")[0] not in ("copy_", "fill_", "zero_"):
        return None
    written = node.arguments["self"]
    view = made.get(written.name) if isinstance(written, Ref) else None
    part: tuple[str, int, int, int] | None = None
    while view is not None and view.target.startswith(("aten::slice.", "aten::select.")):
        base = view.arguments["self"]
        dim = view.arguments["dim"]
        assert isinstance(base, Ref)
        assert isinstance(dim, int)
        shape = shapes[base.name].shape
        dim %= len(shape)
        if view.target.startswith("aten::select."):
            index = view.arguments["index"]
            assert isinstance(index, int)
            start, stop = index % shape[dim], index % shape[dim] + 1
        else:
            ends = [view.arguments[name] for name in ("start", "end")]
            start, stop, _ = slice(*(e if isinstance(e, int) else None for e in ends)).indices(shape[dim])
            if view.arguments["step"] != 1:
                return None
        if (start, stop) != (0, shape[dim]):
            if part is not None:
                return None
            part = base.name, dim, start, stop
        elif part is not None:
            part = base.name, *part[1:]
        view = made.get(base.name)
    return part


def _whole(name: str, shown: dict[str, str]) -> str:
    """The tensor whose memory a view of a view of it shows."""
    while shown.get(name, name) != name:
        name = shown[name]
    return name


def _showing(base: str, views: dict[str, set[str]]) -> set[str]:
    showing, left = {base}, [base]
    while left:
        for view in views[left.pop()] - showing:
            showing.add(view)
            left.append(view)
    return showing


def _full(node: Node, shape: tuple[int, ...], dtype: str, number: object) -> Node:
    name = f"{node.name}.value"
    overload = torch.ops.aten.full.default
    bound = bind(overload, (shape, number), {"dtype": getattr(torch, dtype)})
    return Node(name, "aten::full", bound, (Value(name, shape, dtype),), node.stack, overload)


def _renamed(value: object, now: dict[str, str]) -> object:
    if isinstance(value, Ref):
        return Ref(_last(value.name, now))
    if isinstance(value, tuple):
        return tuple(_renamed(v, now) for v in value)
    return value


def _last(name: str, now: dict[str, str]) -> str:
    while name in now:
        name = now[name]
    return name
