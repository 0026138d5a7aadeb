"""TracedProgram: what the PyTorch importer reads from an exported program or an fx graph.

It is a list of operator calls in order, with arguments bound by schema name, numbers for all sizes, and regions that do
not compute anything themselves (`torch.no_grad()`, autocast) inlined.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from threading import Lock

import torch

from layerwise.graph.types import Region, Regions
from layerwise.tensorfile import dtype_name

TRACING = Lock()  # torch.export changes modes, log and stderr of the process, not of a thread
Stack = tuple[tuple[str, str, str], ...]  # (key, path, class) of the modules around a call, outermost first

# Regions that only run their graph, and the number of arguments between the graph and its operands.
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
    """A tensor that the program starts from; `target` is the model's name for it."""

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
    autocast: Regions = ()  # the regions around it

    @property
    def operands(self) -> tuple[Ref, ...]:
        """The tensors among its arguments, including those in lists."""
        return tuple(refs(tuple(self.arguments.values())))


@dataclass(frozen=True, slots=True)
class TracedProgram:
    """Sources, calls in order, and the model's outputs."""

    sources: tuple[Source, ...]
    nodes: tuple[Node, ...]
    outputs: tuple[Ref, ...]
    device: str = "cpu"  # the device type that it was traced on
    effects: tuple[str, ...] = ()  # untraced effects, as in `LayerGraph.unseen`

    @property
    def values(self) -> dict[str, Value]:
        """All tensors by name."""
        inputs = {source.value.name: source.value for source in self.sources}
        return inputs | {v.name: v for node in self.nodes for v in node.outputs if v}

    @property
    def makers(self) -> dict[str, Node]:
        """The call that makes each tensor."""
        return {v.name: node for node in self.nodes for v in node.outputs if v}

    @property
    def used(self) -> list[str]:
        """The tensors that calls and outputs use, once for each use."""
        return [ref.name for node in self.nodes for ref in node.operands] + [ref.name for ref in self.outputs]


def samples_in(shapes: Iterable[Sequence[int]]) -> int:
    """The number of samples in inputs of these shapes; a timestep beside them has a single one."""
    first = [shape[0] for shape in shapes if shape]
    return next((extent for extent in first if extent > 1), max(first, default=0))


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
    """The calls that values depend on, by name, back to the tensors `ends`."""
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
    """A call's result on these tensors, on a device."""
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


def leave_region(
    kind: str, nodes: list[Node], first: int, arguments: Sequence[object], returned: Iterable[object]
) -> tuple[object, ...]:
    """The results of a region whose calls begin at `first`: autocast marks the calls, no_grad detaches the results."""
    if kind == AUTOCAST:
        device, dtype, enabled = arguments[:3]
        region = Region(str(device), dtype_name(dtype) if enabled and isinstance(dtype, torch.dtype) else None)
        nodes[first:] = [replace(node, autocast=(region, *node.autocast)) for node in nodes[first:]]
    if kind == NO_GRADIENT and arguments[0] is False:
        return tuple(_detached(nodes, value) for value in returned)
    return tuple(returned)


def _detached(nodes: list[Node], value: object) -> object:
    """Appends a detach call, except for a value that was written into and is itself."""
    writes = (node.overload is not None and node.overload._schema.is_mutable for node in nodes)
    made = {v.name: v for node, written in zip(nodes, writes, strict=True) if not written for v in node.outputs if v}
    if not isinstance(value, Ref) or value.name not in made:
        return value
    overload = torch.ops.aten.detach.default
    result = replace(made[value.name], name=f"{value.name}.detached")
    nodes.append(Node(result.name, "aten::detach", {"self": value}, (result,), (), overload))
    return Ref(result.name)


def bind(overload: torch._ops.OpOverload, args: object, kwargs: object) -> dict[str, object]:
    """Arguments by the names of the schema, with defaults."""
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


def module_path(stack: Stack) -> str:
    """`layer1.0.conv1`; empty for the model itself."""
    return stack[-1][1] if stack else ""


def where(stack: Stack) -> str:
    """The module that makes a call, for messages."""
    path = module_path(stack)
    return f"layer {path!r}" if path else "the model"
