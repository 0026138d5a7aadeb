"""Reads torch.export's result, or an fx graph, as a TracedProgram."""

from __future__ import annotations

import operator

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from layerwise.errors import LayerwiseError
from layerwise.importers.registry import canonical
from layerwise.importers.torch.traced_program import (
    REGIONS,
    Node,
    Ref,
    Source,
    Stack,
    TracedProgram,
    Value,
    bind,
    leave_region,
    module_path,
    where,
)
from layerwise.tensorfile import dtype_name


def read_program(exported: ExportedProgram) -> TracedProgram:
    """The TracedProgram of an ExportedProgram."""
    signature, graph = exported.graph_signature, exported.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    reader = FxReader(exported.graph_module)
    sources: list[Source] = []
    shared: dict[int, Ref] = {}  # tensors with several names in the model
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        if isinstance(spec.arg, ConstantArgument):
            reader.values[node] = spec.arg.value
            continue
        if isinstance(exported.constants.get(spec.target or ""), torch.Generator):
            raise LayerwiseError(
                "the forward pass draws from a torch.Generator, whose numbers would differ between ranks: leave "
                "generator= out, and seed with torch.manual_seed"
            )
        if not isinstance(spec.arg, TensorArgument):
            raise LayerwiseError(f"input {node.name!r} is a {type(spec.arg).__name__}, not a tensor")
        target = spec.target or node.name
        tensor = _stored(exported, target) if spec.kind is not InputKind.USER_INPUT else None
        if tensor is not None and id(tensor) in shared:
            reader.values[node] = shared[id(tensor)]
            continue
        kind = {InputKind.USER_INPUT: "input", InputKind.PARAMETER: "parameter"}.get(spec.kind, "buffer")
        value = Value(node.name, _shape(node.meta["val"], node.name, kind), dtype_name(node.meta["val"].dtype))
        sources.append(Source(kind, value, target, lambda tensor=tensor: tensor))  # type: ignore[misc]
        reader.values[node] = Ref(node.name)
        if tensor is not None:
            shared[id(tensor)] = Ref(node.name)
    returned = reader.read(graph)
    users = [i for i, spec in enumerate(signature.output_specs) if spec.kind in _RETURNED]
    outputs = tuple(ref for i in users if isinstance(ref := returned[i], Ref))
    values = (node.meta["val"] for node in placeholders.values())
    device = next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")
    return TracedProgram(tuple(sources), tuple(reader.nodes), outputs, device)


_RETURNED = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)


class FxReader:
    """Walks an fx graph and the graphs of its regions."""

    def __init__(self, module: torch.nn.Module, prefix: str = "") -> None:
        self.module = module
        self.prefix = prefix
        self.values: dict[fx.Node, object] = {}
        self.nodes: list[Node] = []

    def read(self, graph: fx.Graph) -> tuple[object, ...]:
        """Appends the calls of `graph`; returns the graph's result."""
        for node in graph.nodes:
            if node.op == "call_function":
                self.call(node)
            elif node.op == "get_attr":
                self.values[node] = self.module.get_submodule(str(node.target))
            elif node.op == "output":
                returned = self.argument(node.args[0])
                return returned if isinstance(returned, tuple) else (returned,)
        raise AssertionError("an fx graph ends with its output")

    def call(self, node: fx.Node) -> None:
        target, val = node.target, node.meta.get("val")
        if target is operator.getitem:
            source, index = self.argument(node.args[0]), node.args[1]
            assert isinstance(source, tuple)
            assert isinstance(index, int)
            self.values[node] = source[index]
        elif isinstance(target, torch._ops.HigherOrderOperator):
            self.values[node] = self.region(node, str(target.name()))  # type: ignore[no-untyped-call]
        elif isinstance(val, (torch.SymInt, torch.SymFloat, torch.SymBool, int, float)):
            self.values[node] = _number(val, _place(node))
        elif isinstance(target, torch._ops.OpOverload):
            outputs = tuple(
                Value(name, _shape(v, _place(node)), dtype_name(v.dtype)) if isinstance(v, torch.Tensor) else None
                for name, v in _named(self.prefix + node.name, val)
            )
            bound = bind(target, self.argument(node.args), self.argument(dict(node.kwargs)))
            call = Node(self.prefix + node.name, canonical(str(target)), bound, outputs, stack_of(node), target)
            self.nodes.append(call)
            refs = tuple(Ref(v.name) if v else None for v in outputs)
            self.values[node] = refs if isinstance(val, (list, tuple)) else refs[0]
        else:
            raise LayerwiseError(f"{node.name!r} calls {target}, which is not a torch operator: export the model first")

    def region(self, node: fx.Node, name: str) -> tuple[object, ...]:
        """Inlines a graph that is an argument."""
        arguments = self.argument(node.args)
        assert isinstance(arguments, tuple)
        place = next((i for i, a in enumerate(arguments) if isinstance(a, fx.GraphModule)), None)
        if name not in REGIONS or place is None:
            raise LayerwiseError(
                f"{where(stack_of(node))} has control flow ({name}) that depends on data, but layerwise plans fixed "
                "graphs only: use torch.where, or move it out of the model"
            )
        body = arguments[place]
        inner = FxReader(body, f"{self.prefix}{node.name}.")
        inner.nodes = self.nodes
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        inner.values.update(zip(inputs, arguments[place + 1 + REGIONS[name] :], strict=True))
        before = len(self.nodes)
        return leave_region(name, self.nodes, before, arguments, inner.read(body.graph))

    def argument(self, value: object) -> object:
        if isinstance(value, fx.Node):
            return self.values[value]
        if isinstance(value, (list, tuple)):
            return tuple(self.argument(v) for v in value)
        if isinstance(value, dict):
            return {k: self.argument(v) for k, v in value.items()}
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return _number(value, "argument")
        return value


def stack_of(node: fx.Node) -> Stack:
    """The modules around a node, outermost first."""
    stack = []
    for key, (path, kind) in (node.meta.get("nn_module_stack") or {}).items():
        name = kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"
        # Strict export writes L['self'].features.0.
        stack.append((key, path.removeprefix("L['self']").removeprefix("."), name))
    return tuple(stack)


def _place(node: fx.Node) -> str:
    return f"layer {(module_path(stack_of(node)) or node.name)!r}"


def _named(name: str, val: object) -> list[tuple[str, object]]:
    if isinstance(val, (list, tuple)):
        return [(f"{name}[{i}]", v) for i, v in enumerate(val)]
    return [(name, val)]


def _stored(exported: ExportedProgram, target: str) -> torch.Tensor | None:
    tensor = exported.state_dict.get(target, exported.constants.get(target))
    return getattr(tensor, "layerwise_value", tensor) if isinstance(tensor, torch.Tensor) else None


def _shape(tensor: torch.Tensor, name: str, kind: str = "") -> tuple[int, ...]:
    for dim, size in enumerate(tensor.shape):
        if kind == "input" and isinstance(size, torch.SymInt) and (dim > 0 or not size.node.expr.is_symbol):
            raise LayerwiseError(
                f"input {name!r}: dimension {dim} is left open ({size}), but only the batch, dimension 0, may be: "
                "export the model with a fixed size for it"
            )
    return tuple(int(_number(size, name)) for size in tensor.shape)


def _number(value: object, name: str) -> int | float | bool:
    """The size that the example inputs give a symbolic number."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if not value.node.has_hint():
            raise LayerwiseError(f"{name}: size {value} depends on data, but layerwise needs fixed sizes")
        value = value.node.hint
    assert isinstance(value, (int, float))
    return value
