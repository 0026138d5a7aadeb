"""Ranks act together: each does its part, or rank 0 alone while the others wait; where one fails, all raise."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Any, TypeVar

from layerwise.comm.base import Comm
from layerwise.errors import LayerwiseError
from layerwise.files import JSON

T = TypeVar("T")
BEAT_S = 1.0  # how often ranks tell each other, while one works, that they are alive


def agree(comm: Comm, act: Callable[[], tuple[T, JSON]], what: str = "") -> tuple[T, list[Any]]:
    """Has every rank act. Returns what was made here and what every rank has to tell, by rank.

    Where it fails on one rank, every rank raises a LayerwiseError that says whose failure it was (and, first, `what`);
    only a bug is raised as it is, on the rank that has it. `act` must not communicate.
    """
    failure: Exception | None = None
    try:
        result, answer = act()
        told = json.dumps({"answer": answer})
    except Exception as error:
        failure = error
        told = json.dumps({"error": _reason(error)})
    texts = comm.all_gather_text(told)
    answers = [_understood(rank, text, what) for rank, text in zip(comm.members.ranks, texts, strict=True)]
    if failure is not None and not isinstance(failure, LayerwiseError | OSError):
        raise failure
    errors = {r: answer["error"] for r, answer in zip(comm.members.ranks, answers, strict=True) if "error" in answer}
    if errors:
        rank, reason = next(iter(errors.items()))
        alike = len(errors) == comm.size and len(set(errors.values())) == 1
        raise LayerwiseError(": ".join([part for part in (what, "" if alike else f"rank {rank}", reason) if part]))
    return result, [answer["answer"] for answer in answers]


def _understood(rank: int, text: str, what: str) -> dict[str, Any]:
    """Returns what a rank says in here. Raises LayerwiseError if it is elsewhere, as its program took another way."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or len(answer) != 1 or not answer.keys() <= {"answer", "error"}:
        before = f"{what}: " if what else ""
        raise LayerwiseError(f"{before}rank {rank} does something else: every rank must be called alike")
    return answer


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename!r}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, LayerwiseError) else f"{type(error).__name__}: {error}"


def patiently(comm: Comm, act: Callable[[], tuple[T, JSON]], what: str = "") -> tuple[T, list[Any]]:
    """Does what `agree` does, however long a rank takes: it acts in a thread, while all meet every second."""
    future = in_thread(act)
    while True:
        wait([future], timeout=BEAT_S)
        if "busy" not in comm.all_gather_text("done" if future.done() else "busy"):
            return agree(comm, future.result, what)


def alone(comm: Comm, work: Callable[[], T]) -> T | None:
    """Has rank 0 do `work` while the others wait. Returns its result there, None elsewhere; all raise its error."""
    return patiently(comm, lambda: (work() if comm.rank == 0 else None, None))[0]


def in_thread(work: Callable[[], T], name: str = "layerwise") -> Future[T]:
    """Returns the future of what `work` returns or raises, in a daemon thread: Ctrl-C must not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
