"""What is where in a checkpoint: torch.distributed.checkpoint's `.metadata`, read without running what is in it.

It is a pickle. The only things that may be made of it are DCP's own records of shapes, types and places, and numbers
and text; any other name in it is refused. All that the records say is checked before it is used.
"""

from __future__ import annotations

import io
import pickle
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import PurePosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem
from torch.distributed.checkpoint import metadata as records

from layerwise.geometry import Box
from layerwise.tensorfile import DTYPES, Spec

FILE = re.compile(r"__\d+_\d+\.distcp")  # and nothing else: a name may not lead out of the folder
RECORDS = (
    "Metadata", "TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata", "TensorProperties",
    "MetadataIndex", "StorageMeta", "_MEM_FORMAT_ENCODING",
)  # fmt: skip
KNOWN: Mapping[tuple[str, str], Any] = {
    **{(records.__name__, name): getattr(records, name) for name in RECORDS},
    **{("torch", str(dtype).removeprefix("torch.")): dtype for dtype in DTYPES},
    (filesystem.__name__, "_StorageInfo"): filesystem._StorageInfo,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("torch", "Size"): torch.Size,
    ("pathlib", "PosixPath"): PurePosixPath,
    ("pathlib._local", "PosixPath"): PurePosixPath,
}


@dataclass(frozen=True, slots=True)
class Place:
    """Where something is that torch.save wrote."""

    file: str
    offset: int  # in bytes
    length: int


@dataclass(slots=True)
class Stored:
    """A tensor, by the boxes that tile it."""

    spec: Spec
    boxes: list[tuple[Box, Place]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Description:
    """By name what a checkpoint holds: tensors, and values that are none."""

    tensors: dict[str, Stored]
    values: dict[str, Place]


def read_description(content: bytes) -> Description:
    """Of a `.metadata`. ValueError and the like where it is none, or contradicts itself."""
    found = _Records(io.BytesIO(content)).load()
    if not isinstance(found, records.Metadata):
        raise ValueError("it is no description of a checkpoint")
    places = {
        (index.fqn, None if index.offset is None else tuple(index.offset)): _place(info)
        for index, info in found.storage_data.items()
    }
    made = Description({}, {})
    for name, one in found.state_dict_metadata.items():
        if isinstance(one, records.BytesStorageMetadata):
            made.values[str(name)] = places[name, None]
            continue
        shape, dtype = tuple(one.size), one.properties.dtype
        if dtype not in DTYPES:
            raise ValueError(f"{name!r} is of type {dtype}")
        boxes = [_box(name, chunk, shape) for chunk in one.chunks]
        made.tensors[str(name)] = Stored((shape, dtype), [(box, places[name, box.lo]) for box in boxes])
        check_whole(str(name), shape, boxes)
    return made


def check_whole(name: str, shape: tuple[int, ...], boxes: list[Box]) -> None:
    """ValueError where some are missing: they are disjoint, so all are there where they have as many elements."""
    saved, volume = sum(box.volume for box in boxes), prod(shape)
    if saved != volume:
        raise ValueError(f"{saved} of the {volume} elements of {name!r} are there")


def _box(name: str, chunk: records.ChunkStorageMetadata, shape: tuple[int, ...]) -> Box:
    sizes, lo = tuple(chunk.sizes), tuple(chunk.offsets)
    inside = (0 <= a <= a + b <= n for a, b, n in zip(lo, sizes, shape, strict=True))
    if not all(type(number) is int for number in (*sizes, *lo, *shape)) or not all(inside):
        raise ValueError(f"a box of {name!r} lies outside its shape {shape}")
    return Box(lo, tuple(a + b for a, b in zip(lo, sizes, strict=True)))


def _place(info: filesystem._StorageInfo) -> Place:
    if not FILE.fullmatch(info.relative_path):
        raise ValueError(f"file {info.relative_path!r}")
    if getattr(info, "transform_descriptors", None):
        raise ValueError("it is compressed")
    return Place(info.relative_path, int(info.offset), int(info.length))


class _Records(pickle.Unpickler):
    """Makes nothing but what is in KNOWN."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in KNOWN:
            raise ValueError(f"{module}.{name} has no place in it")
        return KNOWN[module, name]
