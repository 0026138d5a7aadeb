"""Steps of plans and their layers alone, timed turn about, so that both see the same of a shared machine.

Layers are timed as `parallelize` times them, and steps in blocks that follow each other as in training. Ranks wait for
each other: of each step the slowest rank counts, and of the layers between two transfers the rank that takes longest
for all of them, by the medians of all rounds.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import mean, median

import torch

from layerwise.api.machine import module
from layerwise.comm.base import Comm
from layerwise.comm.solo import SoloComm
from layerwise.config import Config
from layerwise.cost.compute.measured import COPY, LAYER, step_name
from layerwise.cost.model import CostModel
from layerwise.cost.timeline.simulate import UPDATE, SimulatedSpan, timeline
from layerwise.machine.fields import Field
from layerwise.machine.layer_times import CellTime, Conditions, Extents, LayerTimes, layers_as_json, parse_layers
from layerwise.measure.bench import Mode, UpdateSpec
from layerwise.measure.cells import CellTask, Key, layer_cells
from layerwise.measure.measuring import Measuring, timed
from layerwise.measure.overhead import COPIED, copied, overhead
from layerwise.measure.timing import Stopwatch, stolen_s

ROUNDS = 5
LEAST = 2  # steps, however slow
STOLEN = 0.04  # of a core: the steps of a block with more are run again
TRIES = 3
CELL_S = 0.1  # of a layer that is measured once and for all; in each round it has a fifth
MODE = Mode(torch.device("cpu"), torch.float32)
Step = Callable[[], object]
Part = tuple[str, Extents, int]  # a cell's name and extents, and the way:
FORWARD, BACKWARD = 0, 1


class Layers:
    """Times of layers alone; all ranks measure the same at the same time."""

    def __init__(self, comm: Comm, optimizer: str) -> None:
        self.comm = comm
        known = LayerTimes(Conditions("cpu", torch.__version__, "float32", threads=1))
        self.measuring = Measuring(known, MODE, lambda _: None, 0.0, comm)
        beside = overhead(optimizer, MODE, module)
        self.measuring.call_s = beside.call_s
        for name, cost in ((LAYER, beside.layer), (step_name(optimizer), beside.step)):
            self.measuring.add((name, ()), cost)
        self.measuring.add((COPY, (COPIED,)), copied(MODE, self._stopwatch(CELL_S)))
        self.measuring.times = self._as_first(self.known)

    @property
    def known(self) -> LayerTimes:
        """All of them."""
        return self.measuring.times

    def take(self, cells: Sequence[CellTask], budget_s: float) -> None:
        """Measures what fits into the budget: each rank a part of the cells, all at the same time, for all of them."""
        began, mine = (
            time.perf_counter(),
            Measuring(LayerTimes(self.known.conditions), MODE, lambda _: None, 0.0, self.comm),
        )
        for cell in cells[self.comm.rank :: self.comm.size]:
            if time.perf_counter() > began + budget_s:
                break
            mine.add(cell.key, self._timed(cell, CELL_S))
        for times in self.comm.all_gather_object(layers_as_json([mine.times])):
            for name, by_extents in parse_layers(Field("measured", "", times))[0].cells.items():
                for extents, cost in by_extents.items():
                    self.measuring.add((name, extents), cost)

    def turn_about(
        self, steps: Mapping[str, Step], cells: Sequence[CellTask], seconds: float, between: Step
    ) -> tuple[dict[str, list[float]], list[LayerTimes]]:
        """Seconds of steps of each, for about `seconds`, and each rank's times of the cells; `between` is done, too."""
        counts = {name: self._count(step, seconds) for name, step in steps.items()}
        times: dict[str, list[float]] = {name: [] for name in steps}
        rounds = []  # of each cell the seconds forward and backward
        for _ in range(ROUNDS):
            for name, step in steps.items():
                if len(times[name]) < LEAST or sum(times[name]) < seconds:
                    times[name] += block(step, counts[name], self.comm)
            between()
            taken = [self._timed(cell, CELL_S / ROUNDS) for cell in cells]
            rounds.append([way_s for one in taken for way_s in (one.forward_s, one.backward_s)])
        ranks = []
        for medians in map(iter, self.comm.all_gather_object([median(column) for column in zip(*rounds, strict=True)])):
            measuring = Measuring(self.known, MODE, lambda _: None, 0.0, self.comm)
            for cell, last, forward, backward in zip(cells, taken, medians, medians, strict=True):
                measuring.add(cell.key, replace(last, forward_s=forward, backward_s=backward))
            ranks.append(self._as_first(measuring.times))
        return times, ranks

    def _timed(self, cell: CellTask, seconds: float) -> CellTime:
        cost = timed(cell, MODE, self._stopwatch(seconds))
        if isinstance(cell.spec, UpdateSpec):
            cost = replace(cost, forward_s=max(0.0, cost.forward_s - self.measuring.call_s))
        return cost

    def _stopwatch(self, seconds: float) -> Stopwatch:
        return Stopwatch(MODE.device, seconds, least=3)

    def _count(self, step: Step, seconds: float) -> int:
        """Steps of a block; warms up, too."""
        return max(1, round(seconds / ROUNDS / median(block(step, 2, self.comm))))

    def _as_first(self, known: LayerTimes) -> LayerTimes:
        """As rank 0 has it."""
        text = self.comm.broadcast_text(json.dumps(layers_as_json([known])) if self.comm.rank == 0 else "")
        return parse_layers(Field("measured", "", json.loads(text)))[0]


