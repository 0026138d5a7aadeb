"""Answers of earlier runs: files, each named by a digest of all that it follows from, layerwise's code included.

A file is read only if it is whole: it carries a digest of what it says. Nothing in it is ever executed.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import stat
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from functools import cache
from importlib.metadata import version
from pathlib import Path
from types import UnionType
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from layerwise.errors import LayerwiseError, shown
from layerwise.files import parse_json, write_text
from layerwise.version import __version__

ANSWERS = "answers"  # the folder of these files, inside the cache's
LOCKS = "locks"  # of searches that are under way, a byte each
PATIENCE_S, POLL_S = 60.0, 0.05  # for one of them
MOST_BYTES = 64 << 20  # of all of them: the oldest go
PACKAGE = Path(__file__).parent
T = TypeVar("T")


class UnkeyedError(Exception):
    """The answer follows from something whose value cannot be told, such as an operator of the user's own."""


def folder() -> Path:
    """The folder of what layerwise keeps for later runs: $LAYERWISE_CACHE, else layerwise in the user's cache.

    A user without a home, as in a container, has one among temporary files, where nobody else may have made it.
    LayerwiseError where somebody has.
    """
    if named := os.environ.get("LAYERWISE_CACHE"):
        return Path(named)
    if home := os.environ.get("XDG_CACHE_HOME"):
        return Path(home) / "layerwise"
    try:
        return Path.home() / ".cache" / "layerwise"
    except RuntimeError:
        place = Path(tempfile.gettempdir()) / f"layerwise-{os.getuid()}"
        with contextlib.suppress(OSError):  # where it cannot be, whoever writes there says so
            place.mkdir(mode=0o700)
        status = place.lstat() if os.path.lexists(place) else None
        if status and (not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022):
            reason = "is a link, or others may write into it: set LAYERWISE_CACHE to a folder of your own"
            raise LayerwiseError(f"the cache's folder {os.fspath(place)!r} {reason}") from None
        return place


class Answers:
    """Keeps answers in files. `say` is told, a line each, what is of no use or cannot be kept."""

    def __init__(self, place: Path, say: Callable[[str], None], most_bytes: int = MOST_BYTES) -> None:
        self.place, self.say, self.most_bytes = place, say, most_bytes

    def find(self, key: str) -> Any:
        """The answer, as JSON; None where there is none."""
        path = self._path(key)
        try:
            digest, _, text = path.read_text(encoding="utf-8").partition("\n")
            if digest != _digest(text):
                raise LayerwiseError("it was altered since it was written")
            answer = parse_json(text, "it")
        except FileNotFoundError:
            return None
        except (LayerwiseError, OSError, ValueError) as error:  # ValueError: not text
            self._of_no_use(key, str(error))
            return None
        with contextlib.suppress(OSError):
            os.utime(path)  # what is used is not old
        return answer

    def keep(self, key: str, answer: object) -> None:
        """Keeps an answer, which JSON can hold."""
        try:
            text = json.dumps(answer, allow_nan=False)
            self.place.mkdir(parents=True, exist_ok=True)
            write_text(self._path(key), f"{_digest(text)}\n{text}")
            self._make_room()
        except (LayerwiseError, OSError, TypeError, ValueError) as error:  # the last two: JSON cannot hold it
            self.say(f"the answer is not kept for later runs: {error}")

    def recalled(self, key: str, find: Callable[[], T], write: Callable[[T], object], read: Callable[[Any], T]) -> T:
        """The answer that is kept; where none is, or `read` cannot read it, what `find` finds, which is kept.

        Processes that ask for the same at once, as equal groups of ranks do, wait for the first of them.
        """
        with self._locked(key):
            cached = self.find(key)
            if cached is not None:
                try:
                    return read(cached)
                except (AttributeError, IndexError, KeyError, LayerwiseError, TypeError, ValueError) as error:
                    self._of_no_use(key, f"{type(error).__name__}: {error}")
            answer = find()
            self.keep(key, write(answer))
            return answer

    @contextlib.contextmanager
    def _locked(self, key: str) -> Iterator[None]:
        """Holds the lock of a key, which one process has at a time; goes on without it after PATIENCE_S."""
        with contextlib.ExitStack() as stack:
            with contextlib.suppress(OSError):
                self.place.mkdir(parents=True, exist_ok=True)
                file, until = stack.enter_context((self.place / LOCKS).open("ab")), time.monotonic() + PATIENCE_S
                while time.monotonic() < until:
                    with contextlib.suppress(BlockingIOError):
                        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, int(key[:7], 16))
                        break
                    time.sleep(POLL_S)
            yield

    def _of_no_use(self, key: str, why: str) -> None:
        """Says that an answer is found anew, and why."""
        self.say(f"the cache's file {self._path(key)} is of no use, so the answer is found anew: {why}")

    def _path(self, key: str) -> Path:
        return self.place / f"{key}.json"

    def _make_room(self) -> None:
        """Removes the oldest files while all of them are too many bytes. Others may do the same."""
        files = list[tuple[float, int, Path]]()
        for path in self.place.glob("*.json"):
            with contextlib.suppress(FileNotFoundError):
                status = path.stat()
                files.append((status.st_mtime, status.st_size, path))
        total = sum(size for _, size, _ in files)
        for _, size, path in sorted(files)[:-1]:
            if total <= self.most_bytes:
                break
            path.unlink(missing_ok=True)
            total -= size


