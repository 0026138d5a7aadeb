"""Program: what the PyTorch importer reads, whether it comes from torch.export or from a .pt2 file.

A list of operator calls in order, arguments bound by schema name, every size a number, control regions that compute
nothing by themselves (`torch.no_grad()`, autocast) inlined.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock
from typing import TypeVar

import torch
from torch import fx
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument

from layerwise.errors import LayerwiseError
from layerwise.graph.types import Region, Regions
from layerwise.importers.registry import canonical

T = TypeVar("T")
TRACING = Lock()  # torch.export and its like keep modes, log and stderr for the process, not for a thread
Stack = tuple[tuple[str, str, str], ...]  # (key, path, class) of the modules around a call, outermost first

# Regions that run their graph as it stands, and how many arguments stand between the graph and its operands.
# https://github.com/pytorch/pytorch/tree/main/torch/_higher_order_ops
REGIONS = {"wrap_with_set_grad_enabled": 0, "wrap_with_autocast": 0, "tag_activation_checkpoint": 0}
NO_GRADIENT = "wrap_with_set_grad_enabled"
AUTOCAST = "wrap_with_autocast"  # (device type, element type, enabled, cache enabled, ...)


@dataclass(frozen=True, slots=True)
class Ref:
    """A tensor by its name in the program."""

    name: str


@dataclass(frozen=True, slots=True)
class Value:
    """A tensor of the program."""

    name: str
    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class Source:
    """A tensor that the program starts from; `target` is the model's name of it."""

    kind: str  # "input", "parameter", "buffer" (constants are buffers)
    value: Value
    target: str
    read: Callable[[], torch.Tensor | None] = field(default=lambda: None, compare=False, repr=False)


