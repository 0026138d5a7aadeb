"""Measuring: the growing times of a machine's cells, measured by all ranks at once within a deadline."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from layerwise.comm.base import Comm
from layerwise.cost.compute.measured import held_out_error
from layerwise.machine.layer_times import CellTime, Extents, LayerTimes
from layerwise.measure.bench import Bench, CellSpec, LossBench, LossSpec, Mode, UpdateBench, UpdateSpec, cold
from layerwise.measure.cells import CellTask, Key
from layerwise.measure.timing import Stopwatch

SAVE_S = 2.0  # interval of writing the measurements
CELL_S = 0.15  # about the time for one cell, beyond its minimum of samples
TURN_S = 1.0  # how long ranks measure between two exchanges


Outcome = tuple[float, float, float, int] | str  # seconds forward and backward, spread, samples; or why there are none


@dataclass(slots=True)
class Measuring:
    """The times measured so far, and the time that took. Every rank has an equal one."""

    times: LayerTimes  # grows with `measure`
    mode: Mode
    save: Callable[[LayerTimes], None]  # writes the times
    deadline_s: float  # by time.monotonic: nothing begins that would end later
    comm: Comm
    call_s: float = 0.0  # the fixed overhead of an optimizer's step: counted once a step, not for each layer
    taken: int = 0  # cells measured now
    failed: dict[Key, str] = field(default_factory=dict)  # why, by cell
    ranks: tuple[int, ...] = ()  # that measure: those of one kind of devices; default: all
    _saved_at: float = field(default_factory=lambda: time.monotonic())

    def has(self, key: Key) -> bool:
        """True if a cell need not be measured (any more)."""
        return key[1] in self.times.cells.get(key[0], {}) or key in self.failed

    def left(self, cells: Iterable[CellTask]) -> list[CellTask]:
        """The cells among these that are not measured yet, longest first."""
        return sorted((cell for cell in cells if not self.has(cell.key)), key=lambda cell: -cell.predicted_s)

    def __post_init__(self) -> None:
        self.ranks = self.ranks or tuple(range(self.comm.size))

    def turn(self, mine: deque[tuple[int, CellTask]]) -> list[tuple[int, Outcome]]:
        """Measures this rank's cells for about `TURN_S`; returns their outcomes, by number."""
        began, outcomes = time.monotonic(), list[tuple[int, Outcome]]()
        while mine and time.monotonic() < began + TURN_S:
            number, cell = mine.popleft()
            stopwatch = Stopwatch(self.mode.device, CELL_S, ahead=True)
            if not self.has(cell.key) and time.monotonic() + stopwatch.least_s(cell.predicted_s) <= self.deadline_s:
                outcome = self.outcome(cell, stopwatch)
                outcomes.append((number, outcome))
                self.learn(cell, outcome)
        return outcomes

    def outcome(self, cell: CellTask, stopwatch: Stopwatch) -> Outcome:
        """Measures a cell: seconds forward, seconds backward, spread, samples; or why that fails."""
        try:
            cell_time = timed(cell, self.mode, stopwatch)
        except (MemoryError, ValueError, RuntimeError) as error:  # too large, or refused: batch norm of a single value
            reason = "" if isinstance(error, MemoryError | torch.OutOfMemoryError) else str(error).partition("\n")[0]
            return f"{cell.what}: {reason or 'does not fit into memory'}"
        forward_s, backward_s = cell_time.forward_s, cell_time.backward_s
        if isinstance(cell.spec, UpdateSpec):
            forward_s, backward_s = max(0.0, forward_s + backward_s - self.call_s), 0.0
        return forward_s, backward_s, cell_time.spread, cell_time.samples

    def learn(self, cell: CellTask, outcome: Outcome) -> None:
        """Takes a cell's outcome, which some rank has measured, unless it is known."""
        if self.has(cell.key):  # this rank's own
            return
        if isinstance(outcome, str):
            self.failed[cell.key] = outcome
            return
        self.add(cell.key, CellTime(*outcome, cell.forward, cell.backward))
        self.taken += 1
        if time.monotonic() > self._saved_at + SAVE_S:
            self.keep()

    def add(self, key: Key, cell_time: CellTime) -> None:
        """Adds a time to `times`."""
        name, extents = key
        cells: dict[str, Mapping[Extents, CellTime]] = dict(self.times.cells)
        cells[name] = {**cells.get(name, {}), extents: cell_time}
        self.times = replace(self.times, cells=cells)

    def keep(self) -> None:
        """Writes the times."""
        self.save(self.times)
        self._saved_at = time.monotonic()


def measure(
    kinds: Sequence[tuple[Measuring, Sequence[CellTask]]], after: Callable[[int], None] = lambda _: None
) -> None:
    """Measures cells of all kinds of devices at once, in order, as far as fits before the deadline.

    Each rank takes every n-th cell of its kind, so that it measures beside the load that all others make.

    Args:
        kinds: A kind's measuring and cells, the same on every rank; all ranks must call it.
        after: A function that is called with the number of cells that are done, measured or not.
    """
    comm, total = kinds[0][0].comm, sum(len(cells) for _, cells in kinds)
    of_rank = {rank: kind for kind in kinds for rank in kind[0].ranks}
    mine = deque[tuple[int, CellTask]]()
    if own := of_rank.get(comm.rank):
        mine.extend(list(enumerate(own[1]))[own[0].ranks.index(comm.rank) :: len(own[0].ranks)])
    try:
        left = total
        while left:
            everyone = comm.all_gather_object([own[0].turn(mine) if own else [], len(mine)])
            for rank, (outcomes, _) in enumerate(everyone):
                for number, outcome in outcomes:
                    measuring, cells = of_rank[rank]
                    measuring.learn(cells[number], outcome)
            left = sum(count for _, count in everyone)
            after(total - left)
    finally:
        for measuring, _ in kinds:
            measuring.times = replace(measuring.times, held_out_error=held_out_error(measuring.times))
            measuring.keep()


def bench_of(spec: CellSpec | UpdateSpec | LossSpec, mode: Mode) -> Bench | UpdateBench | LossBench:
    """The bench for a task, ready to be timed."""
    if isinstance(spec, UpdateSpec):
        return UpdateBench(spec, mode)
    return LossBench(spec, mode) if isinstance(spec, LossSpec) else Bench(spec, mode)


def timed(cell: CellTask, mode: Mode, stopwatch: Stopwatch) -> CellTime:
    """Measures one cell. Raises MemoryError, or torch's, if it does not fit; ValueError or RuntimeError from its
    kernels.
    """
    if cell.bytes > free_bytes(mode.device):
        raise MemoryError
    reading = cold(bench_of(cell.spec, mode), stopwatch)
    forward_s, backward_s = reading.seconds
    return CellTime(forward_s, backward_s, reading.spread, reading.samples, cell.forward, cell.backward)


def free_bytes(device: torch.device) -> float:
    """The bytes of memory that a cell may use."""
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":") for line in lines)  # MemAvailable counts other processes' caches as free
        return 0.8 * float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return float("inf")
