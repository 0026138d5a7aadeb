"""Reader: reads a checkpoint's folder, which its seal (`checkpoint.json`) describes; `seal` writes that file."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Final

import torch

from layerwise.checkpoint.shards import ShardReader
from layerwise.errors import LayerwiseError, foreign
from layerwise.files import JSON, read_json
from layerwise.tensorfile import sync_folder
from layerwise.version import __version__

SEAL: Final = "checkpoint.json"
FORMAT, VERSION = "layerwise-checkpoint", 4
FILE = re.compile(r"rank-\d{5,}\.safetensors")  # no other names: they must not lead out of the folder


class Reader(ShardReader):
    """The reader of a checkpoint. It reads only the tensors that are asked for, and unpickles nothing.

    about: what `save` stored besides tensors. files: their SHA-256, by name. digest: of the whole checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Raises LayerwiseError unless its description is complete, unaltered and of this version."""
        self.folder, self.where = folder, f"checkpoint {os.fspath(folder)!r}"
        self._check_own(SEAL)
        raw = read_json(folder / SEAL, "checkpoint")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise LayerwiseError(f"{self.where} is not a layerwise checkpoint: its {SEAL} has another format")
        if raw.get("version") != VERSION:
            raise LayerwiseError(
                f"{self.where} has version {raw.get('version')!r}, but this layerwise reads version {VERSION}: export "
                "its weights with `layerwise export` of the version that wrote it, and start with --weights"
            )
        self.digest = str(raw.pop("checksum", None))
        if self.digest != checksum(raw):
            raise LayerwiseError(f"{self.where} is damaged: {SEAL} was altered after it was written; use an older one")
        with self.sense(SEAL):
            self.files = {name: str(sha) for name, sha in raw["files"].items()}
            self.about: Mapping[str, Any] = dict(raw["about"])
            if not all(map(FILE.fullmatch, self.files)):
                raise ValueError(f"files {list(self.files)}")
        for name in self.files:
            self._check_own(name)
        with self.sense("a file of tensors"):
            super().__init__(folder, self.files)

    def _check_own(self, name: str) -> None:
        """Raises LayerwiseError if a file of the checkpoint is a link or not a plain file: it could lead anywhere, or
        block.
        """
        path = self.folder / name
        try:
            plain = stat.S_ISREG(path.lstat().st_mode)
        except OSError as error:
            raise self._unreadable(name, error.strerror) from None
        if not plain:
            raise LayerwiseError(
                f"checkpoint file {os.fspath(path)!r} is a link or not a plain file, but a checkpoint's files must lie "
                "in its own folder: copy it there"
            )

    def sense(self, name: str) -> AbstractContextManager[None]:
        """Returns a context that turns errors about unexpected content in this file into a LayerwiseError."""
        return foreign(f"{self.where} is damaged: {name} makes no sense")

    def verify(self, files: Iterable[str]) -> None:
        """Raises LayerwiseError unless these files are, byte for byte, as they were written."""
        for name in files:
            try:
                with (self.folder / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise self._unreadable(name, error.strerror) from None
            if digest != self.files[name]:
                raise self._unreadable(name, "its content has changed (SHA-256)")

    def _unreadable(self, name: str, reason: str | None) -> LayerwiseError:
        path = os.fspath(self.folder / name)
        return LayerwiseError(f"checkpoint file {path!r} is damaged or missing: {reason}; use an older checkpoint")


def seal(folder: Path, about: Mapping[str, JSON], files: Mapping[str, str]) -> None:
    """Turns the ranks' files, with these SHA-256, into a checkpoint, which is on disk when this returns.

    Raises LayerwiseError if ranks contradict each other, or elements are missing.
    """
    try:
        ShardReader(folder, files)
    except ValueError as error:
        raise LayerwiseError(f"the ranks together do not hold the full state: {error}") from None
    written_by = {"layerwise": __version__, "torch": torch.__version__}
    body: dict[str, JSON] = {"format": FORMAT, "version": VERSION, "written_by": written_by}
    body |= {"about": about, "files": files}
    with (folder / SEAL).open("w", encoding="utf-8") as out:
        json.dump({**body, "checksum": checksum(body)}, out, allow_nan=False)
        out.flush()
        os.fsync(out.fileno())
    sync_folder(folder)


def checksum(body: Mapping[str, JSON]) -> str:
    """Returns the SHA-256 of the content of `checkpoint.json`."""
    return hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()
