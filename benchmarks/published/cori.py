"""The paper's own measurements: whether the grid that was the best on Cori is the one that is predicted.

Four constants are fitted, not below 0, to the six records that may be used for that: seconds an iteration, seconds an
activation of a process (its Python handles lists), alpha, and beta an item. All others are only compared with, among
grids of equal width and number of processes.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.common.process_grids import AlphaBeta, FullLayer, grid_s
from layerwise.search.baselines import ProcessGrid, parse_grid

FILE = Path(__file__).with_name("cori_mlp_grids.json")
BATCH = 100


@dataclass(frozen=True, slots=True)
class Record:
    """One measurement; seconds an iteration."""

    data: str
    widths: tuple[int, ...]
    processes: int
    grid: ProcessGrid
    seconds: float
    use: str


def records() -> list[Record]:
    """All that was published."""
    document = json.loads(FILE.read_text())
    assert document["global_batch"] == BATCH
    return [
        Record(
            r["data"], tuple(r["widths"]), r["processes"], parse_grid(r["grid"]), r["seconds_per_iteration"], r["use"]
        )
        for r in document["records"]
    ]


def layers(widths: Sequence[int]) -> list[FullLayer]:
    """In items, not bytes: what they send are Python numbers."""
    return [FullLayer(str(i), a, b, a * b + b, 1) for i, (a, b) in enumerate(pairwise(widths))]


def terms(widths: Sequence[int], grid: ProcessGrid, processes: int) -> NDArray[np.float64]:
    """(4,): what the constants are multiplied with. A 1x1 grid had two processes in its collectives."""
    groups = grid.batch_groups * max(1, processes // grid.processes)
    parts, samples = grid.model_parts, BATCH / grid.batch_groups
    work = samples * sum(widths[1:]) / parts

    def communication(link: AlphaBeta) -> float:
        return grid_s(layers(widths), round(BATCH * groups / grid.batch_groups), groups, parts, link, link)

    return np.array([1.0, work, communication(AlphaBeta(1.0, 0.0)), communication(AlphaBeta(0.0, 1.0))])


def fit(records: Sequence[Record]) -> NDArray[np.float64]:
    """(4,): the constants, by relative least squares over the calibration records, by trying every set of zeros."""
    used = [r for r in records if r.use == "calibration"]
    matrix = np.array([terms(r.widths, r.grid, r.processes) / r.seconds for r in used])
    best, least = np.zeros(4), np.inf
    for mask in range(1, 16):
        columns = [i for i in range(4) if mask >> i & 1]
        solved = np.linalg.lstsq(matrix[:, columns], np.ones(len(used)), rcond=None)[0]
        error = float(((matrix[:, columns] @ solved - 1) ** 2).sum())
        if (solved >= 0).all() and error < least:
            best, least = np.zeros(4), error
            best[columns] = solved
    return best


@dataclass(frozen=True, slots=True)
class Case:
    """Grids of one number of processes and one width: seconds, measured and predicted."""

    processes: int
    widths: tuple[int, ...]
    measured: dict[str, float]
    predicted: dict[str, float]

    @property
    def best(self) -> str:
        return min(self.measured, key=lambda g: self.measured[g])

    @property
    def best_predicted(self) -> str:
        return min(self.predicted, key=lambda g: self.predicted[g])

    @property
    def most_batch(self) -> str:
        """The trivial rule: as many batch groups as there are."""
        return max(self.measured, key=lambda g: parse_grid(g).batch_groups)

    def loss(self, grid: str) -> float:
        """How much longer than the best a grid took."""
        return self.measured[grid] / self.measured[self.best] - 1


def cases(records: Sequence[Record], constants: NDArray[np.float64]) -> list[Case]:
    """Where there is a choice: two grids at least that are not for calibration."""
    groups: dict[tuple[str, int, tuple[int, ...]], list[Record]] = {}
    for r in records:
        if r.use == "check" and r.grid.processes == r.processes:
            groups.setdefault((r.data, r.processes, r.widths), []).append(r)
    result = []
    for (_, processes, widths), rows in sorted(groups.items(), key=lambda item: item[0]):
        if len({str(r.grid) for r in rows}) < 2:
            continue
        measured = {str(r.grid): r.seconds for r in rows}
        assert len(measured) == len(rows), "one record a grid"
        predicted = {g: float(terms(widths, parse_grid(g), processes) @ constants) for g in measured}
        result.append(Case(processes, widths, measured, predicted))
    return result


def speed_ups(records: Sequence[Record], constants: NDArray[np.float64]) -> list[tuple[str, float, float, float]]:
    """The paper's three speed-ups on 32 processes: what it states, what its records give, what is predicted."""
    seconds = {(r.data, r.widths[1], r.processes, str(r.grid)): r.seconds for r in records}
    found = []
    for name, stated, width, grid in (
        ("samples, width 512", 5.8, 512, "32x1"),
        ("outputs, width 1,024", 1.2, 1024, "1x32"),
    ):
        widths = 4, width, 1
        one, many = ((2, "1x1"), (32, grid))  # their 1x1 ran on two
        measured = seconds["medium", width, *one] / seconds["medium", width, *many]
        ours = [float(terms(widths, parse_grid(g), processes) @ constants) for processes, g in (one, many)]
        found.append((f"{grid} against 1x1 ({name})", stated, measured, ours[0] / ours[1]))
    both = [case for case in cases(records, constants) if case.processes == 32 and "32x1" in case.measured]
    mixed = [(case, g) for case in both for g in case.measured if parse_grid(g).model_parts not in (1, 32)]
    case, grid = min(mixed, key=lambda pair: pair[0].loss(pair[1]))
    ratio, ours_ratio = (times["32x1"] / times[grid] for times in (case.measured, case.predicted))
    return [*found, (f"{grid} against 32x1 (both, width {case.widths[1]})", 0.99, ratio, ours_ratio)]
