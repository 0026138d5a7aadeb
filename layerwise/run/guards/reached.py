"""Reached: the numbers, texts and lists that a model's code reads beside tensors, to notice changes."""

from __future__ import annotations

import functools
import sys
import types
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any
from zlib import crc32

import numpy as np
from torch import Tensor, nn

from layerwise.importers.torch.read.reached import installed

_FOREIGN = {"torch", "numpy", "layerwise", "lightning", "pytorch_lightning", "accelerate", "tqdm", "rich"}
# modules of plain objects that hold what users put into them
_PLAIN_OBJECTS = {"types", "argparse", "collections", "builtins"}
# called without being named in code
_CALLED = {"forward", "__call__", "__getattr__", "__getitem__", "__iter__", "__len__"}
_MOST = 10_000  # items; a longer list or dict is a vocabulary, and is not compared in every step
_OF_TENSORS = {"dtype", "device", "shape"}  # names that code reads from tensors, and that configurations have too
_MISSING = object()
Get = Callable[[str], Any]


class Reached:
    """What the code of a model's modules reads, at its present values: attributes, their contents, class attributes,
    globals.

    The names come from the code of `forward` and of what that calls, and are looked up in the objects they refer to.
    `Invariants` covers the attributes of the modules themselves.
    """

    def __init__(self, model: nn.Module) -> None:
        self._lists: list[tuple[str, Any, Any]] = []  # with a copy each
        self._named: list[tuple[str, Get, dict[str, Any]]] = []  # how to look names up, and what was found
        self._seen: set[object] = set()
        self._alive: list[object] = []  # keeps alive the objects whose ids are in `_seen`
        self._buffers = set(map(id, model.buffers()))
        for path, module in model.named_modules():
            self._object(module, _CALLED, path or "the model")
            for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values()):
                self._value(hook, set(), path or "the model", module)
        del self._seen, self._alive

    def changed(self) -> str | None:
        """Returns what has changed, in words; None if nothing has."""
        for where, now, before in self._lists:
            if not _equal(now, before):
                key = first_difference(now, before) if isinstance(now, dict) else None
                return where if key is None else f"{where}[{key!r}]"
        for where, get, before in self._named:
            for name, value in before.items():
                now = get(name)
                if now is not value and not _equal(now, value):
                    return f"{where}.{name}" if where else name
        return None

    def _first(self, thing: object, *more: object) -> bool:
        key = (id(thing), *more)
        if key in self._seen:
            return False
        self._seen.add(key)
        self._alive.append(thing)
        return True

    def _look(self, where: str, get: Get, names: Iterable[str], read: set[str], root: object = None) -> None:
        """Notes what these names refer to, and its contents."""
        found = {name: get(name) for name in sorted(names)}
        noted = {name: x for name, x in found.items() if not callable(x) and not isinstance(x, types.ModuleType)}
        if noted:
            self._named.append((where, get, noted))
        for name, value in found.items():
            self._value(value, read, f"{where}.{name}" if where else name, root)

    def _value(self, value: Any, names: set[str], where: str, root: object = None) -> None:
        """Notes what a value contains. names: of the code that reads it. root: the owner of a function."""
        if isinstance(value, dict | list | deque | set | tuple):
            if len(value) <= _MOST and self._first(value):
                if not isinstance(value, tuple):
                    self._lists.append((where, value, _copy(value)))
                for key, item in dict.items(value) if isinstance(value, dict) else enumerate(value):
                    self._value(item, names, f"{where}[{key!r}]", root)
            if hasattr(value, "__dict__"):  # an instance of a class of the user's
                self._object(value, names, where)
        elif isinstance(value, Tensor):
            watched = not isinstance(value, nn.Parameter) and id(value) not in self._buffers
            if watched and not value.is_inference() and self._first(value):
                self._named.append((where, lambda _: value._version, {"": value._version}))
        elif isinstance(value, np.ndarray):
            if value.nbytes <= _MOST and value.dtype != object and self._first(value):
                self._named.append((where, lambda _: crc32(value.tobytes()), {"": crc32(value.tobytes())}))
        elif isinstance(value, types.MethodType):
            self._value(value.__func__, names, where, value.__self__)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._value(part, names, where, root)
        elif isinstance(value, types.FunctionType):
            self._function(value, root)
        elif isinstance(value, types.ModuleType):
            if not _foreign(value.__name__) and names & vars(value).keys() and self._first(value, frozenset(names)):
                self._look(value.__name__, _of_mapping(vars(value)), names & vars(value).keys(), names)
        elif isinstance(value, type):
            self._class(value, names | {"__init__"}, value)
        elif not isinstance(value, str | bytes | int | float | complex | type(None)):
            self._object(value, names, where)

    def _object(self, value: Any, names: set[str], where: str) -> None:
        if _foreign(type(value).__module__) and not isinstance(value, nn.Module):
            return
        names = names | _CALLED
        if not self._first(value, frozenset(names)):
            return
        own = getattr(value, "__dict__", {})
        slots = {slot for kind in type(value).__mro__ for slot in _slots(kind)}
        if isinstance(value, nn.Module):
            for name in names & own.keys():  # only what is inside
                self._value(own[name], names, f"{where}.{name}", value)
            of_torch = type(value).__module__.startswith("torch.")  # a ModuleList, which code iterates over
            for name in value._modules.keys() & (value._modules.keys() if of_torch else names):
                self._value(value._modules[name], names, f"{where}.{name}", value)
        else:
            dynamic = any({"__getattr__", "__getitem__"} & vars(k).keys() for k in type(value).__mro__ if _own(k))
            shared = {n for k in type(value).__mro__ if _own(k) for n in vars(k) if not hasattr(vars(k)[n], "__get__")}
            known = {*own, *slots} if dynamic else names & {*own, *slots, *shared}
            self._look(where, lambda name: getattr(value, name, _MISSING), known, names, value)
        self._class(type(value), names, value)

    def _class(self, kind: type, names: set[str], root: object) -> None:
        for base in kind.__mro__:
            if not _own(base) or not self._first(base, frozenset(names), id(root)):
                continue
            table, plain = vars(base), set[str]()
            for name in names & table.keys():
                value = table[name]
                if isinstance(value, staticmethod | classmethod):
                    self._value(value.__func__, names, name, root)
                elif isinstance(value, property | functools.cached_property):
                    self._value(value.fget if isinstance(value, property) else value.func, names, name, root)
                elif isinstance(value, types.FunctionType):
                    self._function(value, root)
                elif not hasattr(type(value), "__get__"):
                    plain.add(name)
            if plain and not installed(base.__module__):
                self._look(base.__qualname__, _of_mapping(table), plain, names)

    def _function(self, function: types.FunctionType, root: object) -> None:
        if hasattr(function, "__wrapped__"):
            self._value(function.__wrapped__, set(), function.__qualname__, root)
        if _foreign(function.__module__ or "") or not self._first(function, id(root)):
            return
        names = set(_names(function.__code__)) - _OF_TENSORS
        known = names & function.__globals__.keys()
        if installed(function.__module__):  # a package's globals are its own matter
            known = {name for name in known if isinstance(function.__globals__[name], types.FunctionType)}
        self._look("", _of_mapping(function.__globals__), known, names, root)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=False):
            self._look("", functools.partial(_content, cell), [name], names, root)
        for default in (*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()):
            self._value(default, names, function.__qualname__, root)
        if root is not None:
            self._value(root, names, type(root).__name__)


