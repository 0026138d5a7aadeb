"""Job: which cells are measured when, within a time budget, and the profile that they go into."""

from __future__ import annotations

import signal
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path

import torch

from layerwise.cli import progress_bar
from layerwise.config import Config, SearchSpace
from layerwise.cost.compute.measured import COPY, LAYER, held_out_error, step_name
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DEFAULT, DeviceGraph, Profile, save
from layerwise.machine import load as load_profile
from layerwise.machine.layer_times import CellTime, Conditions, Extents, LayerTimes
from layerwise.measure.bench import Bench, CellSpec, LossBench, LossSpec, Mode, UpdateBench, UpdateSpec, cold
from layerwise.measure.cells import CellTask, Key, wanted_cells
from layerwise.measure.conditions import provenance
from layerwise.measure.overhead import COPIED, MakeModule, copied, optimizer_call_s, overhead
from layerwise.measure.timing import Stopwatch

SAVE_S = 2.0  # how often what was measured is written
CELL_S = 0.25  # about what one cell gets, beyond its least number of samples


@dataclass(slots=True)
class Measuring:
    """The times that were measured so far, and how long that took."""

    times: LayerTimes  # grows by whatever `measure` takes
    mode: Mode
    save: Callable[[LayerTimes], None]  # writes it
    budget_s: float
    call_s: float = 0.0  # of an optimizer's step, however few its parameters: counted once a step, not by layer
    spent_s: float = 0.0
    taken: int = 0  # cells measured now
    failed: dict[Key, str] = field(default_factory=dict)  # why, by cell
    _saved_at: float = field(default_factory=lambda: time.monotonic())

    def has(self, key: Key) -> bool:
        """True if a cell needs no measuring (any more)."""
        return key[1] in self.times.cells.get(key[0], {}) or key in self.failed

    def left(self, cells: Iterable[CellTask]) -> list[CellTask]:
        """The cells among these that are not measured yet, the longest first."""
        return sorted((cell for cell in cells if not self.has(cell.key)), key=lambda cell: -cell.predicted_s)

    def measure(self, cells: Iterable[CellTask], after: Callable[[CellTask], None] = lambda _: None) -> None:
        """Measures in order what fits into the rest of the budget; `after` each, measured or not."""
        try:
            for cell in cells:
                stopwatch = Stopwatch(self.mode.device, CELL_S, ahead=True)
                least_s = cell.predicted_s * (stopwatch.least + stopwatch.warm)
                if not self.has(cell.key) and self.spent_s + least_s <= self.budget_s:
                    self._take(cell, stopwatch)
                after(cell)
        finally:
            self.times = replace(self.times, held_out_error=held_out_error(self.times))
            self.keep()

    def _take(self, cell: CellTask, stopwatch: Stopwatch) -> None:
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
        cells: dict[str, Mapping[Extents, CellTime]] = dict(self.times.cells)
        cells[name] = {**cells.get(name, {}), extents: cell_time}
        self.times = replace(self.times, cells=cells)
        self.taken += 1

    def keep(self) -> None:
        """Writes what there is."""
        self.save(self.times)
        self._saved_at = time.monotonic()


def bench_of(spec: CellSpec | UpdateSpec | LossSpec, mode: Mode) -> Bench | UpdateBench | LossBench:
    """The tensors of a task, ready to be timed."""
    if isinstance(spec, UpdateSpec):
        return UpdateBench(spec, mode)
    return LossBench(spec, mode) if isinstance(spec, LossSpec) else Bench(spec, mode)


def timed(cell: CellTask, mode: Mode, stopwatch: Stopwatch) -> CellTime:
    """Measures one cell. MemoryError, or torch's, where it does not fit; ValueError, RuntimeError of its kernels."""
    if cell.bytes > free_bytes(mode.device):
        raise MemoryError
    reading = cold(bench_of(cell.spec, mode), stopwatch)
    forward_s, backward_s = reading.seconds
    return CellTime(forward_s, backward_s, reading.spread, reading.samples, cell.forward, cell.backward)


def free_bytes(device: torch.device) -> float:
    """Bytes of memory that a cell may take."""
    if device.type == "cuda":
        return 0.9 * torch.cuda.mem_get_info(device)[0]
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
        fields = dict(line.split(":") for line in lines)  # MemAvailable: what others' caches hold counts as free
        return 0.8 * float(fields["MemAvailable"].split()[0]) * 1024
    except (OSError, KeyError):
        return float("inf")


ROUNDS = 8  # of looking for the best strategies again, with what was measured meanwhile

