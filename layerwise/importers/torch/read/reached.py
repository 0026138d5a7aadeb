"""Finds the objects that a model's code can change, from its modules, and restores them."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from types import BuiltinMethodType, CellType, FunctionType, MethodType
from typing import Any

from torch import Tensor, nn

MOST = 100_000  # objects; a model that reaches more has data in its attributes
CONTAINERS = (list, dict, set, deque, OrderedDict, defaultdict)  # exactly these: subclasses may do anything
LIBRARIES = ("torch", "numpy", "builtins", "layerwise", "collections", "functools", "typing", "abc", "enum", "types")


def _of_library(kind: Any) -> bool:
    return str(getattr(kind, "__module__", "builtins")).partition(".")[0] in LIBRARIES


@cache
def installed(module: str | None) -> bool:
    """True for the code of an installed package, whose classes and globals are its own matter."""
    return "site-packages" in (getattr(sys.modules.get(module or ""), "__file__", None) or "")


def reached(model: nn.Module) -> list[Any]:
    """Modules, containers, objects, classes, closure cells and globals that the model's code can write to.

    From libraries it includes modules and containers only, from installed packages objects as well; a function's
    globals are the dict of its module.
    """
    found: dict[int, Any] = {}
    left: list[Any] = [model]
    while left and len(found) < MOST:
        one = left.pop()
        if isinstance(one, MethodType):
            left += (one.__self__, one.__func__)
        elif isinstance(one, BuiltinMethodType):  # such as `pile.append`
            left.append(one.__self__)
        elif isinstance(one, partial):
            left += (one.func, *one.args, *one.keywords.values())
        elif isinstance(one, tuple):
            left += one
        elif id(one) in found or isinstance(one, Tensor) or not _may_change(one):
            continue
        else:
            found[id(one)] = one
            left += _within(one)
    return list(found.values())


def _may_change(one: Any) -> bool:
    if isinstance(one, (nn.Module, CellType)) or type(one) in CONTAINERS:
        return True
    if isinstance(one, (type, FunctionType)):
        return not (_of_library(one) or installed(one.__module__))
    return hasattr(one, "__dict__") and not _of_library(type(one))


def _within(one: Any) -> Iterator[Any]:
    """The objects that `one` refers to."""
    if type(one) in CONTAINERS:
        yield from one.values() if isinstance(one, dict) else one
    elif isinstance(one, CellType):
        yield from _content(one)
    elif isinstance(one, FunctionType):
        yield from one.__closure__ or ()
        yield from (one.__globals__[name] for name in one.__code__.co_names if name in one.__globals__)
    elif isinstance(one, type):
        yield from (value for value in vars(one).values() if not isinstance(value, type))
        yield from one.__bases__
    else:
        yield from vars(one).values()
        yield type(one)


def _content(cell: CellType) -> list[Any]:
    try:
        return [cell.cell_contents]
    except ValueError:  # it is empty
        return []


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """A context to call the model's code in: afterwards, everything that it can write to has the same content.

    Values of tensors are not restored.
    """
    objects = reached(model)
    written = {
        name: one.__globals__
        for one in objects
        if isinstance(one, FunctionType)
        for name in one.__code__.co_names
        if name in one.__globals__
    }
    globals_before = [(where, name, where[name]) for name, where in written.items()]
    before = [(one, _copy(one)) for one in objects if not isinstance(one, FunctionType)]
    try:
        yield
    finally:
        for one, content in before:
            _put_back(one, content)
        for where, name, value in globals_before:
            if where.get(name) is not value:
                where[name] = value


def _copy(one: Any) -> Any:
    if isinstance(one, CellType):
        return _content(one)
    return one.copy() if type(one) in CONTAINERS else dict(vars(one))


def _put_back(one: Any, content: Any) -> None:
    """Restores an object's content in place; writes nothing if nothing changed."""
    if isinstance(one, CellType):
        if content and (not _content(one) or one.cell_contents is not content[0]):
            one.cell_contents = content[0]
    elif isinstance(one, type):
        for name, value in vars(one).copy().items():
            if name not in content:
                delattr(one, name)
            elif value is not content[name]:
                setattr(one, name, content[name])
    elif type(one) in CONTAINERS:
        if len(one) != len(content) or any(a is not b for a, b in zip(_items(one), _items(content), strict=True)):
            one.clear()
            one.extend(content) if isinstance(one, (list, deque)) else one.update(content)
    else:
        now = vars(one)
        if now.keys() != content.keys() or any(now[name] is not value for name, value in content.items()):
            now.clear()
            now.update(content)


def _items(one: Any) -> list[Any]:
    return [x for pair in one.items() for x in pair] if isinstance(one, dict) else list(one)
