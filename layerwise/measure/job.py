"""Job: decides which rank measures which cells when, within a time budget, and writes the profile.

Every rank runs the same job and learns all times. Each measures a share of the cells, at the same time as the others,
so that times include what ranks on shared cores cost each other. Only rank 0 searches.
"""

from __future__ import annotations

import json
import signal
import statistics
import time
import types
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from layerwise.comm.base import Comm
from layerwise.comm.together import alone
from layerwise.config import Config, SearchSpace, parse
from layerwise.cost.compute.measured import COPY, LAYER, held_out_error, step_name
from layerwise.cost.model import CostModel, CostOptions
from layerwise.errors import LayerwiseError
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DEFAULT, DeviceGraph, Profile, catalogue, save
from layerwise.machine import load as load_profile
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.measure.bench import Mode
from layerwise.measure.cells import CellTask, Key, layer_cells, wanted_cells
from layerwise.measure.conditions import provenance
from layerwise.measure.measuring import CELL_S, Measuring
from layerwise.measure.overhead import COPIED, MakeModule, copied, optimizer_call_s, overhead
from layerwise.measure.timing import Stopwatch
from layerwise.plan import as_json
from layerwise.progress import progress_bar
from layerwise.quantities import units

# fraction of the compute time of the strategies that matter most, after which no more is measured for them
ENOUGH = 0.95
CHECKED = 2  # earlier cells to measure again before they are used
AS_BEFORE, MOST = 0.35, 1.0  # fraction that a cell's time may differ by, or its spread, but at most MOST
ROUNDS = 8  # of searching again for the best strategies, with the new times

# Orders what a search depends on most: the best strategy first, then the baselines.
Strategies = Callable[[CostModel, SearchSpace], list[Mapping[str, Config]]]


@dataclass(frozen=True, slots=True)
class Summary:
    """The outcome of a measurement."""

    device: str
    cells: int  # distinct cells that were needed
    measured: int
    measured_now: int
    missing: int
    failed: list[str]
    spent_s: float
    spread: float  # the median cell's
    held_out_error: float | None
    best_share: float  # measured fraction of the best strategy's t_C
    out: str | None
    changed: str | None = None  # the difference from earlier times, which were measured again