# What a search looks at hardest: the best strategy first, then the baselines.
Strategies = Callable[[CostModel, SearchSpace], list[Mapping[str, Config]]]


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a measurement."""

    device: str
    cells: int  # distinct ones that were wanted
    measured: int
    measured_now: int
    missing: int
    failed: list[str]
    spent_s: float
    spread: float  # the median cell's
    held_out_error: float | None
    best_share: float  # of the best strategy's t_C that is measured
    out: str | None


@dataclass(slots=True)
class Job:
    """One run of the command."""

    base: Profile
    where: Conditions
    out: str | None
    mode: Mode
    graph: LayerGraph
    devices: DeviceGraph
    options: CostOptions
    space: SearchSpace
    budget_s: float
    cells: dict[Key, CellTask] = field(default_factory=dict)

    def run(self, strategies: Strategies, make_module: MakeModule, *, quiet: bool) -> Summary:
        """Measures what the budget allows. What was measured is kept whatever happens."""
        before = next((times for times in self.base.layers if times.conditions == self.where), LayerTimes(self.where))
        measuring = Measuring(replace(before, made=provenance(self.mode.device)), self.mode, self._save, self.budget_s)
        self._overhead(measuring, make_module)
        for _ in range(ROUNDS):
            model = self._model(measuring.times)
            best = strategies(model, self.space)
            candidates = {layer.name: [strategy[layer.name] for strategy in best] for layer in self.graph.inner}
            first = measuring.left(wanted_cells(model, candidates).values())
            if not first or not self._measure(measuring, first, "the best plan and baselines", quiet=quiet):
                break
        # The best plans of earlier rounds are of the space, or one of the baselines, which stay the same.
        every = {layer.name: self.space.configurations(layer.space.dims) for layer in self.graph.inner}
        model = self._model(measuring.times)
        self.cells = wanted_cells(model, {name: (*configs, *candidates[name]) for name, configs in every.items()})
        self._measure(measuring, measuring.left(self.cells.values()), "all other pieces", quiet=quiet)
        return self._summary(measuring, best[0])

    def _measure(self, measuring: Measuring, cells: list[CellTask], what: str, *, quiet: bool) -> int:
        """Measures cells, and returns how many."""
        before, done = measuring.taken, count(1)
        with progress_bar(f"measuring {what}", quiet=quiet) as progress:

            def after(_: CellTask) -> None:
                if progress:
                    progress(next(done), len(cells))

            measuring.measure(cells, after)
        return measuring.taken - before

    def _overhead(self, measuring: Measuring, make_module: MakeModule) -> None:
        """Measures the runtime on a CPU. On a GPU the host runs ahead of the kernels: what it does takes no time."""
        optimizer, on_cpu = self.options.optimizer, self.mode.device.type == "cpu"
        step, copy = (step_name(optimizer), ()), (COPY, (COPIED,))
        if on_cpu and not measuring.has(copy):
            measuring.add(copy, copied(self.mode, Stopwatch(self.mode.device)))
        if on_cpu and not (measuring.has(step) and measuring.has((LAYER, ()))):
            measured = overhead(optimizer, self.mode, make_module)
            measuring.call_s = measured.call_s
            measuring.add((LAYER, ()), measured.layer)
            measuring.add(step, measured.step)
        else:
            measuring.call_s = optimizer_call_s(optimizer, self.mode)

    def _model(self, times: LayerTimes) -> CostModel:
        """The cost model that rests on what is known."""
        return CostModel(self.graph, replace(self.devices, layers=(times,)), self.options)

    def _save(self, times: LayerTimes) -> None:
        """Writes the profile; this set goes last, where a search looks first."""
        if self.out is not None and times.count:
            others = tuple(other for other in self.base.layers if other.conditions != self.where)
            save(replace(self.base, layers=(*others, times)), self.out)

    def _summary(self, measuring: Measuring, best: Mapping[str, Config]) -> Summary:
        model, times = self._model(measuring.times), measuring.times
        costs = [model.node_cost(layer, (best[layer.name],)).compute for layer in model.graph.inner]
        measured = [times.cells[name][size] for name, size in self.cells if size in times.cells.get(name, {})]
        return Summary(
            device=self.where.device,
            cells=len(self.cells),
            measured=len(measured),
            measured_now=measuring.taken,
            missing=len(measuring.left(self.cells.values())),
            failed=sorted(set(measuring.failed.values())),
            spent_s=measuring.spent_s,
            spread=statistics.median([time.spread for time in measured] or [0.0]),
            held_out_error=held_out_error(times),
            best_share=sum(float(t.measured[0]) for t in costs) / max(sum(float(t.total[0]) for t in costs), 1e-30),
            out=self.out,
        )


def base_profile(out: str | None, fallback: str | None, where: Conditions, device: torch.device) -> Profile:
    """The profile that is added to: the file `out` where it is there, else the profile `given`, as one of this device.

    LayerwiseError where the file holds times of another device.
    """
    if out is not None and Path(out).exists():
        base = load_profile(out)
        others = [times.conditions.device for times in base.layers if times.conditions.device != where.device]
        if others:
            raise LayerwiseError(
                f"profile {out} has times of another device, {others[0]!r}; this is {where.device!r}: "
                "give another --out"
            )
        if base.layers:
            return base
    else:
        source = fallback or ("cpu" if device.type == "cpu" else DEFAULT)
        base = replace(
            load_profile(source),
            name=Path(out).stem if out else "measured",
            description=f"Measured by layerwise on {where.device}; peaks and links of profile {source}.",
        )
    sources, processor = dict(base.sources), replace(base.processor, name=where.device)
    if device.type == "cuda":
        gpu, source = torch.cuda.get_device_properties(device), f"torch {torch.__version__} on this device"
        processor = replace(processor, memory_bytes=gpu.total_memory, processors=gpu.multi_processor_count)
        sources |= {"device.memory_bytes": source, "device.processors": source}
    return replace(base, processor=processor, sources=sources)


@contextmanager
def terminable() -> Iterator[None]:
    """SIGTERM is an interrupt within, so that what was measured is written."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
