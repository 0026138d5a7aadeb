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
    """Returns the built-in profile of that name, else the one in that file.

    Args:
        name_or_path: "h100", "p100", ... (`names()`), or a file that `layerwise measure` has written.

    Returns:
        The profile; `Profile.device_graph(gpus)` is a machine of so many devices.

    Raises:
        LayerwiseError: There is no such profile (with the nearest names), or the file is not a sound profile (with the
            path of the field).

    Examples:
        >>> load("p100").device_graph(8).count
        8
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


def planned(named: str, given: str | None) -> Profile:
    """The profile that a plan names, or `given`, which the user gives for it.

    A plan is data and may come from anybody. LayerwiseError where it names a file which the user does not name, too.
    """
    if given is None and named not in names():
        raise LayerwiseError(
            f"the plan was found with profile {named!r}, which is a file, and a plan has none read: give --profile "
            "with the file that it is"
        )
    return load(given or named)


def save(profile: Profile, path: str | os.PathLike[str]) -> None:
    """Write a profile to a file, whole or not at all.

    Raises LayerwiseError where `load` would refuse the file, and where it cannot be written.
    """
    text = write(profile)
    parse(text, os.fspath(path))
    write_text(path, text)
