"""Ranks act together: each does its part, or rank 0 alone while the others wait; if one fails, all raise."""

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
BEAT_S = 1.0  # how often ranks show each other that they are alive while one works


def agree(comm: Comm, act: Callable[[], tuple[T, JSON]], what: str = "") -> tuple[T, list[Any]]:
    """Makes every rank act. Returns this rank's result, and the facts of every rank, by rank.

    If one rank fails, every rank raises a LayerwiseError that names it (after `what`); a bug is raised unchanged, on
    the rank that has it. `act` must not communicate.
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
    """Returns what a rank says in `agree`. Raises LayerwiseError if its program is elsewhere."""
    try:
        answer = json.loads(text)
    except ValueError:
        answer = None
    if not isinstance(answer, dict) or len(answer) != 1 or not answer.keys() <= {"answer", "error"}:
        before = f"{what}: " if what else ""
        raise LayerwiseError(f"{before}rank {rank} does something else: call this on every rank")
    return answer


def _reason(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename!r}: {error.strerror}" if error.filename else error.strerror
    return str(error) if isinstance(error, LayerwiseError) else f"{type(error).__name__}: {error}"


def patiently(comm: Comm, act: Callable[[], tuple[T, JSON]], what: str = "") -> tuple[T, list[Any]]:
    """Does what `agree` does, however long a rank takes: it acts in a thread, while all ranks meet every second."""
    future = in_thread(act)
    while True:
        wait([future], timeout=BEAT_S)
        if "busy" not in comm.all_gather_text("done" if future.done() else "busy"):
            return agree(comm, future.result, what)


def alone(comm: Comm, work: Callable[[], T]) -> T | None:
    """Makes rank 0 do `work` while the others wait. Returns its result there, None elsewhere; all ranks raise its
    error.
    """
    return patiently(comm, lambda: (work() if comm.rank == 0 else None, None))[0]


def in_thread(work: Callable[[], T], name: str = "layerwise") -> Future[T]:
    """Returns the future of `work` in a daemon thread: Ctrl-C must not wait for it."""
    future: Future[T] = Future()

    def run() -> None:
        try:
            future.set_result(work())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, name=name, daemon=True).start()
    return future
