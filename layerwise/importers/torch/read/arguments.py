"""How a model is called, by the names of its signature, and how it returns its outputs."""

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
    """The call of a model that example inputs stand for: a tensor, a tuple, or a mapping.

    A mapping is arguments by name where the model takes them so, else one argument.
    """
    if isinstance(example_inputs, Mapping):
        signature = signature_of(model)
        named = {str(name): value for name, value in example_inputs.items()}
        try:
            signature.bind(**named)
        except TypeError as error:
            some = (Parameter.VAR_POSITIONAL, Parameter.VAR_KEYWORD)  # which need no argument
            one = [p for p in signature.parameters.values() if p.default is p.empty and p.kind not in some]
            if len(one) == 1 and one[0].name not in named and one[0].kind is not Parameter.KEYWORD_ONLY:
                return (dict(example_inputs),), {}
            raise LayerwiseError(
                f"example_inputs are named {', '.join(named)}, and {type(model).__name__} takes {signature}: {error}"
            ) from None
        return (), named
    return (tuple(example_inputs) if isinstance(example_inputs, tuple | list) else (example_inputs,)), {}


def signature_of(model: object) -> Signature:
    """What the model's forward takes; anything, where Python does not tell."""
    if not isinstance(model, nn.Module):
        return _ANY
    try:
        signature = inspect.signature(model.forward)
    except (TypeError, ValueError):
        return _ANY
    plain = [  # without what cannot be written to another process
        p.replace(annotation=p.empty, default=p.default if p.default is p.empty or _plain(p.default) else ...)
        for p in signature.parameters.values()
    ]
    return Signature(plain)


@dataclass(frozen=True, slots=True)
class Leaf:
    """A tensor of a call, by its name in the graph, its shape and element type; or another value, without a name."""

    name: str | None
    value: object


@dataclass(frozen=True, slots=True)
class Arguments:
    """How the model was called when it was traced, with leaves in place of tensors; how it is called ever after."""

    signature: Signature
    example: Call
    samples: int  # of the example
    leaves: Mapping[str, Leaf] = field(init=False)  # by path: `labels`, `batch['x']`

    def __post_init__(self) -> None:
        found = self.named(*self.example)
        leaves = {path: leaf if isinstance(leaf, Leaf) else Leaf(None, leaf) for path, leaf in found.items()}
        object.__setattr__(self, "leaves", leaves)

    @staticmethod
    def of(model: nn.Module, exported: ExportedProgram, samples: int) -> Arguments:
        """Those that a module was exported with."""
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
        """Those of a network that has no code: tensors by position."""
        return Arguments(_ANY, (tuple(Leaf(name, None) for name in names), {}), 0)

    def named(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """What a call gives, by path, without arguments that are left at their default."""
        try:
            bound = self.signature.bind(*inputs, **named).arguments
        except TypeError as error:
            raise LayerwiseError(f"the model takes {self.signature}: {error}") from None
        known, given = self.signature.parameters, dict[str, Any]()
        for name, value in bound.items():
            if known[name].kind is Parameter.VAR_KEYWORD:
                given |= value
            elif not _is_default(known[name], value):
                given[name] = value
        return {
            f"{getattr(path[0], 'key', '')}{pytree.keystr(path[1:])}": leaf
            for path, leaf in pytree.tree_flatten_with_path(given, is_leaf=_is_empty)[0]
        }

    def takes(self, name: str) -> bool:
        """Whether the model itself has an argument of this name."""
        return name in self.signature.parameters

    def tensors(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """The tensors of a call, by their names in the graph.

        LayerwiseError where it has other arguments than the example, or another number, text or None among them.
        """
        given = self.named(inputs, named)
        self.check(
            given, (*self.leaves, *given), batch=len(inputs) == 1 and isinstance(inputs[0], Mapping) and not named
        )
        return {leaf.name: given[path] for path, leaf in self.leaves.items() if leaf.name is not None}

    def check(self, given: Mapping[str, Any], paths: Iterable[str], *, batch: bool = False) -> None:
        """LayerwiseError where one of these paths is not in both, or has another number, text or None than the example.

        batch: the call has one mapping, perhaps in the place of its items.
        """
        for path in paths:
            if path not in given or path not in self.leaves:
                what = "missing" if path not in given else "not one of them"
                calls = "those it is called with, or, for inference, with a function that calls it"
                remedy = "call it with names, model(**batch)" if batch else f"make it parallel with {calls}"
                raise LayerwiseError(
                    f"the model was made parallel for inputs {', '.join(self.leaves)}; {path!r} is {what}: {remedy}"
                )
            leaf, value = self.leaves[path], given[path]
            if leaf.name is None and not _equal(value, leaf.value):
                said = "a tensor" if isinstance(value, Tensor) else repr(value)
                raise LayerwiseError(
                    f"the model is called with {said} where it was made parallel for {leaf.value!r} ({path!r}): make "
                    "it parallel with this among its example inputs"
                )

    def call(self, tensors: Mapping[str, Tensor], samples: int) -> Call:
        """The example's call with these tensors in it; those that the network does not use are made."""

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
    """True for a list or dict without items, into which the model may write."""
    return isinstance(value, list | dict | tuple) and not value


def _equal(a: Any, b: Any) -> bool:
    """Whether two numbers, texts or None are the same: True is not 1, and nan is nan."""
    return type(a) is type(b) and bool(a == b or (a != a and b != b))


def _plain(value: object) -> bool:
    return value is None or isinstance(value, bool | int | float | str)


@dataclass(frozen=True, slots=True)
class OutputStructure:
    """The tree, and its leaves in order: which output each is (None: no tensor), and the value of what is none."""

    tree: pytree.TreeSpec
    numbers: tuple[int | None, ...]
    values: tuple[object, ...]

    def of(self, outputs: Sequence[Tensor]) -> object:
        """Returns these outputs in the structure that the model returns."""
        pairs = zip(self.numbers, self.values, strict=True)
        return pytree.tree_unflatten([value if i is None else outputs[i] for i, value in pairs], self.tree)


def structure_of(exported: ExportedProgram, count: int) -> OutputStructure | None:
    """The structure of the outputs; None where these are not the graph's `count` (one is returned twice, or stored)."""
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
    """The tensors in what a model returns, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(returned) if isinstance(leaf, torch.Tensor))
