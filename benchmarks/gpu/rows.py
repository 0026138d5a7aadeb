"""Rows: what a stage consists of, the file that they are written to, and the process that takes them."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import importlib
import io
import json
import os
import signal
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from datetime import UTC, datetime
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

import torch

from layerwise.measure.conditions import modes

Found = dict[str, Any]  # of a row, as JSON; "told": what the summary says of it
WORTH_S = 20.0  # less is left of a call: no row is begun


@dataclass(frozen=True, slots=True)
class Setting:
    """What all rows know. device: cuda or cpu; out: the folder."""

    device: str
    tiny: bool
    out: str

    @property
    def where(self) -> torch.device:
        """The one device."""
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def profile(self) -> str:
        """The file that stage `runs` begins, and `layers` adds to."""
        return str(Path(self.out) / "profile.json")

    def base(self) -> str:
        """The profile to predict with: this device's, where it has been measured, else a built-in one."""
        return self.profile if Path(self.profile).exists() else "cpu" if self.device == "cpu" else "h100"


class Row(NamedTuple):
    """One measurement. limit_s: then it is ended, and has failed."""

    name: str
    take: Callable[[], Found]
    limit_s: float = 240.0


class Results:
    """The rows so far, by stage and name; a line of JSON each in a file, written as they come."""

    def __init__(self, setting: Setting, *, again: bool = False) -> None:
        """again: without the rows that failed."""
        self.setting, self.path = setting, Path(setting.out) / "results.jsonl"
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        rows = [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]  # a call may have been killed
        if any((row["device"], row["tiny"]) != (setting.device, setting.tiny) for row in rows):
            raise SystemExit(f"benchmarks.gpu: {self.path} has rows of another --device or --tiny: another --out")
        self.rows = {(row["stage"], row["row"]): row for row in rows if not (again and "error" in row)}
        self.path.write_text("".join(json.dumps(row) + "\n" for row in self.rows.values()), encoding="utf-8")

    def add(self, stage: str, name: str, begun_s: float, found: Found) -> None:
        """Writes a row, begun at `begun_s` of the monotonic clock."""
        seconds = round(time.monotonic() - begun_s, 1)
        about = {"stage": stage, "row": name, "seconds": seconds, "date": f"{datetime.now(UTC):%F %T}"}
        row = self.rows[stage, name] = {**about, "device": self.setting.device, "tiny": self.setting.tiny, **found}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{stage:8} {name:34} {seconds:6.1f} s  {found['told']}", flush=True)

    def take(self, stage: str, rows: str, until_s: float) -> list[str]:
        """Takes a stage's rows, those of `module:function`; returns the names of those that the time did not do for.

        In a process that is replaced after an error: CUDA does not recover from all.
        """
        try:
            wanted = [row for row in rows_of(rows, self.setting) if (stage, row.name) not in self.rows]
        except Exception as error:
            self.add(stage, "its rows", time.monotonic(), failure(f"{type(error).__name__}: {error}"))
            return []
        worker = None
        try:
            for number, row in enumerate(wanted):
                begun_s = time.monotonic()
                if (rest_s := until_s - begun_s) < WORTH_S:
                    return [left.name for left in wanted[number:]]
                worker = worker or Worker(self.setting)
                found = worker.take(rows, row.name, min(row.limit_s, rest_s))
                if found is None and row.limit_s > rest_s:
                    return [left.name for left in wanted[number:]]
                found = found or failure(f"took more than {row.limit_s:g} s")
                self.add(stage, row.name, begun_s, found)
                if "error" in found:
                    worker = worker.end()
        finally:
            if worker:
                worker.end()
        return []


class Worker:
    """A process that takes rows. The ranks that it starts are of its process group, and end with it."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._pool = ProcessPoolExecutor(1, get_context("spawn"), begin, (setting,))
        self._pool.submit(os.getpid).result()
        (self._process,) = self._pool._processes.values()

    def take(self, rows: str, name: str, limit_s: float) -> Found | None:
        """None where it takes longer."""
        try:
            return self._pool.submit(take, rows, name, self._setting).result(limit_s)
        except TimeoutError:
            return None
        except BrokenProcessPool:
            until = time.monotonic() + 5
            while self._process.exitcode is None and time.monotonic() < until:
                time.sleep(0.01)  # the pool's own thread waits for the process, too, and one of two learns how it ended
            return failure(f"its process ended with {self._process.exitcode}")

    def end(self) -> None:
        """With all that it has started."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid or 0, signal.SIGKILL)
        self._pool.shutdown()


def rows_of(where: str, setting: Setting) -> list[Row]:
    """What `module:function` lists."""
    module, _, function = where.partition(":")
    rows: list[Row] = getattr(importlib.import_module(module), function)(setting)
    return rows


def begin(setting: Setting) -> None:
    """In the process, first."""
    die_with_parent()
    os.setpgid(0, 0)
    if setting.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, ranks would take it
        torch.set_num_threads(1)


def take(rows: str, name: str, setting: Setting) -> Found:
    """In the process: takes the row of this name."""
    torch.manual_seed(0)
    gc.collect()
    try:
        with modes("float32", "off", False):
            found = next(row for row in rows_of(rows, setting) if row.name == name).take()
        if setting.device == "cuda":
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
    except (Exception, SystemExit) as error:
        traceback.print_exc()
        found = failure(f"{type(error).__name__}: {error}")
    return found


def die_with_parent() -> None:
    """Has Linux kill this process when the one that started it has ended."""
    ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def failure(text: str) -> Found:
    """The first line of an error; of another process's, whose traceback it is, also the last."""
    first, *more = [line.strip() for line in text.splitlines() if line.strip()] or ["it failed"]
    line = (f"{first} … {more[-1]}" if more else first)[:400]
    return {"error": line, "told": f"FAILED: {line}"}


def absent(what: str) -> Found:
    """Of a row that cannot be taken here."""
    return {"absent": what, "told": f"NOT THERE: {what}"}


def printed(main: Callable[[list[str]], int], arguments: list[str]) -> Any:
    """What a command of layerwise's prints as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    if code:
        raise RuntimeError(f"{arguments} ended with {code}")
    return json.loads(out.getvalue())