@dataclass(slots=True)
class Job:
    """One measurement of layers. Every rank has the same, except that only rank 0's has `out`."""

    base: Profile
    where: Conditions
    out: str | None
    mode: Mode
    graph: LayerGraph
    devices: DeviceGraph
    options: CostOptions
    space: SearchSpace
    budget_s: float
    comm: Comm
    kind: int = 0  # of devices, whose ranks measure
    ranks: tuple[int, ...] = ()  # these; (): all
    cells: dict[Key, CellTask] = field(default_factory=dict)
    profile: Profile = field(init=False)  # the base, with the measurements

    def __post_init__(self) -> None:
        self.profile = self.base
        self.ranks = self.ranks or tuple(range(self.comm.size))

    def run(self, strategies: Strategies, make_module: MakeModule, *, quiet: bool, every: bool = True) -> Summary:
        """Measures what the budget allows. Measurements are saved whatever happens.

        every: measure all pieces of all configurations that the time allows, beside earlier ones; otherwise measure
        those of the best plans and the baselines and check earlier ones, with searches included in the budget.
        """
        began = time.monotonic()
        before = next((times for times in self.base.layers if times.conditions == self.where), LayerTimes(self.where))
        before = replace(before, made=provenance(self.mode.device))
        measuring = Measuring(before, self.mode, self._save, began + self.budget_s, self.comm, ranks=self.ranks)
        best, over = self._searched(strategies, measuring)
        changed = None if every else self._changed(measuring, self._wanted(measuring, best).values())
        if changed:
            measuring.times = LayerTimes(self.where, made=before.made)
        self._overhead(measuring, make_module)
        if every:  # the budget of a command is for measuring only
            measuring.deadline_s, over = time.monotonic() + self.budget_s, False
        for number in range(ROUNDS):
            if number or changed:
                best, over = self._searched(strategies, measuring)
            wanted = list(self._wanted(measuring, best).values())
            first = measuring.left(wanted if every else self._enough(measuring, best))
            if not first or not self._measure(measuring, first, "the best plan and baselines", quiet=quiet) or over:
                break
        self.cells = self._wanted(measuring, best)
        if every:
            # The best plans of earlier rounds are in the space, or are baselines, which stay the same.
            model = self._model(measuring.times)
            configs = {layer.name: self.space.configurations(layer.space.dims) for layer in self.graph.inner}
            candidates = {name: (*of, *(strategy[name] for strategy in best)) for name, of in configs.items()}
            self.cells = wanted_cells(model, candidates, self.kind)
            self._measure(measuring, measuring.left(self.cells.values()), "all other pieces", quiet=quiet)
        return self._summary(measuring, best[0], time.monotonic() - began, changed)

    def _searched(self, strategies: Strategies, measuring: Measuring) -> tuple[list[Mapping[str, Config]], bool]:
        """Returns rank 0's best strategies with the present times, on every rank, and whether another such search would
        end after the deadline.
        """

        def search() -> str:
            began = time.monotonic()
            found = strategies(self._model(measuring.times), self.space)
            now = time.monotonic()
            texts = [{name: as_json(config) for name, config in strategy.items()} for strategy in found]
            return json.dumps([texts, 2 * now - began > measuring.deadline_s])

        text = search() if self.comm.size == 1 else self.comm.broadcast_text(alone(self.comm, search) or "")
        found, over = json.loads(text)
        dims = {layer.name: layer.space.dims for layer in self.graph.inner}
        count = self.devices.count
        return [{n: parse(degrees, dims[n], count, n) for n, degrees in row.items()} for row in found], over

    def _wanted(self, measuring: Measuring, best: Sequence[Mapping[str, Config]]) -> dict[Key, CellTask]:
        """The cells of these strategies."""
        candidates = {layer.name: [strategy[layer.name] for strategy in best] for layer in self.graph.inner}
        return wanted_cells(self._model(measuring.times), candidates, self.kind)

    def _enough(self, measuring: Measuring, best: Sequence[Mapping[str, Config]]) -> list[CellTask]:
        """The most expensive cells that cover `ENOUGH` of each strategy's compute time."""
        model, result = self._model(measuring.times), dict[Key, CellTask]()
        for strategy in best:
            cells = [
                cell
                for layer in model.graph.layers
                for cell in layer_cells(model, layer, () if layer.end else (strategy[layer.name],), self.kind)
            ]
            cells.sort(key=lambda cell: -cell.predicted_s)
            total_s, so_far_s = sum(cell.predicted_s for cell in cells), 0.0
            for cell in cells:
                if cell.predicted_s and so_far_s > ENOUGH * total_s:
                    break
                result.setdefault(cell.key, cell)
                so_far_s += cell.predicted_s
        return list(result.values())

    def _changed(self, measuring: Measuring, cells: Iterable[CellTask]) -> str | None:
        """Returns how the most expensive of these cells differ from earlier times; all ranks measure them again."""
        known = {cell.key: measuring.times.cells[cell.name][cell.extents] for cell in cells if measuring.has(cell.key)}
        dearest = sorted((c for c in cells if c.key in known), key=lambda cell: -cell.predicted_s)[:CHECKED]
        stopwatch = Stopwatch(self.mode.device, CELL_S / CHECKED, ahead=True)
        mine = dearest if self.comm.rank in self.ranks else []
        told = self.comm.all_gather_object([measuring.outcome(cell, stopwatch) for cell in mine])
        told = [told[rank] for rank in self.ranks]
        for number, cell in enumerate(dearest):
            outcomes = [rank[number] for rank in told if not isinstance(rank[number], str)]
            now_s = statistics.median(sum(outcome[:2]) for outcome in outcomes) if outcomes else 0.0
            then = known[cell.key]
            then_s = then.forward_s + then.backward_s
            off = max(now_s / max(then_s, 1e-12), then_s / max(now_s, 1e-12)) - 1
            if off > max(AS_BEFORE, min(MOST, then.spread)):
                return (
                    f"layers differ from the measurement {_date(self.base, self.where)}: a piece of {cell.what} takes "
                    f"{units(now_s, 's')} instead of {units(then_s, 's')}; measuring the layers again"
                )
        return None

    def _measure(self, measuring: Measuring, cells: list[CellTask], what: str, *, quiet: bool) -> int:
        """Measures cells, and returns their number."""
        before = measuring.taken
        with progress_bar(f"measuring {what}", quiet=quiet) as progress:
            measuring.measure(cells, lambda done: progress(done, len(cells)) if progress else None)
        return measuring.taken - before

    def _overhead(self, measuring: Measuring, make_module: MakeModule) -> None:
        """Measures the runtime on a CPU. On a GPU the host runs ahead of the kernels, so its work takes no time.

        All ranks measure it, so that each runs under the others' load; the times of the kind's first rank count.
        """
        optimizer, on_cpu = self.options.optimizer, self.mode.device.type == "cpu"
        step, copy, layer = (step_name(optimizer), ()), (COPY, (COPIED,)), (LAYER, ())
        found: list[tuple[Key, CellTime]] = []
        if on_cpu and not measuring.has(copy):
            found.append((copy, copied(self.mode, Stopwatch(self.mode.device))))
        if on_cpu and not (measuring.has(step) and measuring.has(layer)):
            measured = overhead(optimizer, self.mode, make_module)
            measuring.call_s = measured.call_s
            found += [(layer, measured.layer), (step, measured.step)]
        else:
            measuring.call_s = optimizer_call_s(optimizer, self.mode)
        rows = [[time.forward_s, time.backward_s, time.spread, time.samples] for _, time in found]
        for (key, _), row in zip(found, self.comm.all_gather_object(rows)[self.ranks[0]], strict=True):
            measuring.add(key, CellTime(*row))

    def _model(self, times: LayerTimes) -> CostModel:
        """The cost model with these times."""
        devices, layers = self.devices, (times,) if not self.kind else self.devices.layers
        kinds = tuple(replace(k, layers=(times,)) if i == self.kind else k for i, k in enumerate(devices.kinds))
        return CostModel(self.graph, replace(devices, layers=layers, kinds=kinds), self.options)

    def _save(self, times: LayerTimes) -> None:
        """Adds the times at the end of the profile, where a search looks first, and writes it."""
        if times.count:
            others = tuple(other for other in self.base.layers if other.conditions != self.where)
            self.profile = replace(self.base, layers=(*others, times))
            if self.out is not None:
                save(self.profile, self.out)

    def _summary(
        self, measuring: Measuring, best: Mapping[str, Config], spent_s: float, changed: str | None
    ) -> Summary:
        model, times = self._model(measuring.times), measuring.times
        costs = [model.node_cost(layer, (best[layer.name],)).of_kind(self.kind) for layer in model.graph.inner]
        measured = [times.cells[name][size] for name, size in self.cells if size in times.cells.get(name, {})]
        return Summary(
            device=self.where.device,
            cells=len(self.cells),
            measured=len(measured),
            measured_now=measuring.taken,
            missing=len(measuring.left(self.cells.values())),
            failed=sorted(set(measuring.failed.values())),
            spent_s=spent_s,
            spread=statistics.median([time.spread for time in measured] or [0.0]),
            held_out_error=held_out_error(times),
            best_share=sum(float(t.measured[0]) for t in costs) / max(sum(float(t.total[0]) for t in costs), 1e-30),
            out=self.out,
            changed=changed,
        )