def answers(*, wanted: bool = True) -> Answers | None:
    """The user's own; None where they are not wanted, as $LAYERWISE_NO_CACHE says, too."""
    if not wanted or os.environ.get("LAYERWISE_NO_CACHE"):
        return None

    def say(line: str) -> None:
        print(f"layerwise: {shown(line)}", file=sys.stderr)

    try:
        return Answers(folder() / ANSWERS, say)
    except (LayerwiseError, OSError) as error:
        say(f"no answers of earlier runs are used: {error}")
        return None


def restored(kind: Any, value: Any) -> Any:
    """A value of this type, of what JSON has for it: dataclasses, tuples, dictionaries, numbers and text.

    TypeError where it is of another type: a file's digest may be anybody's.
    """
    parts = get_args(kind)
    if is_dataclass(kind):
        hints = get_type_hints(kind)
        if type(value) is dict and value.keys() <= hints.keys():
            return kind(**{name: restored(hints[name], item) for name, item in value.items()})  # type: ignore[operator]
    elif get_origin(kind) is tuple and type(value) is list:
        kinds = parts[:1] * len(value) if parts[-1] is Ellipsis else parts
        return tuple(restored(part, item) for part, item in zip(kinds, value, strict=True))
    elif get_origin(kind) is dict and type(value) is dict:
        return {name: restored(parts[1], item) for name, item in value.items()}
    elif get_origin(kind) is UnionType:
        return None if value is None else restored(parts[0], value)
    elif kind is float and type(value) in (int, float):
        return float(value)
    elif type(value) is kind:
        return value
    raise TypeError(f"a {type(value).__name__} stands where a {kind} belongs")


def key_of(*facts: object) -> str:
    """The name of what follows from these facts, from layerwise's code, and from numpy's arithmetic.

    Raises UnkeyedError where a fact is of another class than layerwise's own dataclasses and what JSON has.
    """
    plain = [__version__, _code(), version("numpy"), *map(_plain, facts)]
    return _digest(json.dumps(plain))[:32]


@cache
def _code() -> str:
    """SHA-256 of layerwise's sources: what is developed has one version for long."""
    sources = sorted(PACKAGE.rglob("*.py"))
    together = hashlib.sha256()
    for path in sources:
        together.update(f"{path.relative_to(PACKAGE)}\0".encode() + path.read_bytes() + b"\0")
    return together.hexdigest()


def _plain(value: object) -> object:
    """The value as JSON has it: equal values give the same, others another."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    name = f"{type(value).__module__}.{type(value).__qualname__}"
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    if isinstance(value, Mapping):
        pairs = [[_plain(key), _plain(item)] for key, item in value.items()]
        return {"": sorted(pairs, key=json.dumps)}
    if isinstance(value, frozenset | set):
        return {"": sorted(map(_plain, value), key=json.dumps)}
    if name.startswith("layerwise.") and isinstance(value, Enum):
        return {name: value.name}
    if name.startswith("layerwise.") and is_dataclass(value):
        return {name: [_plain(getattr(value, field.name)) for field in fields(value) if field.compare]}
    raise UnkeyedError(name)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()
