"""Reader: a checkpoint's folder, which its seal (`checkpoint.json`) describes, and the file that makes one so."""

from __future__ import annotations

import hashlib
import json
import os
import re
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from layerwise.checkpoint.shards import ShardReader
from layerwise.errors import LayerwiseError
from layerwise.files import JSON, read_json
from layerwise.tensorfile import sync_folder
from layerwise.version import __version__

SEAL: Final = "checkpoint.json"
FORMAT, VERSION = "layerwise-checkpoint", 4
FILE = re.compile(r"rank-\d{5,}\.safetensors")  # and nothing else: a name may not lead out of the folder
ERRORS = (AttributeError, LookupError, MemoryError, OverflowError, RuntimeError, TypeError, ValueError, SafetensorError)


class Reader(ShardReader):
    """The reader of a checkpoint; of tensors only what is asked for is read, and nothing is unpickled.

    about: what `save` knew besides the tensors. files: their SHA-256, by name. digest: of the whole checkpoint.
    """

    def __init__(self, folder: Path) -> None:
        """Raises LayerwiseError unless all that describes it is whole, unaltered and of this version."""
        self.folder, self.where = folder, f"checkpoint {os.fspath(folder)!r}"
        self._check_own(SEAL)
        raw = read_json(folder / SEAL, "checkpoint")
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise LayerwiseError(f"{self.where} is not a layerwise checkpoint: its {SEAL} does not say so")
        if raw.get("version") != VERSION:
            raise LayerwiseError(
                f"{self.where} has version {raw.get('version')!r}, and this layerwise reads version {VERSION}: make a "
                "file of weights of it by `layerwise export` of the layerwise that wrote it, and start with --weights"
            )
        self.digest = str(raw.pop("checksum", None))
        if self.digest != checksum(raw):
            raise LayerwiseError(f"{self.where} is damaged: {SEAL} was altered since it was written; take an older one")
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
        """Raises LayerwiseError if a file of the checkpoint is a link, or no file: it may lie anywhere, and block."""
        path = self.folder / name
        try:
            plain = stat.S_ISREG(path.lstat().st_mode)
        except OSError as error:
            raise self._unreadable(name, error.strerror) from None
        if not plain:
            raise LayerwiseError(
                f"checkpoint file {os.fspath(path)!r} is a link, or no plain file: a checkpoint's files lie in its own "
                "folder; copy it there"
            )

    @contextmanager
    def sense(self, name: str) -> Iterator[None]:
        """Makes what is not as expected in this file a LayerwiseError, within it."""
        try:
            yield
        except LayerwiseError:
            raise
        except ERRORS as error:
            raise LayerwiseError(f"{self.where} is damaged: {name} makes no sense ({error!r})") from None

    def verify(self, files: Iterable[str]) -> None:
        """Raises LayerwiseError unless these files are, byte for byte, those that were written."""
        for name in files:
            try:
                with (self.folder / name).open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
            except OSError as error:
                raise self._unreadable(name, error.strerror) from None
            if digest != self.files[name]:
                raise self._unreadable(name, "it is not what was written (SHA-256)")

    def _unreadable(self, name: str, reason: str | None) -> LayerwiseError:
        path = os.fspath(self.folder / name)
        return LayerwiseError(f"checkpoint file {path!r} is damaged or gone: {reason}; take an older checkpoint")


def seal(folder: Path, about: Mapping[str, JSON], files: Mapping[str, str]) -> None:
    """Makes the files of the ranks, of which this is the SHA-256, a checkpoint that is on disk when this returns.

    Raises LayerwiseError if the ranks contradict each other, or elements are missing.
    """
    try:
        ShardReader(folder, files)
    except ValueError as error:
        raise LayerwiseError(f"the ranks do not hold all of the state: {error}") from None
    written_by = {"layerwise": __version__, "torch": torch.__version__}
    body: dict[str, JSON] = {"format": FORMAT, "version": VERSION, "written_by": written_by}
    body |= {"about": about, "files": files}
    with (folder / SEAL).open("w", encoding="utf-8") as out:
        json.dump({**body, "checksum": checksum(body)}, out, allow_nan=False)
        out.flush()
        os.fsync(out.fileno())
    sync_folder(folder)


def checksum(body: Mapping[str, JSON]) -> str:
    """Returns SHA-256 of what is written into `checkpoint.json`."""
    return hashlib.sha256(json.dumps(body, allow_nan=False).encode()).hexdigest()
