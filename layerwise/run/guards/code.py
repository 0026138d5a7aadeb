"""What the code of classes of modules names: attributes that it can read, and those that a call writes."""

from __future__ import annotations

import dis
from collections.abc import Iterator
from types import CodeType

from torch import nn


def reads(kind: type, name: str, *, torchs: bool) -> bool:
    """Whether a method or property of this class names an attribute. torchs: or of its bases that are PyTorch's."""
    return any(_names(code, name) for base in _bases(kind, torchs=torchs) for code in _codes(base).values())


def written(kind: type) -> set[str]:
    """Attributes that `forward` sets, or methods that it names, and those they name: of code that is not PyTorch's."""
    codes = {name: code for base in reversed(_bases(kind, torchs=False)) for name, code in _codes(base).items()}
    found, todo = set[str](), ["forward"]
    while todo:
        code = codes.pop(todo.pop(), None)
        for part in () if code is None else _parts(code):
            todo += part.co_names
            found.update(step.argval for step in dis.get_instructions(part) if step.opname == "STORE_ATTR")
    return found


def _bases(kind: type, *, torchs: bool) -> list[type]:
    kinds = [base for base in kind.__mro__ if base not in (nn.Module, object)]
    return [base for base in kinds if torchs or not base.__module__.startswith("torch.")]


def _codes(kind: type) -> dict[str, CodeType]:
    """Of its own methods and properties."""
    functions = {name: getattr(held, "__func__", getattr(held, "fget", held)) for name, held in vars(kind).items()}
    return {name: held.__code__ for name, held in functions.items() if hasattr(held, "__code__")}


def _parts(code: CodeType) -> Iterator[CodeType]:
    """It, and the functions inside."""
    yield code
    for const in code.co_consts:
        if isinstance(const, CodeType):
            yield from _parts(const)


def _names(code: CodeType, name: str) -> bool:
    return any(name in part.co_names or name in part.co_consts for part in _parts(code))
