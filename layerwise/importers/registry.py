"""register_op: teaches both importers an operator that layerwise does not know.

An importer finds an operator's call in a model, binds its arguments, and asks a `build` function for the layer. The
importers' own tables consist of such functions; `register_op` adds a user's, which has priority over the built-in one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal, TypeAlias, TypeVar

import numpy as np
from numpy.typing import NDArray

from layerwise.arguments import checked
from layerwise.errors import LayerwiseError
from layerwise.ops.base import Op
from layerwise.tensor import TensorSpec

N = TypeVar("N", int, float)


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor argument of a call.

    `name` is the name of the layer that computes an activation, or the model's name of a parameter or buffer. A
    constant (a buffer, or computed without anything trained or fed) has a `value` if it is known.
    """

    role: Literal["activation", "parameter", "constant"]
    name: str
    spec: TensorSpec  # parameters have no labels; constants only n, if they have a row for every sample
    value: NDArray[np.generic] | None = field(default=None, compare=False, repr=False)
    transposed: bool = False  # whether it is the transpose of the matrix `name`
    whole: Operand | None = None  # the activation whose leading dimensions it merges (see `Placer`)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.spec.shape

    @property
    def activation(self) -> bool:
        """True if it is computed from the model's inputs."""
        return self.role == "activation"


Argument: TypeAlias = Operand | bool | int | float | str | tuple["Argument", ...] | None


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator in a model, with arguments bound by the names of the operator's schema.

    Tensors are Operands, lists are tuples, and an optional tensor that is missing is None. Defaults of the schema are
    filled in. ONNX inputs and attributes are both bound by the names of the ONNX operator; those of an operator without
    a schema are called "0", "1", ...
    """

    target: str  # "aten::conv2d", "mylib::swoosh", "com.acme::Swoosh"
    layer: str  # the name that the layer will get
    arguments: Mapping[str, Argument]
    outputs: tuple[TensorSpec, ...] = ()  # shapes and types if the model states them; no labels
    batch: int = 0  # batch size of the model's example inputs

    def __getitem__(self, name: str) -> Argument:
        if name not in self.arguments:
            raise LayerwiseError(
                f"{self.target} has no argument {name!r}; it has {', '.join(self.arguments) or 'none'}"
            )
        return self.arguments[name]

    def get(self, name: str, default: Argument = None) -> Argument:
        """The argument, or `default` if it is missing or None."""
        value = self.arguments.get(name)
        return default if value is None else value

    def operand(self, name: str) -> Operand:
        """The tensor argument of this name."""
        value = self[name]
        if not isinstance(value, Operand):
            raise LayerwiseError(f"{self.target}: argument {name!r} is {value!r}, not a tensor")
        return value

    def integers(self, name: str, count: int = 0) -> tuple[int, ...]:
        """A list of integers; a single number is repeated `count` times."""
        value = self[name]
        numbers = value if isinstance(value, tuple) else (value,)
        if count > 1 and len(numbers) == 1:
            numbers *= count
        return tuple(self._number(name, n, int) for n in numbers)

    def integer(self, name: str) -> int:
        """An integer."""
        return self._number(name, self[name], int)

    def number(self, name: str) -> float:
        """A number."""
        return self._number(name, self[name], float)

    def flag(self, name: str) -> bool:
        """A truth value; None is False."""
        return bool(self.get(name, False))

    def _number(self, name: str, value: Argument, kind: type[N]) -> N:
        if not isinstance(value, (bool, int, float)):
            raise LayerwiseError(f"{self.target}: argument {name!r} is {value!r}, not a number")
        return kind(value)

    @property
    def tensors(self) -> tuple[Operand, ...]:
        """All tensor arguments in the schema's order, including those in lists."""
        return tuple(_tensors(tuple(self.arguments.values())))


@dataclass(frozen=True, slots=True)
class Built:
    """The layer that a call becomes: `op` on `inputs`, with `parameters` in the order of `op.parameters`.

    An input may be a Built itself, if one call becomes several layers (they share the layer's name). A parameter or
    constant among the inputs becomes a source node of the graph; among `parameters` it belongs to the layer.
    """

    op: Op
    inputs: tuple[Operand | Built, ...]
    parameters: tuple[Operand, ...] = ()


Tensor: TypeAlias = Operand | Built
# An Operand: the call changes nothing. A tuple: one result an output, None for a missing one.
Result: TypeAlias = Built | Operand | tuple["Result", ...] | None
Build: TypeAlias = Callable[[Call], Result]
Table: TypeAlias = Mapping[str, Build]  # by the operator's name, without its domain

_builds: dict[str, Build] = {}


@checked
def register_op(target: str, build: Build) -> None:
    """Teaches the importers an operator. It replaces an earlier registration, and has priority over layerwise's own.

    An operator that is not a combination of layerwise's own needs a subclass of `layerwise.ops.base.Op`, which
    defines what a box of its output needs of its inputs and parameters (docs/how-to/add_an_operator.md).

    Args:
        target: The name of a torch operator, "mylib::swoosh" (every overload) or "aten.foo.default" (this one), or an
            ONNX operator with its domain, "com.acme::Swoosh" ("ai.onnx::Gelu" for a standard one).
        build: Function that returns the layer for a Call of `target`.

    Raises:
        LayerwiseError: `target` is not an operator's name, or `build` is not a function.

    Examples:
        >>> from layerwise.ops.tensor.pointwise import Unary
        >>> def swoosh(call: Call) -> Built:
        ...     return Built(Unary("swoosh"), (call.operand("x"),))
        >>> register_op("mylib::swoosh", swoosh)
    """
    if not callable(build):
        raise LayerwiseError(f"register_op({target!r}, ...): build must be a function of a Call, not {build!r}")
    _builds[canonical(target)] = build


def lookup(target: str) -> Build | None:
    """The registered build of a target: of its overload, else of all overloads; None if there is none."""
    name = canonical(target)
    domain, _, op = name.partition("::")
    return _builds.get(name) or _builds.get(f"{domain}::{op.partition('.')[0]}")


def canonical(target: str) -> str:
    """The spelling of a target: "aten.add.Tensor" -> "aten::add.Tensor", "aten.conv2d.default" -> "aten::conv2d"."""
    if "::" not in target:
        domain, _, op = target.partition(".")
        if not op:
            domain, op = "ai.onnx", target
        target = f"{domain}::{op}"
    domain, _, op = target.partition("::")
    if not domain or not op:
        raise LayerwiseError(
            f"{target!r} is not an operator name: write 'mylib::op', 'aten.op.overload' or 'com.acme::Op'"
        )
    return target.removesuffix(".default")


def _tensors(value: Argument) -> Iterator[Operand]:
    if isinstance(value, Operand):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from _tensors(item)
