"""A model's arguments, by the names of its signature, and the structure of its outputs."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from inspect import Parameter, Signature
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from layerwise.errors import LayerwiseError

Call = tuple[tuple[Any, ...], dict[str, Any]]  # arguments by position, and by name

_ANY = Signature([Parameter("inputs", Parameter.VAR_POSITIONAL), Parameter("named", Parameter.VAR_KEYWORD)])


def call_of(model: object, example_inputs: object) -> Call:
    """The call of a model with example inputs: a tensor, a tuple or a mapping.

    A mapping is arguments by name if the model accepts it as such, else one argument.
    """
    if isinstance(example_inputs, Mapping):
        signature = signature_of(model)
        named = {str(name): value for name, value in example_inputs.items()}
        try:
            signature.bind(**named)
        except TypeError as error:
            some = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)  # these need no argument
            one = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in some]
            if len(one) == 1 and one[0].name not in named and one[0].kind is not Parameter.KEYWORD_ONLY:
                return (dict(example_inputs),), {}
            raise LayerwiseError(
                f"example_inputs are named {', '.join(named)}, but {type(model).__name__} takes {signature}: {error}"
            ) from None
        return (), named
    return (tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)), {}


def signature_of(model: object) -> Signature:
    """The signature of the model's forward; one that accepts anything, if Python does not tell."""
    if not isinstance(model, nn.Module):
        return _ANY
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return _ANY
    plain = [  # without what cannot be sent to another process
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty or _plain(p.default) else ...)
        for p in signature.parameters.values()
    ]
    return Signature(plain)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a call, by its name in the graph, with its shape and type; or any other value, without a name."""

    name: str | None
    value: object


@dataclass(frozen=True, slots=True)
class Arguments:
    """How the model was called when it was traced, with leaves in place of tensors, and how later calls must look."""

    signature: Signature
    example: Call
    samples: int  # in the example
    leaves: Mapping[str, Leaf] = field(init=False)  # by path: `labels`, `batch['x']`

    def __post_init__(self) -> None:
        found = self.named(*self.example)
        leaves = {path: leaf if isinstance(leaf, Leaf) else Leaf(None, leaf) for path, leaf in found.items()}
        object.__setattr__(self, "leaves", leaves)

    @staticmethod
    def of(model: nn.Module, exported: ExportedProgram, samples: int) -> Arguments:
        """The arguments that a module was exported with."""
        nodes = {node.name: node for node in exported.graph.nodes if node.op == "placeholder"}
        leaves = []
        for spec in exported.graph_signature.input_specs:
            if spec.kind is InputKind.USER_INPUT and isinstance(spec.arg, ConstantArgument):
                leaves.append(Leaf(None, spec.arg.value))
            elif spec.kind is InputKind.USER_INPUT:
                value = nodes[spec.arg.name].meta["val"]
                leaves.append(Leaf(spec.arg.name, (tuple(value.shape), value.dtype)))
        positional, named = pytree.tree_unflatten(leaves, exported.call_spec.in_spec)
        return Arguments(signature_of(model), (positional, named), samples)

    @staticmethod
    def of_inputs(names: Iterable[str]) -> Arguments:
        """The arguments of a network without code: tensors by position."""
        return Arguments(_ANY, (tuple(Leaf(name, None) for name in names), {}), 0)

    def bound(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a call's arguments by name, in the signature's order, without those that are left at their default.

        Raises LayerwiseError if the model does not take them.
        """
        try:
            bound = self.signature.bind(*inputs, **named).arguments
        except TypeError as error:
            raise LayerwiseError(f"the model's arguments must be {self.signature}: {error}") from None
        known, given = self.signature.parameters, dict[str, Any]()
        for name, value in bound.items():
            if known[name].kind is Parameter.VAR_KEYWORD:
                given |= value
            elif not _is_default(known[name], value):
                given[name] = value
        return given

    def named(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """A call's arguments by path, without those that are left at their default."""
        return {
            f"{getattr(path[0], 'key', '')}{pytree.keystr(path[1:])}": leaf
            for path, leaf in pytree.tree_flatten_with_path(self.bound(inputs, named), is_leaf=_is_empty)[0]
        }

    def takes(self, name: str) -> bool:
        """True if the model itself has an argument of this name."""
        return name in self.signature.parameters

    def tensors(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a call, by their names in the graph.

        Raises LayerwiseError if it has other arguments than the example, or another number, text or None among them.
        """
        given = self.named(inputs, named)
        self.check(
            given, (*self.leaves, *given), batch=len(inputs) == 1 and isinstance(inputs[0], Mapping) and not named
        )
        return {leaf.name: given[path] for path, leaf in self.leaves.items() if leaf.name is not None}

    def check(self, given: Mapping[str, Any], paths: Iterable[str], *, batch: bool = False) -> None:
        """Raises LayerwiseError if a path is missing on one side, or differs from the example in a number, text or
        None.

        batch: the call has one mapping, perhaps in place of its items.
        """
        for path in paths:
            if path not in given or path not in self.leaves:
                what = "missing" if path not in given else "not among them"
                calls = "the inputs that you call it with, or, for inference, with a function that calls it"
                remedy = "call it with names, model(**batch)" if batch else f"parallelize it with {calls}"
                raise LayerwiseError(
                    f"the model was made parallel for inputs {', '.join(self.leaves)}; {path!r} is {what}: {remedy}"
                )
            leaf, value = self.leaves[path], given[path]
            if leaf.name is None and not _equal(value, leaf.value):
                said = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise LayerwiseError(
                    f"the model is called with {said}, but was made parallel for {leaf.value!r} ({path!r}): "
                    "parallelize it with this among its example inputs"
                )

    def call(self, tensors: Mapping[str, Tensor], samples: int) -> Call:
        """The example's call with these tensors; those that the network does not use are created."""

        def tensor(leaf: Leaf) -> object:
            if leaf.name is None or leaf.name in tensors:
                return leaf.value if leaf.name is None else tensors[leaf.name]
            shape, dtype = cast("tuple[tuple[int, ...], torch.dtype]", leaf.value)
            return torch.zeros((samples, *shape[1:]) if shape[:1] == (self.samples,) else shape, dtype=dtype)

        made: Call = pytree.tree_map_only(Leaf, tensor, self.example)
        return made


def _is_default(parameter: Parameter, value: object) -> bool:
    if isinstance(value, Leaf) and value.name is None:
        value = value.value
    return _plain(value) and _equal(value, parameter.default)


def _is_empty(value: object) -> bool:
    """True for an empty list or dict, which the model may write into."""
    return isinstance(value, list | dict | tuple) and not value


def _equal(a: Any, b: Any) -> bool:
    """True if two numbers, texts or None are the same: True is not 1, and nan is nan."""
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True, slots=True)
class OutputStructure:
    """The structure of the outputs, and of each leaf the number of its tensor (None: it is none) and its value."""

    tree: pytree.TreeSpec
    numbers: tuple[int | None, ...]
    values: tuple[object, ...]

    def of(self, outputs: Sequence[Tensor]) -> object:
        """Returns these outputs in the model's own structure."""
        pairs = zip(self.numbers, self.values, strict=True)
        return pytree.tree_unflatten([value if i is None else outputs[i] for i, value in pairs], self.tree)


def structure_of(exported: ExportedProgram, count: int) -> OutputStructure | None:
    """The structure of the outputs; None if they are not the graph's `count` (one is returned twice, or stored)."""
    tree = exported.call_spec.out_spec
    names: dict[str, int] = {}
    numbers: list[int | None] = []
    values: list[object] = []
    for spec in exported.graph_signature.output_specs:
        if spec.kind not in (OutputKind.USER_OUTPUT, OutputKind.LOSS_OUTPUT):
            continue
        tensor = isinstance(spec.arg, TensorArgument)
        numbers.append(names.setdefault(spec.arg.name, len(names)) if tensor else None)
        values.append(spec.arg.value if isinstance(spec.arg, ConstantArgument) else None)
    fits = len(names) == count and tree is not None and tree.num_leaves == len(numbers)
    return OutputStructure(tree, tuple(numbers), tuple(values)) if fits else None


def tensors(returned: object) -> tuple[Tensor, ...]:
    """The tensors in a model's return value, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor))
