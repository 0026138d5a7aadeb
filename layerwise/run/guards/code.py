"""What the code of classes names: whether it can read an attribute."""

from __future__ import annotations

from types import CodeType

from torch import nn


def reads(kind: type, name: str, *, torchs: bool) -> bool:
    """Whether a method or property of this class of modules names an attribute. torchs: classes of PyTorch's, too."""
    kinds = (base for base in kind.__mro__ if base not in (nn.Module, object))
    return any(_of(base, name) for base in kinds if torchs or not base.__module__.startswith("torch."))


def _of(kind: type, name: str) -> bool:
    functions = (getattr(held, "__func__", getattr(held, "fget", held)) for held in vars(kind).values())
    return any(_names(function.__code__, name) for function in functions if hasattr(function, "__code__"))


def _names(code: CodeType, name: str) -> bool:
    inside = (const for const in code.co_consts if isinstance(const, CodeType))
    return name in code.co_names or name in code.co_consts or any(_names(one, name) for one in inside)
