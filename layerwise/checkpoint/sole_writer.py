"""One run at a time writes checkpoints into a folder.

It holds a lock on DIR/.writer, which the system frees however the process ends: a run that was killed blocks no other.
"""

from __future__ import annotations

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from layerwise.errors import LayerwiseError

MARK: Final = ".writer"
_held: set[Path] = set()  # by this process


@contextmanager
def sole_writer(directory: str | os.PathLike[str]) -> Iterator[None]:
    """Within it no other process writes into DIR, which is made; afterwards it is removed where it has no checkpoint.

    LayerwiseError where another process writes there; OSError where nothing can be written. Never waits. Where the file
    system knows no locks, it is only found out whether files can be written.
    """
    folder = Path(os.path.realpath(directory))
    mark = folder / MARK
    if mark in _held:
        yield
        return
    made = [one for one in (folder, *folder.parents) if not one.exists()]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = _lock(mark, os.fspath(directory))
        _held.add(mark)
        try:
            yield
        finally:
            _held.discard(mark)
            with suppress(OSError):
                mark.unlink()  # while it is locked: whoever has opened it meanwhile sees that it is gone
            os.close(lock)
    finally:
        for one in made:
            with suppress(OSError):  # there are checkpoints in it
                one.rmdir()


def _lock(mark: Path, directory: str) -> int:
    """The descriptor of the locked file. A lock of fcntl's is not handed on to processes forked from this one."""
    while True:
        lock = os.open(mark, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in (errno.EACCES, errno.EAGAIN):
                who = os.read(lock, 200).decode(errors="replace").strip() or "its process is not known"
                os.close(lock)
                raise LayerwiseError(
                    f"another run is writing checkpoints into {directory!r} ({who}): give every run a folder of its "
                    "own, or wait until that one has ended"
                ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(mark.stat(), os.fstat(lock)):
                break
        os.close(lock)  # its holder has just ended and removed it
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()}\n".encode())
    return lock
