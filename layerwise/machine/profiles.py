"""The profiles that there are: built in (`layerwise.profiles`) or in a file."""

from __future__ import annotations

import difflib
import os
from importlib import resources
from pathlib import Path

from layerwise.errors import LayerwiseError
from layerwise.files import write_text
from layerwise.machine.profile import Profile
from layerwise.machine.schema import parse, write

DEFAULT = "h100"
BUILT_IN = "layerwise.profiles"


def names() -> list[str]:
    """The built-in profiles."""
    files = [file.name for file in resources.files(BUILT_IN).iterdir()]
    return sorted(file.removesuffix(".json") for file in files if file.endswith(".json"))


def load(name_or_path: str | os.PathLike[str] = DEFAULT) -> Profile:
    """The built-in profile of that name, else the one in that file.

    Raises LayerwiseError: no such profile (with the nearest names), a file that cannot be read, or one that is not
    a sound profile (with the file and the path of the field).
    """
    given, built_in = os.fspath(name_or_path), names()
    if given in built_in:
        return parse((resources.files(BUILT_IN) / f"{given}.json").read_text(encoding="utf-8"), f"{given}.json")
    path = Path(given)
    if not path.suffix and path.name == given and not os.path.exists(given):  # noqa: PTH110 (Path.exists raises for long names)
        near = difflib.get_close_matches(given.lower(), built_in, n=2)
        meant = f"did you mean {' or '.join(near)}? " if near else ""
        raise LayerwiseError(
            f"unknown profile {given!r}: {meant}Built in are {', '.join(built_in)}; anything else is the path of a file"
        )
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise LayerwiseError(f"profile {given}: cannot be read: {error.strerror or error}") from error
    except ValueError as error:  # not UTF-8, or a path with a NUL
        raise LayerwiseError(f"profile {given!r}: not a text file: {error}") from error
    return parse(text, given)


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, whole or not at all.

    Raises LayerwiseError where `load` would refuse the file, and where it cannot be written.
    """
    text = write(profile)
    parse(text, os.fspath(path))
    write_text(path, text)
