"""Networks tried each in a process of its own, under a time limit: one that hangs or crashes is a row of the table."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess

from benchmarks.zoo.networks import package_of
from benchmarks.zoo.trial import Row, as_json, row_of, trial


def tried(wanted: Sequence[str], limit_s: float, jobs: int, dtype: str, *, timed: bool = True) -> Iterator[Row]:
    """Rows as they come, each from a process of its own, forked from one that has imported all packages."""
    context = get_context("forkserver")
    context.set_forkserver_preload(
        ["benchmarks.zoo.trial", "benchmarks.zoo.warm", *dict.fromkeys(map(package_of, wanted))]
    )
    left, running = list(reversed(wanted)), dict[Connection, tuple[str, float, BaseProcess]]()
    while left or running:
        while left and len(running) < jobs:
            mine, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_try, args=(left[-1], dtype, timed, theirs), daemon=True)
            process.start()
            theirs.close()
            running[mine] = left.pop(), time.monotonic() + limit_s, process
        soonest = min(until for _, until, _ in running.values())
        ready = wait(list(running), max(soonest - time.monotonic(), 0.0))
        for pipe, (name, until, process) in list(running.items()):
            if pipe in ready or time.monotonic() > until:
                del running[pipe]
                row = _row(name, pipe, process, limit_s) if pipe in ready else _late(name, process, limit_s)
                yield replace(row, dtype=dtype)


def _try(name: str, dtype: str, timed: bool, told: Connection) -> None:
    """In the process of one network."""
    told.send(as_json(trial(name, dtype, timed=timed)))


def _row(name: str, pipe: Connection, process: BaseProcess, limit_s: float) -> Row:
    try:
        told = pipe.recv()
    except EOFError:
        process.join(limit_s)
        return Row(name, "process", said=f"the process ended with {process.exitcode}", loud=False)
    process.join(limit_s)
    return row_of(told)


def _late(name: str, process: BaseProcess, limit_s: float) -> Row:
    process.kill()
    process.join()
    return Row(name, "process", said=f"not through after {limit_s:g} s", loud=False)