def _names(code: types.CodeType) -> Iterable[str]:
    """Yields the names that code looks up, including those in strings, as for getattr."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
        elif isinstance(constant, str) and constant.isidentifier():
            yield constant


def _of_mapping(mapping: Mapping[str, Any]) -> Get:
    return lambda name: mapping.get(name, _MISSING)


def _content(cell: types.CellType, _: str) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # empty
        return _MISSING


def _slots(kind: type) -> tuple[str, ...]:
    slots = vars(kind).get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(slots)


def _own(kind: type) -> bool:
    return not _foreign(kind.__module__) and kind.__module__ != "builtins"


def _foreign(module: str) -> bool:
    """True for code that the user has not written: layerwise does not look into it."""
    top = module.partition(".")[0]
    return top in _FOREIGN or (top in sys.stdlib_module_names and top not in _PLAIN_OBJECTS and top != "__main__")


def _copy(value: Any) -> Any:
    kind = next(kind for kind in (dict, list, deque, set) if isinstance(value, kind))
    return dict(dict.items(value)) if kind is dict else kind(value)


def _equal(now: object, before: object) -> bool:
    try:
        return now is before or bool(now == before)
    except Exception:  # arrays, or a user's class
        return False


def first_difference(now: Mapping[Any, Any], before: Mapping[Any, Any]) -> Any:
    """Returns the first key whose values differ, or None; quick if nothing was set: all values are the same objects."""
    if _equal(now, before):
        return None
    keys = dict.fromkeys((*now, *before))
    return next((key for key in keys if not _equal(now.get(key, _MISSING), before.get(key, _MISSING))), None)
