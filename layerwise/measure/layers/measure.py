"""Measuring cells within a time budget: what matters most first, kept as it goes, so that it can be taken up again."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from layerwise.cost.compute.measured import held_out_error
from layerwise.machine.layer_times import CellTime, Extents, LayerTimes
from layerwise.measure.bench import Bench, CellSpec, LossSpec, Mode, UpdateSpec
from layerwise.measure.layers.cells import Key, Wanted
from layerwise.measure.layers.cold import leave_only
from layerwise.measure.layers.step import LossBench, UpdateBench
from layerwise.measure.stopwatch import Stopwatch

SAVE_S = 2.0  # how often what was measured is written
CELL_S = 0.25  # about what one cell gets, beyond its least number of samples


class Timed(Protocol):
    """What can be measured: two parts, and what lies between one step and the next."""

    @property
    def recent(self) -> tuple[Sequence[Tensor] | None, Sequence[Tensor] | None]:
        """What a step has just made when forward, and when backward begins; None: all that is needed."""

    def forward(self) -> None: ...

    def backward(self) -> None: ...

    def forget(self) -> None: ...


@dataclass(slots=True)
class Measuring:
    """What was measured so far, and how long that took."""

    known: LayerTimes  # grows by whatever `measure` takes
    mode: Mode
    save: Callable[[LayerTimes], None]  # writes it
    budget_s: float
    call_s: float = 0.0  # of an optimizer's step, however few its parameters: counted once a step, not by layer
    spent_s: float = 0.0
    taken: int = 0  # cells measured now
    failed: dict[Key, str] = field(default_factory=dict)  # why, by cell
    _saved_at: float = field(default_factory=lambda: time.monotonic())

    def has(self, key: Key) -> bool:
        """Whether a cell needs no measuring (any more)."""
        return key[1] in self.known.cells.get(key[0], {}) or key in self.failed

    def left(self, cells: Iterable[Wanted]) -> list[Wanted]:
        """Of these, what is not measured yet, the longest first."""
        return sorted((cell for cell in cells if not self.has(cell.key)), key=lambda cell: -cell.predicted_s)

    def measure(self, cells: Iterable[Wanted], after: Callable[[Wanted], None] = lambda _: None) -> None:
        """Measures in order what fits into the rest of the budget; `after` each, measured or not."""
        try:
            for cell in cells:
                stopwatch = Stopwatch(self.mode.device, CELL_S)
                least_s = cell.predicted_s * (stopwatch.least + stopwatch.warm)
                if not self.has(cell.key) and self.spent_s + least_s <= self.budget_s:
                    self._take(cell, stopwatch)
                after(cell)
        finally:
            self.known = replace(self.known, held_out_error=held_out_error(self.known))
            self.keep()

    def _take(self, cell: Wanted, stopwatch: Stopwatch) -> None:
        started = time.monotonic()
        try:
            cell_time = timed(cell, self.mode, stopwatch)
            if isinstance(cell.spec, UpdateSpec):
                cell_time = replace(
                    cell_time,
                    forward_s=max(0.0, cell_time.forward_s + cell_time.backward_s - self.call_s),
                    backward_s=0.0,
                )
        except (MemoryError, ValueError, RuntimeError) as error:  # too large, or refused: batch norm of a single value
            reason = "" if isinstance(error, MemoryError | torch.OutOfMemoryError) else str(error).partition("\n")[0]
            self.failed[cell.key] = f"{cell.what}: {reason or 'does not fit into memory'}"
            return
        finally:
            self.spent_s += time.monotonic() - started
        self.add(cell.key, cell_time)
        if time.monotonic() > self._saved_at + SAVE_S:
            self.keep()

    def add(self, key: Key, cell_time: CellTime) -> None:
        """Takes a time into `known`."""
        name, extents = key
        cells: dict[str, Mapping[Extents, CellTime]] = dict(self.known.cells)
        cells[name] = {**cells.get(name, {}), extents: cell_time}
        self.known = replace(self.known, cells=cells)
        self.taken += 1

    def keep(self) -> None:
        """Writes what there is."""
        self.save(self.known)
        self._saved_at = time.monotonic()


def bench_of(spec: CellSpec | UpdateSpec | LossSpec, mode: Mode) -> Timed:
    """The tensors of a task, ready to be timed."""
    if isinstance(spec, UpdateSpec):
        return UpdateBench(spec, mode)
    return LossBench(spec, mode) if isinstance(spec, LossSpec) else Bench(spec, mode)


def timed(cell: Wanted, mode: Mode, stopwatch: Stopwatch) -> CellTime:
    """Measures one cell. MemoryError, or torch's, where it does not fit; ValueError, RuntimeError of its kernels."""
    if cell.bytes > free_bytes(mode.device):
        raise MemoryError
    bench = bench_of(cell.spec, mode)
    before = [partial(leave_only, recent, mode.device) for recent in (*bench.recent, None)]
    reading = stopwatch([bench.forward, bench.backward, bench.forget], before)
    forward, backward, forget = reading.seconds
    return CellTime(forward, backward + forget, reading.spread, reading.samples, cell.forward, cell.backward)


def free_bytes(device: torch.device) -> float:
    """What a cell may take of memory."""
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        rows = dict(line.split(":") for line in lines)  # MemAvailable: what others' caches hold counts as free
        return 0.8 * float(rows["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return float("inf")
