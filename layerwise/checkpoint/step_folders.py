"""The folders of a run's checkpoints: finds, creates and removes them.

    DIR/step-00000012/             complete: it gets this name once all of it is on disk
    DIR/.step-00000012.tmp-1f3a/   being written, or left by a crash: a save of this step or a later one removes it
    DIR/.step-00000012.replaced    complete, but put aside while another one of the same step takes its name

None of these may be a link: its target must not be renamed or removed.
"""

from __future__ import annotations

import os
import re
import shutil
import uuid
from pathlib import Path

from layerwise.checkpoint.reader import SEAL
from layerwise.errors import LayerwiseError
from layerwise.tensorfile import sync_folder

_COMPLETE = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_TEMPORARY = re.compile(r"\.step-(\d{8,})\.tmp-\w+")


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the complete checkpoint of the highest step in DIR, or None."""
    steps = _complete(Path(directory))
    return steps[max(steps)] if steps else None


def find(checkpoint: str | os.PathLike[str]) -> Path:
    """Returns the latest checkpoint in this folder, or the folder itself. Raises LayerwiseError if neither is one."""
    path = Path(checkpoint)
    if (folder := latest(path)) is not None:
        return folder
    if (path / SEAL).is_file():
        return path
    what = "the folder has no complete checkpoint (step-...)" if path.exists() else "there is no such folder"
    raise LayerwiseError(f"checkpoint {os.fspath(path)!r}: {what}; pass a step's folder or its parent")


def begin(directory: Path, steps: int) -> Path:
    """Creates DIR and an empty temporary folder for a step's checkpoint; removes what crashes have left there.

    What is there of later steps may be another run's, which someone has started with the same folder, and stays.
    """
    directory.mkdir(parents=True, exist_ok=True)
    _complete(directory)  # reports links before anything is written
    for path in directory.iterdir():
        if (left := _TEMPORARY.fullmatch(path.name)) and int(left[1]) <= steps:
            folder = path.is_dir() and not path.is_symlink()
            shutil.rmtree(path, ignore_errors=True) if folder else path.unlink(missing_ok=True)
    temporary = _temporary(directory, steps)
    temporary.mkdir()
    return temporary


def commit(temporary: Path, steps: int, keep: int) -> Path:
    """Turns the temporary folder, which is on disk, into its step's checkpoint; deletes all but the newest `keep`.

    A crash at any point leaves either this checkpoint or the earlier ones. The new one stays, whatever its step.
    """
    directory = temporary.parent
    final, aside = directory / _name(steps), directory / f".{_name(steps)}.replaced"
    if final.exists():
        _remove(aside, steps)
        final.rename(aside)
    temporary.rename(final)
    sync_folder(directory)
    _remove(aside, steps)
    complete = _complete(directory)
    for old in sorted(complete)[:-keep]:
        if complete[old] != final:
            _remove(complete[old], old)
    return final


def _complete(directory: Path) -> dict[int, Path]:
    """Returns the complete checkpoints by step."""
    complete: dict[int, Path] = {}
    try:
        for path in sorted(directory.iterdir()):  # .step sorts before step
            match = _COMPLETE.fullmatch(path.name)
            if match and (path.is_symlink() or (path.exists() and not path.is_dir())):  # a pipe would block
                what = "a link" if path.is_symlink() else "no folder"
                raise LayerwiseError(
                    f"checkpoints {os.fspath(directory)!r}: {path.name} is {what}: replace it by the folder itself, or "
                    "remove it"
                )
            if match and (path / SEAL).is_file():
                complete[int(match[1] or match[2])] = path
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, LayerwiseError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise LayerwiseError(f"checkpoints {os.fspath(directory)!r} cannot be read: {reason}") from None
    return complete


def _name(steps: int) -> str:
    return f"step-{steps:08d}"


def _temporary(directory: Path, steps: int) -> Path:
    return directory / f".{_name(steps)}.tmp-{uuid.uuid4().hex[:8]}"


def _remove(path: Path, steps: int) -> None:
    """Removes a checkpoint, renamed first so that a half-removed one does not look complete. Failures are ignored."""
    try:
        doomed = path.rename(_temporary(path.parent, steps))
    except OSError:
        return
    shutil.rmtree(doomed, ignore_errors=True)