def segments_of(model: CostModel, strategy: Mapping[str, Config]) -> list[list[Part]]:
    """What is computed without waiting for another rank in between, in a step's order."""
    spans: list[SimulatedSpan] = []
    timeline(model, strategy, spans.append)
    segments: list[list[Part]] = [[]]
    for span in spans:
        if span.category != "compute":
            segments.append([])
            continue
        layer, update = model.graph[span.layer], span.name.endswith(UPDATE)
        cells = layer_cells(model, layer, () if layer.end else (strategy[layer.name],))
        way = BACKWARD if span.name.endswith(" (backward)") else FORWARD
        segments[-1] += [(*cell.key, way) for cell in cells if isinstance(cell.spec, UpdateSpec) == update]
    return segments


def slowest(ranks: Sequence[LayerTimes], segments: Sequence[Sequence[Part]]) -> LayerTimes:
    """Of each segment the times of the rank that takes longest; of what is in several the mean."""
    longest: dict[Key, tuple[list[float], list[float]]] = {}
    for parts in segments:
        rows = [[_ways(rank, (name, extents))[way] for name, extents, way in parts] for rank in ranks]
        for (name, extents, way), seconds in zip(parts, max(rows, key=sum), strict=True):
            longest.setdefault((name, extents), ([], []))[way].append(seconds)
    measuring = Measuring(ranks[0], MODE, lambda _: None, 0.0, SoloComm())
    for key, both in longest.items():
        ways = [mean(times) if times else first for times, first in zip(both, _ways(ranks[0], key), strict=True)]
        measuring.add(key, replace(ranks[0].cells[key[0]][key[1]], forward_s=ways[0], backward_s=ways[1]))
    return measuring.times


def _ways(rank: LayerTimes, key: Key) -> tuple[float, float]:
    cell = rank.cells[key[0]][key[1]]
    return cell.forward_s, cell.backward_s


def block(step: Step, steps: int, comm: Comm, tries: int = TRIES) -> list[float]:
    """Seconds of steps that follow each other, each by the slowest rank, after one that does not count.

    Where the host of this machine has meanwhile taken CPU time from it they are run again, so many times in all; those
    with the least of it count.
    """
    blocks = []
    for _ in range(tries):
        comm.barrier()
        mine, first, before = [], time.perf_counter(), stolen_s()
        for _ in range(steps + 1):
            began = time.perf_counter()
            step()
            mine.append(time.perf_counter() - began)
        took, stolen = time.perf_counter() - first, stolen_s() - before
        took, stolen, *times = map(max, zip(*comm.all_gather_object([took, stolen, *mine[1:]]), strict=True))
        blocks.append((stolen, times))
        if stolen < STOLEN * took:
            break
    return min(blocks, key=lambda one: one[0])[1]
