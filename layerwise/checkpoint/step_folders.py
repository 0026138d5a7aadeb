"""The folders of a run's checkpoints: finds, creates and removes them, and locks DIR for one writer.

    DIR/step-00000012/             complete: it gets this name once all of it is on disk
    DIR/.step-00000012.tmp-1f3a/   being written, or left by a crash: the next save removes it
    DIR/.step-00000012.replaced    complete, but put aside while another one of the same step takes its name
    DIR/.writer                    locked by the one run that writes into DIR; the system unlocks it when that ends

None of these may be a link: its target must not be renamed or removed.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import shutil
import socket
import sys
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from layerwise.checkpoint.reader import SEAL
from layerwise.errors import LayerwiseError
from layerwise.tensorfile import sync_folder

MARK: Final = ".writer"
POLL_S = 0.1
_locked: set[Path] = set()  # by this process
_COMPLETE = re.compile(r"step-(\d{8,})|\.step-(\d{8,})\.replaced")
_TEMPORARY = re.compile(r"\.step-\d{8,}\.tmp-\w+")


def latest(directory: str | os.PathLike[str]) -> Path | None:
    """Returns the complete checkpoint of the highest step in DIR, or None."""
    steps = _complete(Path(directory))
    return steps[max(steps)] if steps else None


def find(checkpoint: str | os.PathLike[str]) -> Path:
    """Returns this checkpoint folder, or the latest one inside it. Raises LayerwiseError if there is none."""
    path = Path(checkpoint)
    try:
        exists, folder = path.exists(), path if (path / SEAL).is_file() else latest(path)
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        if isinstance(error, LayerwiseError):
            raise
        reason = error.strerror if isinstance(error, OSError) else error
        raise LayerwiseError(f"checkpoint {os.fspath(path)!r} cannot be read: {reason}") from None
    if folder is None:
        what = "there is no such folder" if not exists else "the folder has no complete checkpoint (step-...)"
        raise LayerwiseError(f"checkpoint {os.fspath(path)!r}: {what}; pass a step's folder or its parent")
    return folder


def begin(directory: Path, steps: int) -> Path:
    """Creates DIR and an empty temporary folder for a step's checkpoint; removes what crashes have left there."""
    directory.mkdir(parents=True, exist_ok=True)
    _complete(directory)  # reports links before anything is written
    for path in directory.iterdir():
        if _TEMPORARY.fullmatch(path.name):
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
    except OSError as error:
        raise LayerwiseError(f"checkpoints {os.fspath(directory)!r} cannot be read: {error.strerror}") from None
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


@contextmanager
def sole_writer(directory: str | os.PathLike[str], patience_s: float = 0.0) -> Iterator[None]:
    """Returns a context in which no other process writes into DIR, which is created, and removed if no checkpoint came.

    Raises LayerwiseError if another process still writes there after `patience_s` seconds (stderr says that it waits),
    and OSError if nothing can be written. On a file system without locks, only writing is tested.
    """
    folder = Path(os.path.realpath(directory))
    mark = folder / MARK
    if mark in _locked:
        yield
        return
    created = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        lock = _lock(mark, os.fspath(directory), patience_s)
        _locked.add(mark)
        try:
            yield
        finally:
            _locked.discard(mark)
            with suppress(OSError):
                mark.unlink()  # while locked, so that whoever has opened it meanwhile sees that it is gone
            os.close(lock)
    finally:
        for path in created:
            with suppress(OSError):  # it contains checkpoints
                path.rmdir()


def _lock(mark: Path, directory: str, patience_s: float) -> int:
    """Returns the descriptor of the locked file. fcntl locks are not inherited by forked processes."""
    until, told = time.monotonic() + patience_s, False
    while True:
        # the run before may have removed the folder, as it saved nothing
        mark.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        except FileNotFoundError:
            continue
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            taken = False
        except OSError as error:
            taken = error.errno in (errno.EACCES, errno.EAGAIN)  # otherwise the file system has no locks
        if not taken:
            with suppress(FileNotFoundError):
                if os.path.samestat(mark.stat(), os.fstat(lock)):
                    break
            os.close(lock)  # its holder has just ended and removed it
            continue
        who = os.read(lock, 200).decode(errors="replace").strip() or "unknown process"
        os.close(lock)
        text = f"another run is writing checkpoints into {directory!r} ({who})"
        if time.monotonic() >= until:
            raise LayerwiseError(f"{text}: use a separate folder for every run, or wait until that one has ended")
        if not told:
            print(f"layerwise: {text}: waiting up to {patience_s:.0f} s for it to end", file=sys.stderr, flush=True)
        told = True
        time.sleep(POLL_S)
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock
