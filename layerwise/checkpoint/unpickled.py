"""What a pickle says, read without unpickling it: nothing is imported, made, called or hashed, whatever is in it.

Its opcodes are walked (pickletools.genops); those that torch.distributed.checkpoint's own pickles have become records
of data, and any other is refused. So the memory that it takes is a multiple of the file.
"""

from __future__ import annotations

import pickletools
from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Final

SAID: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"})
CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


class Name(str):
    """`module.name` of what a pickle would import."""


class Pairs(list[tuple[Any, Any]]):
    """The items of a dictionary, whose keys are not hashed: of tuples in tuples that takes as long as one likes."""

    def members(self) -> dict[str, Any]:
        """By key. ValueError where one is no text."""
        if not all(isinstance(key, str) for key, _ in self):
            raise ValueError("a key is no text")
        return dict(self)


@dataclass(slots=True, eq=False)
class Record:
    """An object that a pickle would make: of which class, of what, and what its attributes are set to."""

    of: Name
    arguments: Any
    state: Any = None


def unpickled(content: bytes, known: Collection[str]) -> Any:
    """The value of a pickle: numbers, text, None, lists, tuples, Pairs, and of what is in `known` Names and Records.

    ValueError or IndexError where there is anything else in it, or where it ends early.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: list[Any] = []

    def above() -> list[Any]:
        """Takes what is above the last mark."""
        at = marks.pop()
        items = stack[at:]
        del stack[at:]
        return items

    for opcode, argument, _ in pickletools.genops(content):
        name = opcode.name
        if name == "MEMOIZE":
            memo.append(stack[-1])
        elif name in ("BINGET", "LONG_BINGET"):
            stack.append(memo[argument])  # type: ignore[index]
        elif name in SAID:
            stack.append(argument)
        elif name in CONSTANTS:
            stack.append(CONSTANTS[name])
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "EMPTY_LIST":
            stack.append([])
        elif name == "EMPTY_DICT":
            stack.append(Pairs())
        elif name in TUPLES:
            marks.append(len(stack) - TUPLES[name])
            stack.append(tuple(above()))
        elif name == "TUPLE":
            stack.append(tuple(above()))
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else above()
            _of(list, stack[-1]).extend(items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(-2), stack.pop()] if name == "SETITEM" else above()
            _of(Pairs, stack[-1]).extend(zip(items[::2], items[1::2], strict=True))
        elif name == "STACK_GLOBAL":
            text = f"{_of(str, stack.pop(-2))}.{_of(str, stack.pop())}"
            if text not in known:
                raise ValueError(f"{text} has no place in it")
            stack.append(Name(text))
        elif name in ("NEWOBJ", "REDUCE"):
            arguments = stack.pop()
            stack.append(Record(_of(Name, stack.pop()), arguments))
        elif name == "BUILD":
            state = stack.pop()
            _of(Record, stack[-1]).state = state
        elif name == "STOP":
            return stack.pop()
        elif name not in ("PROTO", "FRAME"):
            raise ValueError(f"{name} has no place in it")
    raise ValueError("it ends early")


def _of(kind: type[Any], value: Any) -> Any:
    if type(value) is not kind:
        raise ValueError(f"a {type(value).__name__} stands where a {kind.__name__} belongs")
    return value
