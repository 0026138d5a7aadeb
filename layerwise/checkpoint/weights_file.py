"""A .safetensors file as a state dict whose tensors are read when, and as far as, they are asked for."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, cast

from safetensors import SafetensorError, safe_open

from layerwise.errors import LayerwiseError

if TYPE_CHECKING:
    from torch import Tensor

BLOCKS: Final = 64  # that are read of a file to tell it from another
BLOCK_BYTES: Final = 1 << 16


class _Lazy:
    """One tensor of a file: its shape is known, its slices are read. A rank never holds more than its box."""

    def __init__(self, slices: Any) -> None:
        self._slices = slices
        self.shape = tuple(slices.get_shape())

    def __getitem__(self, index: Any) -> Tensor:
        return cast("Tensor", self._slices[index])


class _File(Mapping[str, "Tensor"]):
    def __init__(self, file: Any) -> None:
        self._file = file
        self._names = dict.fromkeys(file.keys())

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        lazy = _Lazy(self._file.get_slice(name))
        return cast("Tensor", lazy if lazy.shape else self._file.get_tensor(name))

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
