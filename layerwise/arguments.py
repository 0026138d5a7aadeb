"""checked: a public function or class whose arguments are of the kinds that its annotations say, or one sentence."""

from __future__ import annotations

import functools
import importlib
import inspect
import math
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Integral, Real
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, TypeVar, Union, Unpack, get_args, get_origin, get_type_hints

from layerwise.errors import LayerwiseError

T = TypeVar("T", bound=Callable[..., Any])
C = TypeVar("C", bound=Any)
Fits = Callable[[Any], bool]


@dataclass(frozen=True, slots=True)
class Range:
    """The numbers that an argument may be, for `Annotated`: at least `least`, and below `below`."""

    least: float
    below: float = math.inf

    def __contains__(self, number: float) -> bool:
        return self.least <= number < self.below

    def __str__(self) -> str:
        return f"at least {self.least:g}" + (f", below {self.below:g}" if self.below < math.inf else "")


Count = Annotated[int, Range(1)]  # of devices, samples, epochs
Natural = Annotated[int, Range(0)]
NotNegative = Annotated[float, Range(0)]
Seconds = NotNegative
Seed = Annotated[int, Range(-(2**63), 2**63)]  # what PyTorch's generators take

# Arguments that public functions had, and what to do instead.
_MOVED = {"plan": "give it as strategy=", "sync_every": "call backward within layerwise.of(model).no_sync()"}
# Names that annotations use but modules import for type checkers alone, as they are imported without PyTorch.
_LATE = {"nn": "torch.nn"}


class _Late(dict[str, Any]):
    def __missing__(self, name: str) -> Any:
        return importlib.import_module(_LATE[name])


def checked(target: T) -> T:
    """Returns a function, or a class with `__init__`, that raises LayerwiseError for arguments of the wrong kind.

    Kinds are those of the annotations; numbers are not nan, and lie in the `Range` of an `Annotated`.
    """
    function: Any = target.__init__ if isinstance(target, type) else target  # type: ignore[misc]  # of this class
    look = _looking(function)

    @functools.wraps(function)
    def call(*args: Any, **named: Any) -> Any:
        look(*args, **named)
        return function(*args, **named)

    if not isinstance(target, type):
        return call  # type: ignore[return-value]
    target.__init__ = call  # type: ignore[misc]
    return target


def checked_values(target: C) -> C:
    """`checked` of a class of few plain values, of which planning makes many: equal ones are looked at once."""
    function: Any = target.__init__
    look = _looking(function)
    first = functools.lru_cache(65536, typed=True)(functools.partial(look, None))

    def look_once(self: Any, *args: Any, **named: Any) -> None:
        try:
            first(*args, **named)
        except TypeError:  # a list, which has no hash
            look(self, *args, **named)

    @functools.wraps(function)
    def call(self: Any, *args: Any, **named: Any) -> None:
        torch = sys.modules.get("torch")
        if torch is None or not torch.compiler.is_compiling():  # Dynamo, which traces kernels, cannot trace a cache
            look_once(self, *args, **named)
        function(self, *args, **named)

    target.__init__ = call
    return target


def _looking(function: Callable[..., Any]) -> Callable[..., None]:
    """Returns what is called with a function's arguments, and raises LayerwiseError for the first wrong one."""
    kinds: dict[str, tuple[Fits, str]] = {}
    parameters = list(inspect.signature(function).parameters.values())
    positional = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), None)
    defaults = {p.name: p.default for p in parameters}
    open_ended = any(p.kind is p.VAR_KEYWORD for p in parameters)

    def check_there(name: str) -> None:
        if name in defaults or open_ended:
            return
        options, where = type(defaults.get("options")), _MOVED.get(name, "") if "strategy" in defaults else ""
        if name in getattr(options, "__dataclass_fields__", ()):
            where = f"give it in options={options.__name__}({name}=...)"
        if where:
            raise LayerwiseError(f"{function.__name__} takes no {name}=: {where}")

    def check(name: str, value: Any) -> None:
        fits, words = kinds.get(name, _ANY)
        if value is defaults.get(name, _ANY) or fits(value):
            return
        shown = f"the class {value.__name__}" if inspect.isclass(value) else _shown(value)
        raise LayerwiseError(f"{name} is {shown}; it must be {words}")

    def look(*args: Any, **named: Any) -> None:
        if not kinds:  # in the first call: annotations may name what is below them
            hints = get_type_hints(function, localns=_Late(), include_extras=True)
            for hint in [hint for hint in hints.values() if get_origin(hint) is Unpack]:
                hints |= get_type_hints(get_args(hint)[0], include_extras=True)
            kinds.update({name: (_fits(hint), _words(hint)) for name, hint in hints.items()})
        for name, value in zip(positional, args, strict=False):
            check(name, value)
        for value in args[len(positional) :] if rest else ():
            check(rest or "", value)
        for name, value in named.items():
            check_there(name)
            check(name, value)

    return look


