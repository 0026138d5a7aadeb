"""Shards: a rank's boxes of tensors, in its own safetensors file.

The files have the layout of torch.distributed.checkpoint's HuggingFaceStorageWriter, so that its
HuggingFaceStorageReader can fill any state dict from them. They are written and read here because that writer refuses
tied and channels_last tensors and holds a second copy of everything in memory, and that reader does not report a
missing file (torch 2.11 to 2.15).
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from safetensors import safe_open
from torch import Tensor

from layerwise.geometry import Box
from layerwise.run.state.state import Shard
from layerwise.tensorfile import DTYPES, Spec, write_tensors

SHARDING: Final = "DCP_SHARDING_INFO"  # key of a file's metadata: JSON of every tensor's OFFSETS and, here, SHAPE
OFFSETS, SHAPE = "saved_offsets", "shape"  # where a box begins; the full tensor's shape
DTYPE_OF: Final = {name: dtype for dtype, name in DTYPES.items()}  # by safetensors' name
MOST_DIMS = 64  # of a tensor, in PyTorch


def file_name(rank: int) -> str:
    """Returns the name of a rank's file."""
    return f"rank-{rank:05d}.safetensors"


def written(shard: Shard) -> bool:
    """Returns whether this rank writes the shard's box: an empty one only if the full tensor is empty."""
    return shard.first and (shard.box.volume > 0 or prod(shard.shape) == 0)


def write_shards(path: Path, shards: Iterable[Shard]) -> str:
    """Writes the file, with each tensor under all its names, to disk. Returns its SHA-256.

    Raises LayerwiseError for an element type that the format lacks, and OSError if the file cannot be written.
    """
    named = {name: shard for shard in shards for name in (shard.name, *shard.aliases)}
    specs = {name: (tuple(shard.tensor.shape), shard.tensor.dtype) for name, shard in named.items()}
    sharding = {name: {OFFSETS: shard.box.lo, SHAPE: shard.shape} for name, shard in named.items()}
    metadata = {SHARDING: json.dumps(sharding), "DCP_VERSION": "1.0"}
    return write_tensors(path, specs, lambda name: named[name].tensor, metadata)


@dataclass(slots=True)
class Stored:
    """A tensor: the boxes that tile it, and the files that hold them."""

    spec: Spec
    boxes: list[tuple[Box, str]] = field(default_factory=list)


class ShardReader:
    """The tensors in the files of a folder. It reads only what is asked for."""

    def __init__(self, folder: Path, files: Iterable[str]) -> None:
        """Raises ValueError, for example, unless the files have every element of every tensor exactly once."""
        self.tensors: dict[str, Stored] = {}
        self._files: dict[str, Any] = {name: safe_open(os.fspath(folder / name), framework="pt") for name in files}
        for file, opened in self._files.items():
            sharding = json.loads(opened.metadata()[SHARDING])
            for name in opened.keys():  # noqa: SIM118 - it is no mapping
                part = opened.get_slice(name)
                lo, shape = (_numbers(sharding[name][what]) for what in (OFFSETS, SHAPE))
                box = Box(lo, tuple(a + b for a, b in zip(lo, part.get_shape(), strict=True)))
                if not all(a >= 0 and b <= n for a, b, n in zip(box.lo, box.hi, shape, strict=True)):
                    raise ValueError(f"a box of {name!r} lies outside its shape {shape}")
                stored = self.tensors.setdefault(name, Stored((shape, DTYPE_OF[part.get_dtype()])))
                if stored.spec != (shape, DTYPE_OF[part.get_dtype()]):
                    raise ValueError(f"{name!r} differs in element type or shape between files")
                stored.boxes.append((box, file))
        for name, stored in self.tensors.items():
            check_tiled(name, stored.spec[0], [box for box, _ in stored.boxes])

    def slices(self, file: str, name: str) -> Any:
        """Returns a file's part of a tensor; indexing it by slices reads those elements."""
        return self._files[file].get_slice(name)

    def fill(self, name: str, box: Box, target: Tensor) -> None:
        """Copies a box of a tensor into `target`."""
        for saved, file in self.tensors[name].boxes:
            both = saved & box
            if both.volume:
                target[both.slices(box)].copy_(self.slices(file, name)[both.slices(saved)])

    def full(self, name: str) -> Tensor:
        """Returns a full tensor."""
        shape, dtype = self.tensors[name].spec
        tensor = torch.zeros(shape, dtype=dtype)
        self.fill(name, Box.full(shape), tensor)
        return tensor


def _numbers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MOST_DIMS or not all(type(number) is int for number in value):
        raise ValueError(f"{value!r:.60} is not a list of sizes")
    return tuple(value)


def check_tiled(name: str, shape: tuple[int, ...], boxes: Sequence[Box]) -> None:
    """Raises ValueError unless every element is in exactly one of these boxes, which lie inside the shape."""
    saved, volume = sum(box.volume for box in boxes), prod(shape)
    if saved != volume:
        raise ValueError(f"only {saved} of the {volume} elements of {name!r} are stored")
    lo, hi = (np.array([getattr(box, end) for box in boxes]) for end in ("lo", "hi"))
    for box in boxes:  # with itself it shares all of its elements, with the others none
        shared = np.maximum(np.minimum(hi, box.hi) - np.maximum(lo, box.lo), 0).prod(1)
        if shared.sum() != box.volume:
            raise ValueError(f"some elements of {name!r} are stored twice, and others are missing")
