"""Files are read with one clear error and written whole or not at all."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from layerwise.errors import LayerwiseError

JSON = None | bool | int | float | str | Sequence["JSON"] | Mapping[str, "JSON"]
MAX_DEPTH = 200  # of JSON: what walks through it must not run out of stack


@contextlib.contextmanager
def writing(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Yields where to write what shall be at `path`: a new file beside it, renamed at the end, or removed.

    Symbolic links are followed; a pipe or a device is written to as it is. LayerwiseError where that is impossible.
    """
    try:
        target, temporary = _places(path)
        try:
            yield temporary
            if temporary != target:
                temporary.replace(target)
        finally:
            if temporary != target:
                with contextlib.suppress(OSError):
                    temporary.unlink()
    except LayerwiseError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL, a lone surrogate
        raise _unwritable(path, error) from None


def write_text(path: str | os.PathLike[str], text: str | Iterable[str]) -> None:
    """Writes a text, which may come in parts, whole or not at all. Raises LayerwiseError where that is impossible."""
    with writing(path) as temporary, temporary.open("w", encoding="utf-8") as file:
        file.writelines([text] if isinstance(text, str) else text)


def check_writable(path: str | os.PathLike[str]) -> None:
    """LayerwiseError where `write_text` would fail: before the work whose result is to be written."""
    try:
        target, temporary = _places(path)
        if temporary != target:
            temporary.unlink()
    except (OSError, ValueError) as error:  # ValueError: a path with a NUL, a lone surrogate
        raise _unwritable(path, error) from None


def _places(path: str | os.PathLike[str]) -> tuple[Path, Path]:
    """The file that is asked for, and that which is written first: an empty one beside it, to rename.

    Its name cannot be foretold and it did not exist: in a folder that others write to, a name that they know of before
    may be a link of theirs, which leads to a file of ours.
    """
    named = Path(path)
    if named.is_dir():
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
    if named.exists() and not named.is_file():
        return named, named
    target = Path(os.path.realpath(named))
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(8)}.tmp")
    os.close(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o666))
    return target, temporary


def _unwritable(path: str | os.PathLike[str], error: Exception) -> LayerwiseError:
    reason = error.strerror if isinstance(error, OSError) else None
    return LayerwiseError(f"{os.fspath(path)!r} cannot be written: {reason or error}")


def read_json(path: str | os.PathLike[str], what: str) -> object:
    """The JSON value in a file. Raises LayerwiseError for anything that is not one."""
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not a text file"
        raise LayerwiseError(f"{what} {os.fspath(path)!r} cannot be read: {reason or error}") from None
    return parse_json(text, f"{what} {os.fspath(path)!r}")


def parse_json(text: str, where: str) -> Any:
    """The JSON value that a text is; all JSON from outside is read here. `where` is how errors call the text.

    Raises LayerwiseError for what is no JSON, and for what only looks like it: NaN, numbers beyond float64, a
    member named twice, nesting beyond MAX_DEPTH.
    """
    try:
        value = json.loads(
            text,
            object_pairs_hook=_without_repeats,
            parse_constant=_no_constant,
            parse_float=_finite,
            parse_int=_integer,
        )
        if _depth(text) > MAX_DEPTH:
            raise ValueError(f"it is nested deeper than {MAX_DEPTH} levels")
    except RecursionError:
        raise LayerwiseError(f"{where} is not JSON: it is nested deeper than {MAX_DEPTH} levels") from None
    except ValueError as error:
        raise LayerwiseError(f"{where} is not JSON: {error}") from None
    return value


def _without_repeats(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Refuses a member named twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)!r} appears twice in one object")
    return members


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number of JSON")


def _finite(digits: str) -> float:
    number = float(digits)
    if not math.isfinite(number):
        raise ValueError(f"{digits[:20]} is more than a float64 holds")
    return number


def _integer(digits: str) -> int:
    _finite(digits)  # more than that is no size of anything, and converts to nothing
    return int(digits)


def _depth(text: str) -> int:
    """The depth to which a JSON text is nested."""
    brackets = re.sub(r'"[^"\\]*(?:\\.[^"\\]*)*"|[^][{}"]+', "", text)
    return max(accumulate(1 if bracket in "[{" else -1 for bracket in brackets), default=0)
