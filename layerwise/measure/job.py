"""Job: decides which rank measures which cells when, within a time budget, and writes the profile.

Every rank runs the same job and learns all times. Each measures a share of the cells, at the same time as the others,
so that times include what ranks on shared cores cost each other. Only rank 0 searches.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import product

from layerwise.comm.base import Comm
from layerwise.comm.together import alone
from layerwise.config import Config, SearchSpace, parse
from layerwise.cost.compute.measured import COPY, LAYER, held_out_error, step_name
from layerwise.cost.compute.roofline import ComputeTime
from layerwise.cost.model import CostModel, CostOptions
from layerwise.graph.layer_graph import LayerGraph
from layerwise.machine import DeviceGraph, Profile, save
from layerwise.machine.layer_times import CellTime, Conditions, LayerTimes
from layerwise.measure.bench import Mode
from layerwise.measure.cells import CellTask, Key, layer_cells, wanted_cells
from layerwise.measure.conditions import provenance
from layerwise.measure.measuring import CELL_S, Measuring, measure
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


@dataclass(frozen=True, slots=True)
class KindRanks:
    """The ranks that measure the devices of one kind, and the conditions of their times."""

    where: Conditions
    kind: int = 0  # among the profile's
    ranks: tuple[int, ...] = ()  # (): all


@dataclass(slots=True)
class Job:
    """One measurement of layers. Every rank has the same, except that only rank 0's has `out`."""

    base: Profile
    kinds: Sequence[KindRanks]  # which measure at the same time
    out: str | None
    mode: Mode
    graph: LayerGraph
    devices: DeviceGraph
    options: CostOptions
    space: SearchSpace
    budget_s: float
    comm: Comm
    measuring: list[Measuring] = field(init=False)  # one for each of `kinds`
    _priced: tuple[list[LayerTimes], CostModel] | None = field(init=False, default=None)  # by these times
    profile: Profile = field(init=False)  # the base, with the measurements

    def __post_init__(self) -> None:
        self.profile, self.measuring = self.base, []

    def run(self, strategies: Strategies, make_module: MakeModule, *, quiet: bool, every: bool = True) -> Summary:
        """Measures what the budget allows. Measurements are saved whatever happens.

        every: measure all pieces of all configurations that the time allows, beside earlier ones; otherwise measure
        those of the best plans and the baselines and check earlier ones, with searches included in the budget.
        """
        began, made = time.monotonic(), provenance(self.mode.device)
        for kind in self.kinds:
            before = next((times for times in self.base.layers if times.conditions == kind.where), None)
            times = replace(before or LayerTimes(kind.where), made=made)
            save_times, deadline_s = lambda _: self._save(), began + self.budget_s
            self.measuring.append(Measuring(times, self.mode, save_times, deadline_s, self.comm, ranks=kind.ranks))
        best, over = self._searched(strategies)
        changed = None if every else self._changed(self._wanted(best))
        self._overhead(make_module)
        if every:  # the budget of a command is for measuring only
            over = False
            for measuring in self.measuring:
                measuring.deadline_s = time.monotonic() + self.budget_s
        for number in range(ROUNDS):
            if number or changed:
                best, over = self._searched(strategies)
            wanted = [list(cells.values()) for cells in self._wanted(best)] if every else self._enough(best)
            if not self._measure(wanted, "the best plan and baselines", quiet=quiet) or over:
                break
        cells = self._wanted(best)
        if every:
            # The best plans of earlier rounds are in the space, or are baselines, which stay the same.
            configs = {layer.name: self.space.configurations(layer.space.dims) for layer in self.graph.inner}
            candidates = {name: (*of, *(strategy[name] for strategy in best)) for name, of in configs.items()}
            cells = [wanted_cells(self._model(), candidates, kind.kind) for kind in self.kinds]
            self._measure([list(each.values()) for each in cells], "all other pieces", quiet=quiet)
        return self._summary(cells, best[0], time.monotonic() - began, changed)

    def _searched(self, strategies: Strategies) -> tuple[list[Mapping[str, Config]], bool]:
        """Returns rank 0's best strategies with the present times, on every rank, and whether another such search would
        end after the deadline.
        """

        def search() -> str:
            began = time.monotonic()
            found = strategies(self._model(), self.space)
            now = time.monotonic()
            texts = [{name: as_json(config) for name, config in strategy.items()} for strategy in found]
            return json.dumps([texts, 2 * now - began > self.measuring[0].deadline_s])

        text = search() if self.comm.size == 1 else self.comm.broadcast_text(alone(self.comm, search) or "")
        found, over = json.loads(text)
        dims = {layer.name: layer.space.dims for layer in self.graph.inner}
        count = self.devices.count
        return [{n: parse(degrees, dims[n], count, n) for n, degrees in row.items()} for row in found], over

    def _wanted(self, best: Sequence[Mapping[str, Config]]) -> list[dict[Key, CellTask]]:
        """The cells of these strategies, for each kind."""
        candidates = {layer.name: [strategy[layer.name] for strategy in best] for layer in self.graph.inner}
        return [wanted_cells(self._model(), candidates, kind.kind) for kind in self.kinds]

    def _enough(self, best: Sequence[Mapping[str, Config]]) -> list[list[CellTask]]:
        """The most expensive cells that cover `ENOUGH` of each strategy's compute time, for each kind."""
        model, result = self._model(), [dict[Key, CellTask]() for _ in self.kinds]
        for strategy, (kind, found) in product(best, zip(self.kinds, result, strict=True)):
            cells = [
                cell
                for layer in model.graph.layers
                for cell in layer_cells(model, layer, () if layer.end else (strategy[layer.name],), kind.kind)
            ]
            cells.sort(key=lambda cell: -cell.predicted_s)
            total_s, so_far_s = sum(cell.predicted_s for cell in cells), 0.0
            for cell in cells:
                if cell.predicted_s and so_far_s > ENOUGH * total_s:
                    break
                found.setdefault(cell.key, cell)
                so_far_s += cell.predicted_s
        return [list(found.values()) for found in result]

    def _changed(self, wanted: Sequence[Mapping[Key, CellTask]]) -> str | None:
        """Returns how the most expensive of these cells differ from earlier times, which are dropped then.

        All ranks measure them again.
        """
        dearest = list[list[CellTask]]()
        for measuring, cells in zip(self.measuring, wanted, strict=True):
            known = sorted((c for c in cells.values() if measuring.has(c.key)), key=lambda cell: -cell.predicted_s)
            dearest.append(known[:CHECKED])
        if not self._off(dearest) or not (off := self._off(dearest)):  # noise does not occur twice
            return None
        for measuring, _ in off:
            measuring.times = LayerTimes(measuring.times.conditions, made=measuring.times.made)
        return " ".join(sentence for _, sentence in off)

    def _off(self, dearest: Sequence[Sequence[CellTask]]) -> list[tuple[Measuring, str]]:
        """Times these cells again on all ranks; returns the kinds of which one differs, and a sentence about it."""
        stopwatch, off = Stopwatch(self.mode.device, CELL_S / CHECKED, ahead=True), list[tuple[Measuring, str]]()
        mine = ((m, cell) for m, some in zip(self.measuring, dearest, strict=True) for cell in some)
        outcomes = [m.outcome(cell, stopwatch) for m, cell in mine if self.comm.rank in m.ranks]
        told = self.comm.all_gather_object(outcomes)
        for kind, measuring, some in zip(self.kinds, self.measuring, dearest, strict=True):
            for number, cell in enumerate(some):
                again = [told[rank][number] for rank in measuring.ranks]
                now_s = statistics.median([sum(one[:2]) for one in again if not isinstance(one, str)] or [0.0])
                then = measuring.times.cells[cell.name][cell.extents]
                then_s = then.forward_s + then.backward_s
                ratio = max(now_s / max(then_s, 1e-12), then_s / max(now_s, 1e-12))
                if ratio - 1 > max(AS_BEFORE, min(MOST, then.spread)):
                    sentence = (
                        f"layers differ from the measurement {_date(self.base, kind.where)}: a piece of {cell.what} "
                        f"takes {units(now_s, 's')} instead of {units(then_s, 's')}; measuring the layers again"
                    )
                    off.append((measuring, sentence))
                    break
        return off

    def _measure(self, wanted: Sequence[Sequence[CellTask]], what: str, *, quiet: bool) -> int:
        """Measures those of each kind's cells that are not measured yet, and returns how many it has measured."""
        left = [(m, m.left(cells)) for m, cells in zip(self.measuring, wanted, strict=True)]
        total, before = sum(len(cells) for _, cells in left), sum(m.taken for m in self.measuring)
        if total:
            with progress_bar(f"measuring {what}", quiet=quiet) as progress:
                measure(left, lambda done: progress(done, total) if progress else None)
        return sum(m.taken for m in self.measuring) - before

    def _overhead(self, make_module: MakeModule) -> None:
        """Measures the runtime on a CPU. On a GPU the host runs ahead of the kernels, so its work takes no time.

        All ranks measure it, so that each runs under the others' load; the times of a kind's first rank count.
        """
        optimizer, on_cpu = self.options.optimizer, self.mode.device.type == "cpu"
        step, copy, layer = (step_name(optimizer), ()), (COPY, (COPIED,)), (LAYER, ())
        found: list[tuple[Key, CellTime]] = []
        if on_cpu and not all(m.has(copy) for m in self.measuring):
            found.append((copy, copied(self.mode, Stopwatch(self.mode.device))))
        if on_cpu and not all(m.has(step) and m.has(layer) for m in self.measuring):
            measured = overhead(optimizer, self.mode, make_module)
            call_s = measured.call_s
            found += [(layer, measured.layer), (step, measured.step)]
        else:
            call_s = optimizer_call_s(optimizer, self.mode)
        rows = [[time.forward_s, time.backward_s, time.spread, time.samples] for _, time in found]
        everyone = self.comm.all_gather_object(rows)
        for measuring in self.measuring:
            measuring.call_s = call_s
            for (key, _), row in zip(found, everyone[measuring.ranks[0]], strict=True):
                measuring.add(key, CellTime(*row))

    def _model(self) -> CostModel:
        """The cost model with the times measured so far."""
        known = [measuring.times for measuring in self.measuring]
        if self._priced is None or any(a is not b for a, b in zip(self._priced[0], known, strict=True)):
            devices, layers, each = self.devices, self.devices.layers, list(self.devices.kinds)
            for kind, times in zip(self.kinds, known, strict=True):
                layers = layers if kind.kind else (times,)
                each = [replace(one, layers=(times,)) if i == kind.kind else one for i, one in enumerate(each)]
            priced = CostModel(self.graph, replace(devices, layers=layers, kinds=tuple(each)), self.options)
            self._priced = known, priced
        return self._priced[1]

    def _save(self) -> None:
        """Adds the times at the end of the profile, where a search looks first, and writes it."""
        if times := tuple(measuring.times for measuring in self.measuring if measuring.times.count):
            again = [each.conditions for each in times]
            others = tuple(other for other in self.base.layers if other.conditions not in again)
            self.profile = replace(self.base, layers=(*others, *times))
            if self.out is not None:
                save(self.profile, self.out)

    def _summary(
        self,
        cells: Sequence[Mapping[Key, CellTask]],
        best: Mapping[str, Config],
        spent_s: float,
        changed: str | None,
    ) -> Summary:
        model, costs, measured = self._model(), list[ComputeTime](), list[CellTime]()
        for kind, measuring, wanted in zip(self.kinds, self.measuring, cells, strict=True):
            costs += [model.node_cost(layer, (best[layer.name],)).of_kind(kind.kind) for layer in model.graph.inner]
            times = measuring.times.cells
            measured += [times[name][size] for name, size in wanted if size in times.get(name, {})]
        errors = [error for m in self.measuring if (error := held_out_error(m.times)) is not None]
        return Summary(
            device=", ".join(kind.where.device for kind in self.kinds),
            cells=sum(map(len, cells)),
            measured=len(measured),
            measured_now=sum(m.taken for m in self.measuring),
            missing=sum(len(m.left(each.values())) for m, each in zip(self.measuring, cells, strict=True)),
            failed=sorted({reason for m in self.measuring for reason in m.failed.values()}),
            spent_s=spent_s,
            spread=statistics.median([time.spread for time in measured] or [0.0]),
            held_out_error=max(errors, default=None),
            best_share=sum(float(t.measured[0]) for t in costs) / max(sum(float(t.total[0]) for t in costs), 1e-30),
            out=self.out,
            changed=changed,
        )


def _date(profile: Profile, where: Conditions) -> str:
    """`on 2026-11-26`: when the times of these conditions were measured."""
    made = next((times.made for times in profile.layers if times.conditions == where), {})
    return f"on {made['date'][:10]}" if "date" in made else "earlier"
