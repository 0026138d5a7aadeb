"""Rows: what a stage consists of, a process to take them in, and the file that keeps what came of them."""

from __future__ import annotations

import contextlib
import gc
import importlib
import io
import json
import multiprocessing
import os
import signal
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import torch

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
        return torch.device("cuda", 0) if self.device == "cuda" else torch.device("cpu")

    @property
    def profile(self) -> str:
        """The file that stage `runs` begins, and `layers` adds to."""
        return str(Path(self.out) / "profile.json")

    def base(self) -> str:
        """The profile to predict with: this device's, where it has been made, else a built-in one."""
        return self.profile if Path(self.profile).exists() else "cpu" if self.device == "cpu" else "h100"


class Row(NamedTuple):
    """One measurement. limit_s: then it is ended, and has failed."""

    name: str
    take: Callable[[], Found]
    limit_s: float = 120.0


@dataclass
class Results:
    """The rows so far, by stage and name; a line of JSON each in a file, written as they come."""

    path: Path
    setting: Setting
    rows: dict[tuple[str, str], Found] = field(default_factory=dict)

    def __post_init__(self) -> None:
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else ""
        whole = text[: text.rfind("\n") + 1]  # a call may have been killed amid a line
        if whole != text:
            self.path.write_text(whole, encoding="utf-8")
        for row in map(json.loads, whole.splitlines()):
            if (row["device"], row["tiny"]) != (self.setting.device, self.setting.tiny):
                raise SystemExit(f"benchmarks.gpu: {self.path} has rows of another --device or --tiny: another --out")
            self.rows[row["stage"], row["row"]] = row

    def add(self, stage: str, name: str, seconds: float, found: Found) -> None:
        """Keeps a row."""
        about = {"stage": stage, "row": name, "seconds": round(seconds, 1), "date": f"{datetime.now(UTC):%F %T}"}
        row = self.rows[stage, name] = {**about, "device": self.setting.device, "tiny": self.setting.tiny, **found}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")
        print(f"{stage:8} {name:34} {seconds:6.1f} s  {found['told']}", flush=True)


@dataclass
class Workers:
    """A process a stage, replaced after an error: CUDA does not recover from all. The ranks that it starts are of its
    session, and end with it."""

    results: Results
    until_s: float  # by time.monotonic
    process: BaseProcess | None = None
    end: Connection | None = None

    def run(self, stage: str, rows: str, *, again: bool = False) -> list[str]:
        """Takes a stage's rows, those of `module:function`; the names of those that the time did not do for."""
        try:
            every = rows_of(rows, self.results.setting)
        except Exception as error:
            self.results.add(stage, "its rows", 0.0, failure(f"{type(error).__name__}: {error}"))
            return []
        known = {name: row for (of, name), row in self.results.rows.items() if of == stage}
        wanted = [row for row in every if row.name not in known or (again and "error" in known[row.name])]
        try:
            for number, row in enumerate(wanted):
                begun = time.monotonic()
                found = self._take(rows, row) if self.until_s - begun > WORTH_S else None
                if found is None:
                    return [left.name for left in wanted[number:]]
                self.results.add(stage, row.name, time.monotonic() - begun, found)
                if "error" in found:
                    self._stop()
        finally:
            self._stop()
        return []

    def _take(self, rows: str, row: Row) -> Found | None:
        """None where the call's time was over first."""
        if self.process is None or self.end is None:
            context = multiprocessing.get_context("spawn")
            self.end, theirs = context.Pipe()
            self.process = context.Process(target=serve, args=(theirs, self.results.setting, rows))
            self.process.start()
            theirs.close()
        rest_s = self.until_s - time.monotonic()
        try:
            self.end.send(row.name)
            if not self.end.poll(min(row.limit_s, rest_s)):
                return failure(f"took more than {row.limit_s:g} s") if row.limit_s <= rest_s else None
            found: Found = self.end.recv()
        except (EOFError, OSError):
            self.process.join()
            return failure(f"its process ended with {self.process.exitcode}")
        return found

    def _stop(self) -> None:
        if self.process is not None and self.process.pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)
            self.process.kill()  # it may have no session yet
            self.process.join()
        self.process = self.end = None


def rows_of(where: str, setting: Setting) -> list[Row]:
    """What `module:function` names."""
    module, _, function = where.partition(":")
    rows: list[Row] = getattr(importlib.import_module(module), function)(setting)
    return rows


def serve(end: Connection, setting: Setting, rows: str) -> None:
    """In the process: takes the rows that it is told."""
    os.setsid()
    if setting.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""  # where there is a GPU, ranks would take it
        torch.set_num_threads(1)
    takes = {row.name: row.take for row in rows_of(rows, setting)}
    while True:
        take = takes[end.recv()]  # EOFError at the end of the call
        torch.manual_seed(0)
        tensor_cores(False)
        try:
            found = take()
            if setting.device == "cuda":
                torch.cuda.synchronize()
        except (Exception, SystemExit) as error:
            traceback.print_exc()
            found = failure(f"{type(error).__name__}: {error}")
        end.send(found)
        gc.collect()
        if setting.device == "cuda" and "error" not in found:
            torch.cuda.empty_cache()


def tensor_cores(allowed: bool) -> None:
    """Whether float32 may be computed in TF32, by cuBLAS and by cuDNN."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def failure(text: str) -> Found:
    """The first line of an error; of another process's, whose traceback it is, also the last."""
    first, *more = [line.strip() for line in text.splitlines() if line.strip()] or ["it failed"]
    line = (f"{first} … {more[-1]}" if more else first)[:400]
    return {"error": line, "told": f"FAILED: {line}"}


def printed(main: Callable[[list[str]], int], arguments: list[str]) -> Any:
    """What a command of layerwise's prints as JSON."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        code = main(arguments)
    if code:
        raise RuntimeError(f"{arguments} ended with {code}")
    return json.loads(out.getvalue())