def _shown(value: object) -> str:
    """Returns the value as it is written, where that is short and known to be harmless, else its type."""
    items = [value]
    if isinstance(value, list | tuple | dict):
        items = [*value, *value.values()] if isinstance(value, dict) else list(value)
    plain = len(items) < 9 and all(isinstance(item, str | int | float | NoneType) for item in items)
    return repr(value) if plain else f"of type {type(value).__name__}"


def _fits(hint: Any) -> Fits:
    """Returns what says whether a value is of the kind that an annotation says."""
    origin, args = get_origin(hint), get_args(hint)
    if hint in (Any, object) or origin is Unpack or isinstance(hint, TypeVar | str):
        return lambda value: True
    if origin is Annotated:
        inner, ranges = _fits(args[0]), [x for x in args[1:] if isinstance(x, Range)]
        return lambda value: inner(value) and all(value in x for x in ranges)
    if origin in (Union, UnionType):
        each = [_fits(arg) for arg in args]
        return lambda value: any(fits(value) for fits in each)
    if origin is Literal:
        return lambda value: type(value) in (str, int, bool) and value in args
    if hint in (bool, NoneType):
        return lambda value: isinstance(value, hint)
    if hint is int:
        return lambda value: type(value) is int or (isinstance(value, Integral) and not isinstance(value, bool))
    if hint is float:
        return lambda value: isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    kind = origin or hint
    if kind is Callable:  # a class makes what the function would return
        made = args[-1] if args and inspect.isclass(args[-1]) else NoneType
        return lambda value: callable(value) and (not inspect.isclass(value) or issubclass(value, made))
    if kind is tuple and args and args[-1] is not ...:
        parts = [_fits(arg) for arg in args]
        return lambda value: (
            isinstance(value, tuple)
            and len(value) == len(parts)
            and all(f(x) for f, x in zip(parts, value, strict=True))
        )
    if issubclass(kind, Mapping):
        key, item = (_fits(arg) for arg in args) if args else (_fits(Any), _fits(Any))
        return lambda value: isinstance(value, kind) and all(key(k) and item(v) for k, v in value.items())
    if issubclass(kind, Iterable) and args and args[0] is not Any:
        item = _fits(args[0])
        return lambda value: isinstance(value, kind) and not isinstance(value, str | bytes) and all(map(item, value))
    if kind.__name__ == "ProcessGroup":  # PyTorch's GroupMember.NON_GROUP_MEMBER is told more than its kind
        return lambda value: isinstance(value, kind) or (type(value) is int and value == -100)
    if kind.__module__.startswith("torch.nn.modules"):
        return lambda value: isinstance(value, kind) and not _lazy(value)
    return lambda value: isinstance(value, kind)


def _lazy(module: Any) -> bool:
    """False. LayerwiseError for a module with parameters that get their shapes in the first call."""
    uninitialized = sys.modules["torch"].nn.parameter.UninitializedTensorMixin
    for name, value in [*module.named_parameters(), *module.named_buffers()]:
        if isinstance(value, uninitialized):
            raise LayerwiseError(
                f"{name!r} of the model has no shape yet, as nn.LazyLinear's: call the model once on a sample before"
            )
    return False


def _words(hint: Any) -> str:
    """Returns an annotation in words: "a whole number of at least 1", "a text or None"."""
    return _listed([word for word, _ in sorted(_each(hint), key=lambda pair: pair[1])])


def _each(hint: Any) -> list[tuple[str, bool]]:
    """Returns each kind that an annotation allows, and whether it is None, which is named last."""
    origin, args = get_origin(hint), get_args(hint)
    if hint is inspect.Signature.empty or origin is Unpack or isinstance(hint, TypeVar | str):
        return [("a value", False)]
    if origin in (Union, UnionType):
        return list(dict.fromkeys(pair for arg in args for pair in _each(arg)))
    if origin is Annotated:
        ranges = [str(x) for x in args[1:] if isinstance(x, Range)]
        return [(", and ".join([*ranges, _words(args[0])]), False)]
    if origin is Literal:
        return [(repr(arg), False) for arg in args]
    if hint is bool:
        return [("True", False), ("False", False)]
    if hint in _NAMES:
        return [(_NAMES[hint], hint is NoneType)]
    kind = origin or hint
    if kind is os.PathLike:
        return [("a path", False)]
    if kind is Callable:
        return [("a function", False)]
    if issubclass(kind, Mapping):
        return [("a dict", False)]
    if issubclass(kind, Sequence) and (args or kind is tuple):
        what = "tuple" if kind is tuple else "list"
        inner = _NAMES.get(args[0], "").removeprefix("a ") if args else ""
        return [(f"a {what} of {inner}s" if inner and inner != "value" else f"a {what}", False)]
    if (name := kind.__name__) == "ParallelModule":
        return [("what parallelize returned", False)]
    return [(f"an {name}" if name[0] in "AEIO" else f"a {name}", False)]


def _listed(words: Sequence[str]) -> str:
    return words[0] if len(words) == 1 else f"{', '.join(words[:-1])} or {words[-1]}"


_NAMES: Mapping[Any, str] = {
    NoneType: "None", int: "a whole number", float: "a number", str: "a text", Any: "a value",
    object: "a value",
}  # fmt: skip
_ANY: tuple[Fits, str] = (lambda value: True, "")
