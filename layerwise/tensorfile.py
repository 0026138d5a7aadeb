"""Safetensors files: written one tensor at a time, and read as far as tensors are asked for.

safetensors' own save_file wants all tensors in memory.

The format (https://github.com/huggingface/safetensors#format): 8 bytes of little-endian header length, a JSON header
{name: {dtype, shape, data_offsets}}, then the elements, row-major.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from math import prod
from pathlib import Path
from typing import IO, Any, Final, cast

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from layerwise.errors import LayerwiseError

BLOCKS: Final = 64  # that are read of a file to tell it from another
BLOCK_BYTES: Final = 1 << 16
Spec = tuple[tuple[int, ...], torch.dtype]  # shape and element type of a tensor

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def dtype_name(dtype: torch.dtype) -> str:
    """`float32`."""
    return str(dtype).removeprefix("torch.")


DTYPE_OF = {dtype_name(dtype): dtype for dtype in DTYPES}


def write_tensors(
    path: Path, specs: Mapping[str, Spec], read: Callable[[str], Tensor], metadata: Mapping[str, str] | None = None
) -> str:
    """Writes a file of the named tensors, and metadata of them, on disk when this returns. Returns its SHA-256.

    `read` gives a tensor, on any device, when its turn comes: one copy is in memory at a time. LayerwiseError for an
    element type that the format lacks; OSError where the file cannot be written.
    """
    order = sorted(specs, key=lambda name: (-specs[name][1].itemsize, name))  # so that elements are aligned
    header: dict[str, object] = {"__metadata__": {"format": "pt", **(metadata or {})}}
    start = 0
    for name in order:
        shape, dtype = specs[name]
        if dtype not in DTYPES or name in header:
            raise LayerwiseError(f"a safetensors file cannot hold {name!r} of {dtype}: leave it out of the model")
        end = start + prod(shape) * dtype.itemsize
        header[name] = {"dtype": DTYPES[dtype], "shape": list(shape), "data_offsets": [start, end]}
        start = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    sha256 = hashlib.sha256()
    with path.open("wb") as file:
        for part in (len(text).to_bytes(8, "little"), text):
            file.write(part)
            sha256.update(part)
        for name in order:
            tensor = read(name).detach()
            assert (tuple(tensor.shape), tensor.dtype) == specs[name], name
            elements = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data
            file.write(elements)
            sha256.update(elements)
            del tensor, elements  # before the next one comes
        file.flush()
        os.fsync(file.fileno())
    return sha256.hexdigest()


def torch_save(value: object, file: IO[bytes]) -> None:
    """`torch.save` into an open file; OSError where that cannot be written (PyTorch's writer raises a RuntimeError)."""
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def sync_folder(folder: Path) -> None:
    """Returns when the names in a folder are on disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class _Lazy:
    """One tensor of a file: its shape is known, its slices are read. A rank never holds more than its box."""

    def __init__(self, slices: Any) -> None:
        self._slices = slices
        self.shape = tuple(slices.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        return cast(Tensor, self._slices[index])


class _File(Mapping[str, Tensor]):
    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = dict.fromkeys(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        lazy = _Lazy(self._file.get_slice(name))
        return cast(Tensor, lazy if lazy.shape else self._file.get_tensor(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def weights_file(path: str | os.PathLike[str]) -> Mapping[str, Tensor]:
    """The file's tensors by name, as `layerwise.run.load(weights=...)` takes them. LayerwiseError if it is none."""
    try:
        return _File(safe_open(path, framework="pt"))
    except (OSError, SafetensorError) as error:
        raise LayerwiseError(f"weights {os.fspath(path)!r} cannot be read as safetensors: {error}") from None


def fingerprint(path: str | os.PathLike[str]) -> str:
    """Tells files of weights apart: by their size and some of their blocks, the first (names, shapes) among them."""
    try:
        with Path(path).open("rb") as file:
            last = max(os.fstat(file.fileno()).st_size - BLOCK_BYTES, 0)
            digest = hashlib.sha256(str(last).encode())
            for offset in sorted({last * i // (BLOCKS - 1) for i in range(BLOCKS)}):
                file.seek(offset)
                digest.update(file.read(BLOCK_BYTES))
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL
        raise LayerwiseError(f"weights {os.fspath(path)!r} cannot be read as safetensors: {error}") from None
    return digest.hexdigest()[:12]