@dataclass(frozen=True, slots=True)
class Node:
    """One call of an operator. Arguments: Ref, numbers, strings, torch's dtypes and devices, None, tuples of these."""

    name: str
    target: str
    arguments: Mapping[str, object]
    outputs: tuple[Value | None, ...]
    stack: Stack = ()
    overload: torch._ops.OpOverload | None = None
    autocast: Regions = ()  # around it

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The tensors among its arguments, also those in lists."""
        return tuple(refs(tuple(self.arguments.values())))


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """Sources, calls in order, and what the model returns."""

    name: str
    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    device: str = "cpu"  # the type of the one that it was traced on
    from_file: bool = False  # so whoever wrote that has chosen the operators

    @property
    def values(self) -> dict[str, Value]:
        """All tensors by name."""
        made = {v.name: v for node in self.nodes for v in node.outputs if v}
        return made | {source.value.name: source.value for source in self.sources}

    @property
    def makers(self) -> dict[str, Node]:
        """The call that makes each tensor."""
        return {v.name: node for node in self.nodes for v in node.outputs if v}

    @property
    def used(self) -> list[str]:
        """The tensors that calls and outputs take, once a use."""
        return [ref.name for node in self.nodes for ref in node.operands] + [ref.name for ref in self.outputs]


def refs(value: object) -> Iterator[Ref]:
    """The tensors among (nested) arguments."""
    if isinstance(value, Ref):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from refs(item)


def maker(value: object, makers: Mapping[str, Node]) -> Node | None:
    """The call that makes a value, if it is a tensor that a call makes."""
    return makers.get(value.name) if isinstance(value, Ref) else None


def behind(values: Iterable[object], makers: Mapping[str, Node], ends: Collection[str]) -> dict[str, Node]:
    """The calls that values are made of, by name, as far as these tensors."""
    found: dict[str, Node] = {}
    left = list(values)
    while left:
        value = left.pop()
        node = None if isinstance(value, Ref) and value.name in ends else maker(value, makers)
        if node is not None and node.name not in found:
            found[node.name] = node
            left += node.operands
    return found


def called(node: Node, tensor: Callable[[Ref], torch.Tensor], device: str) -> object:
    """What a call returns of these tensors, on a device."""
    assert node.overload is not None

    def real(value: object) -> object:
        if isinstance(value, Ref):
            return tensor(value).clone() if written else tensor(value)
        if isinstance(value, tuple):
            return [real(v) for v in value]
        return torch.device(device) if isinstance(value, torch.device) else value

    written = node.overload._schema.is_mutable
    given = {name: real(value) for name, value in node.arguments.items()}
    return node.overload(**given | ({"device": torch.device(device)} if "device" in given else {}))


def read_program(exported: ExportedProgram, name: str) -> TracedProgram:
    """The program of an exported one."""
    signature, graph = exported.graph_signature, exported.graph
    placeholders = {node.name: node for node in graph.nodes if node.op == "placeholder"}
    reader = FxReader(exported.graph_module)
    sources: list[Source] = []
    shared: dict[int, Ref] = {}  # tensors that have several names in the model
    for spec in signature.input_specs:
        node = placeholders[spec.arg.name]
        if isinstance(spec.arg, ConstantArgument):
            reader.values[node] = spec.arg.value
            continue
        if not isinstance(spec.arg, TensorArgument):
            raise LayerwiseError(f"input {node.name!r} is no tensor but {type(spec.arg).__name__}")
        target = spec.target or node.name
        tensor = _stored(exported, target) if spec.kind is not InputKind.USER_INPUT else None
        if tensor is not None and id(tensor) in shared:
            reader.values[node] = shared[id(tensor)]
            continue
        kind = {InputKind.USER_INPUT: "input", InputKind.PARAMETER: "parameter"}.get(spec.kind, "buffer")
        value = Value(node.name, _shape(node.meta["val"], node.name, kind), _dtype(node.meta["val"]))
        sources.append(Source(kind, value, target, lambda tensor=tensor: tensor))  # type: ignore[misc]
        reader.values[node] = Ref(node.name)
        if tensor is not None:
            shared[id(tensor)] = Ref(node.name)
    returned = reader.read(graph)
    users = [i for i, spec in enumerate(signature.output_specs) if spec.kind in _RETURNED]
    outputs = tuple(ref for i in users if isinstance(ref := returned[i], Ref))
    values = (node.meta["val"] for node in placeholders.values())
    device = next((value.device.type for value in values if isinstance(value, torch.Tensor)), "cpu")
    return TracedProgram(name, tuple(sources), tuple(reader.nodes), outputs, device)


_RETURNED = (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT)


class FxReader:
    """Walks an fx graph and the graphs of its regions."""

    def __init__(self, module: torch.nn.Module, prefix: str = "") -> None:
        self.module = module
        self.prefix = prefix
        self.values: dict[fx.Node, object] = {}
        self.nodes: list[Node] = []

    def read(self, graph: fx.Graph) -> tuple[object, ...]:
        """Appends the calls of `graph`; returns what it returns."""
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
            self.values[node] = _number(val, f"layer {(module_path(stack_of(node)) or node.name)!r}")
        elif isinstance(target, torch._ops.OpOverload):
            where = f"layer {(module_path(stack_of(node)) or node.name)!r}"
            outputs = tuple(
                Value(name, _shape(v, where), _dtype(v)) if isinstance(v, torch.Tensor) else None
                for name, v in _named(self.prefix + node.name, val)
            )
            bound = bind(target, self.argument(node.args), self.argument(dict(node.kwargs)))
            call = Node(self.prefix + node.name, canonical(str(target)), bound, outputs, stack_of(node), target)
            self.nodes.append(call)
            refs = tuple(Ref(v.name) if v else None for v in outputs)
            self.values[node] = refs if isinstance(val, (list, tuple)) else refs[0]
        else:
            raise LayerwiseError(f"{node.name!r} calls {target}, which is no torch operator; export the model first")

    def region(self, node: fx.Node, name: str) -> tuple[object, ...]:
        """Inlines a graph that is an argument."""
        arguments = self.argument(node.args)
        assert isinstance(arguments, tuple)
        place = next((i for i, a in enumerate(arguments) if isinstance(a, fx.GraphModule)), None)
        if name not in REGIONS or place is None:
            raise control_flow(name, module_path(stack_of(node)))
        body = arguments[place]
        inner = FxReader(body, f"{self.prefix}{node.name}.")
        inner.nodes = self.nodes
        inputs = [n for n in body.graph.nodes if n.op == "placeholder"]
        inner.values.update(zip(inputs, arguments[place + 1 + REGIONS[name] :], strict=True))
        before = len(self.nodes)
        returned = inner.read(body.graph)
        if name == AUTOCAST:
            within(self.nodes, before, arguments)
        if name == NO_GRADIENT and arguments[0] is False:
            return tuple(detached(self.nodes, value) for value in returned)
        return returned

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


def detached(nodes: list[Node], value: T) -> T | Ref:
    """What leaves a region that makes no gradients: appends the call that says so."""
    made = {v.name: v for node in nodes for v in node.outputs if v}
    if not isinstance(value, Ref) or value.name not in made:
        return value
    overload = torch.ops.aten.detach.default
    result = replace(made[value.name], name=f"{value.name}.detached")
    nodes.append(Node(result.name, "aten::detach", {"self": value}, (result,), (), overload))
    return Ref(result.name)


def within(nodes: list[Node], first: int, arguments: Sequence[object]) -> None:
    """Marks the calls from number `first` on, which a region of autocast is around. arguments: those of the region."""
    device, dtype, enabled = arguments[:3]
    region = Region(str(device), _name(dtype) if enabled and isinstance(dtype, torch.dtype) else None)
    nodes[first:] = [replace(node, autocast=(region, *node.autocast)) for node in nodes[first:]]


def bind(overload: torch._ops.OpOverload, args: object, kwargs: object) -> dict[str, object]:
    """Arguments by the names of the schema, defaults filled in."""
    assert isinstance(args, tuple)
    assert isinstance(kwargs, dict)
    bound: dict[str, object] = {}
    for i, argument in enumerate(overload._schema.arguments):
        if i < len(args):
            bound[argument.name] = args[i]
        elif argument.name in kwargs:
            bound[argument.name] = kwargs[argument.name]
        else:
            default = argument.default_value
            bound[argument.name] = tuple(default) if isinstance(default, list) else default
    return bound


def stack_of(node: fx.Node) -> Stack:
    """The modules around a node, outermost first."""
    stack = node.meta.get("nn_module_stack") or {}
    return tuple((key, _plain(path), _class(kind)) for key, (path, kind) in stack.items())


def module_path(stack: Stack) -> str:
    """`layer1.0.conv1`; empty for the model itself."""
    return stack[-1][1] if stack else ""


def where(node: Node) -> str:
    """The module that makes a call, as messages have it."""
    return _module(module_path(node.stack))


def _module(path: str) -> str:
    return f"layer {path!r}" if path else "the model"


def control_flow(name: str, path: str) -> LayerwiseError:
    """The error for a region that depends on data."""
    return LayerwiseError(
        f"{_module(path)} has control flow ({name}) that depends on data; layerwise plans fixed graphs only"
    )


def left_open(name: str, dim: int, size: object) -> LayerwiseError:
    """A size that nobody has fixed."""
    return LayerwiseError(
        f"input {name!r}: dimension {dim} is left open ({size}); only the batch, dimension 0, may be: "
        "export the model with a fixed size for it"
    )


def _plain(path: str) -> str:
    # Strict export writes L['self'].features.0, and submodules that are attributes as slices.
    return path.removeprefix("L['self']").removeprefix(".")


def _class(kind: type | str) -> str:
    return kind if isinstance(kind, str) else f"{kind.__module__}.{kind.__qualname__}"


def _named(name: str, val: object) -> list[tuple[str, object]]:
    if isinstance(val, (list, tuple)):
        return [(f"{name}[{i}]", v) for i, v in enumerate(val)]
    return [(name, val)]


def _stored(exported: ExportedProgram, target: str) -> torch.Tensor | None:
    tensor = exported.state_dict.get(target, exported.constants.get(target))
    return getattr(tensor, "layerwise_value", tensor) if isinstance(tensor, torch.Tensor) else None


def _dtype(tensor: torch.Tensor) -> str:
    return _name(tensor.dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _shape(tensor: torch.Tensor, where: str, kind: str = "") -> tuple[int, ...]:
    for dim, size in enumerate(tensor.shape):
        if kind == "input" and isinstance(size, torch.SymInt) and (dim > 0 or not size.node.expr.is_symbol):
            raise left_open(where, dim, size)
    return tuple(int(_number(size, where)) for size in tensor.shape)


def _number(value: object, where: str) -> int | float | bool:
    """The size that the example inputs gave a symbolic number."""
    if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
        if not value.node.has_hint():
            raise LayerwiseError(f"{where}: size {value} depends on data; layerwise plans fixed sizes")
        value = value.node.hint
    assert isinstance(value, (int, float))
    return value
