"""The description of a checkpoint: torch.distributed.checkpoint's `.metadata`, a pickle that is read, never run.

Its opcodes are walked (pickletools.genops): nothing is imported, made, called or hashed, whatever is in it. Those that
torch.distributed.checkpoint's own pickles have become records of data, and any other is refused. So the memory that it
takes is a multiple of the file.
"""

from __future__ import annotations

import pickletools
import re
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from itertools import product
from math import prod
from typing import Any, Final

from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as records

from layerwise.geometry import Box
from layerwise.tensorfile import DTYPE_OF, Spec

FILE = re.compile(r"__\d+_\d+\.distcp")  # and nothing else: a name may not lead out of the folder
RECORDS = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
KNOWN = frozenset(
    {
        *(f"{records.__name__}.{name}" for name in RECORDS),
        *(f"torch.{name}" for name in (*DTYPE_OF, "Size", "serialization._get_layout")),
        f"{filesystem.__name__}._StorageInfo",
        "pathlib.PosixPath",
        "pathlib._local.PosixPath",
    }
)
MOST_DIMS = 64  # of a tensor, in PyTorch
MOST_CUT = 8  # dimensions in which a tensor is cut into boxes
SAID: Final = frozenset({"BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT", "SHORT_BINUNICODE", "BINUNICODE"})
CONSTANTS: Final = {"NONE": None, "NEWTRUE": True, "NEWFALSE": False, "EMPTY_TUPLE": ()}
TUPLES: Final = {"TUPLE1": 1, "TUPLE2": 2, "TUPLE3": 3}


@dataclass(frozen=True, slots=True)
class FileSpan:
    """A part of a file that torch.save wrote."""

    file: str
    offset: int  # in bytes
    length: int


@dataclass(slots=True)
class Stored:
    """A tensor, by the boxes that tile it."""

    spec: Spec
    boxes: list[tuple[Box, FileSpan]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Description:
    """The tensors of a checkpoint, and its values that are none, by name."""

    tensors: dict[str, Stored]
    values: dict[str, FileSpan]


def read_description(content: bytes) -> Description:
    """Returns what a `.metadata` describes. ValueError and the like where it is none, or contradicts itself."""
    metadata = _members(unpickled(content, KNOWN), "Metadata")
    places = dict[tuple[str, tuple[int, ...] | None], FileSpan]()
    for index, info in metadata["storage_data"]:
        key = _members(index, "MetadataIndex")
        offset = key.get("offset")  # of what is no tensor there is none
        places[_text(key["fqn"]), None if offset is None else _numbers(offset)] = _place(info)
    description = Description({}, {})
    for name, record in metadata["state_dict_metadata"].members().items():
        if _kind(record) == "BytesStorageMetadata":
            description.values[name] = places[name, None]
            continue
        stored = _members(record, "TensorStorageMetadata")
        shape, dtype = _numbers(stored["size"]), stored["properties"].state[0]
        if type(dtype) is not Name or _kind(stored["properties"]) != "TensorProperties":
            raise ValueError(f"{name!r} has no type")
        boxes = [_box(name, _members(chunk, "ChunkStorageMetadata"), shape) for chunk in stored["chunks"]]
        spec = shape, DTYPE_OF[dtype.removeprefix("torch.")]
        description.tensors[name] = Stored(spec, [(box, places[name, box.lo]) for box in boxes])
        check_whole(name, shape, boxes)
    return description


def check_whole(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """ValueError unless every element is in exactly one of these boxes, which lie inside the shape.

    Of boxes that cover an element an even number of times, corners cancel where they meet: only where all of a box is
    covered an odd number of times are its own corners left. With as many elements as it has, that is once.
    """
    saved, volume = sum(box.volume for box in boxes), prod(shape)
    if saved != volume:
        raise ValueError(f"{saved} of the {volume} elements of {name!r} are there")
    cut = [d for d, extent in enumerate(shape) if any(box.shape[d] != extent for box in boxes if box.volume)]
    if len(cut) > MOST_CUT:
        raise ValueError(f"{name!r} is cut in {len(cut)} dimensions")
    left = Counter[tuple[int, ...]]()
    for box in boxes:
        if box.volume:
            left.update(product(*((box.lo[d], box.hi[d]) for d in cut)))
    odd = {corner for corner, times in left.items() if times % 2}
    if volume and odd != set(product(*((0, shape[d]) for d in cut))):
        raise ValueError(f"of {name!r} some elements are there twice, and others not at all")


def _kind(value: object) -> str:
    """Returns the class of a record, without its module: `Metadata`."""
    return value.of.rpartition(".")[2] if isinstance(value, Record) else type(value).__name__


def _members(value: Any, kind: str) -> dict[str, Any]:
    """Returns a record's attributes."""
    if _kind(value) != kind or not isinstance(value.state, Pairs):
        raise ValueError(f"a {_kind(value)} stands where a {kind} belongs")
    return value.state.members()


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"a {_kind(value)} stands where a name belongs")
    return value


def _numbers(value: Any) -> tuple[int, ...]:
    """Returns the numbers of a torch.Size, or of a tuple."""
    numbers = value.arguments[0] if _kind(value) == "Size" else value
    if type(numbers) is not tuple or len(numbers) > MOST_DIMS or not all(type(number) is int for number in numbers):
        raise ValueError(f"a {_kind(value)} stands where sizes belong")
    return numbers


def _box(name: str, chunk: dict[str, Any], shape: tuple[int, ...]) -> Box:
    sizes, lo = _numbers(chunk["sizes"]), _numbers(chunk["offsets"])
    if not all(0 <= a <= a + b <= n for a, b, n in zip(lo, sizes, shape, strict=True)):
        raise ValueError(f"a box of {name!r} lies outside its shape {shape}")
    return Box(lo, tuple(a + b for a, b in zip(lo, sizes, strict=True)))


def _place(info: Any) -> FileSpan:
    storage = _members(info, "_StorageInfo")
    file, offset, length = _text(storage["relative_path"]), storage["offset"], storage["length"]
    if not FILE.fullmatch(file):
        raise ValueError(f"file {file!r}")
    if storage.get("transform_descriptors"):
        raise ValueError("it is compressed")
    if not (type(offset) is type(length) is int and offset >= 0 and length >= 0):
        raise ValueError(f"a part of {file!r} is nowhere")
    return FileSpan(file, offset, length)


class Name(str):
    """`module.name` of what a pickle would import."""


class Pairs(list[tuple[Any, Any]]):
    """The items of a dictionary, whose keys are not hashed: of tuples in tuples that takes as long as one likes."""

    def members(self) -> dict[str, Any]:
        """Returns the values by key. ValueError where a key is no text."""
        if not all(isinstance(key, str) for key, _ in self):
            raise ValueError("a key is no text")
        return dict(self)


@dataclass(slots=True, eq=False)
class Record:
    """An object that a pickle would make: of which class, of what, and what its attributes are set to."""

    of: Name
    arguments: Any
    state: Any = None


def unpickled(content: bytes, allowed: Collection[str]) -> Any:
    """Returns a pickle's value: numbers, text, None, lists, tuples, Pairs; Names and Records of what is `allowed`.

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
            if text not in allowed:
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