def _date(profile: Profile, where: Conditions) -> str:
    """`on 2026-11-26`: when the times of these conditions were measured."""
    made = next((times.made for times in profile.layers if times.conditions == where), {})
    return f"on {made['date'][:10]}" if "date" in made else "earlier"


def base_profile(out: str | None, fallback: str | None, where: Conditions, device: torch.device) -> Profile:
    """The profile to add to: the file `out` if it exists, else the profile `fallback`, adapted to this device.

    Raises LayerwiseError if the file holds times of another device.
    """
    if out is not None and Path(out).exists():
        base = load_profile(out)
        if base.kinds:
            return on_device(base, device, where)
        others = [times.conditions.device for times in base.layers if times.conditions.device != where.device]
        if others:
            raise LayerwiseError(
                f"profile {out} has times of another device, {others[0]!r}, but this is {where.device!r}: use another "
                "--out"
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
    return on_device(base, device, where)


def kind_here(base: Profile, device: str) -> int:
    """Which of a profile's kinds the device of this name is; LayerwiseError where it is none."""
    names = [processor.name for processor in base.kinds]
    row = catalogue.devices().get(catalogue.reported(device) or "", {})
    found = [name for name in names if name in (device, row.get("name"))]
    if base.kinds and not found:
        raise LayerwiseError(f"profile {base.name} has devices of the kinds {', '.join(names)}; this is {device!r}")
    return names.index(found[0]) if found else 0


def on_device(base: Profile, device: torch.device, where: Conditions) -> Profile:
    """Returns a profile for this device, without times of others; with those of its other kinds, if it has several."""
    if base.kinds:
        here, kinds = kind_here(base, where.device), list(base.kinds)
        kinds[here] = replace(kinds[here], name=where.device)
        return replace(base, kinds=tuple(kinds), processor=kinds[0])
    sources, processor = dict(base.sources), replace(base.processor, name=where.device)
    if device.type == "cuda":
        gpu, source = torch.cuda.get_device_properties(device), f"torch {torch.__version__} on this device"
        processor = replace(processor, memory_bytes=gpu.total_memory, processors=gpu.multi_processor_count)
        sources |= {"device.memory_bytes": source, "device.processors": source}
    own = tuple(times for times in base.layers if times.conditions.device == where.device)
    return replace(base, processor=processor, sources=sources, layers=own)


@contextmanager
def terminable() -> Iterator[None]:
    """A context that turns SIGTERM into KeyboardInterrupt, so that measurements are written."""

    def interrupt(number: int, frame: types.FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
