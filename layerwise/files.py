"""Files are read with one clear error and written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable
from pathlib import Path

from layerwise.errors import LayerwiseError


def write_text(path: str | os.PathLike[str], text: str | Iterable[str]) -> None:
    """Write to a temporary file beside `path`, then rename. Raises LayerwiseError where that is impossible.

    Long texts may come in parts.
    """
    target = Path(path)
    temporary = target.with_name(f".{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.writelines([text] if isinstance(text, str) else text)
        temporary.replace(target)
    except OSError as error:
        raise LayerwiseError(f"{target} cannot be written: {error.strerror or error}") from None
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def read_json(path: str | os.PathLike[str], what: str) -> object:
    """The JSON value in a file. Raises LayerwiseError for anything that is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise LayerwiseError(f"{what} {os.fspath(path)!r} cannot be read: {reason or error}") from None
    try:
        value: object = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise LayerwiseError(f"{what} {os.fspath(path)!r} is not JSON: {error}") from None
    return value
