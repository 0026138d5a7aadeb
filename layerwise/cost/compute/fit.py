"""The fit: times of cells that nobody measured, from those that somebody did.

A direction of a cell takes a·kernels + b·arithmetic + c·memory, the roofline's own terms with factors of at least 0
that make the relative errors smallest (non-negative least squares, Lawson and Hanson 1974: of three terms all 7 subsets
are tried). The factors are those of the same operator where enough of its cells were measured, else of its kind, else
of all.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain, combinations
from statistics import median

import numpy as np

from layerwise.geometry.arrays import Floats
from layerwise.machine.layer_times import CellTime, Extents, LayerTimes, Work

ENOUGH = 4  # cells for three factors
FOLDS = 5
SUBSETS = [list(s) for s in chain.from_iterable(combinations(range(3), n) for n in (1, 2, 3))]
Rows = list[tuple[Work, float]]


@dataclass(frozen=True, slots=True)
class Fit:
    """Factors (3,) of kernels, arithmetic and memory by group, and by direction: 0 forward, 1 backward."""

    factors: Mapping[tuple[str, int], Floats]

    def __call__(self, operator: str, direction: int, work: Floats) -> Floats | None:
        """(C,) seconds for `work` (C, 3); None where nothing comparable was measured."""
        for group in groups(operator):
            if (group, direction) in self.factors:
                time: Floats = work @ self.factors[group, direction]
                return time
        return None


@lru_cache(maxsize=65536)
def groups(operator: str) -> tuple[str, ...]:
    """The operator itself, its kind, all: whose cells its times are like, the likest first."""
    if not operator.startswith("{"):  # updates, and what a step has beside layers: like nothing else
        return (operator,)
    named = json.loads(operator)
    kinds = [named["op"], *(row[0] for row in named.get("followers", ()))]
    return operator, "+".join(str(row.get("fn") or row["kind"]) for row in kinds), str(kinds[0]["kind"]), "all"


def fitted(cells: Mapping[str, Mapping[Extents, CellTime]]) -> Fit:
    """The factors that fit these cells."""
    return _fitted((name, time) for name, times in cells.items() for time in times.values())


def held_out_error(times: LayerTimes) -> float | None:
    """The median relative error, both directions together, of cells that were left out of the fit, a fifth at a time.

    None where fewer than 10 cells of layers were measured.
    """
    rows = [(name, time) for name, by_cell in times.cells.items() if name[0] == "{" for time in by_cell.values()]
    errors = []
    for fold in range(FOLDS if len(rows) >= 2 * FOLDS else 0):
        fit = _fitted(row for i, row in enumerate(rows) if i % FOLDS != fold)
        for name, time in rows[fold::FOLDS]:
            both = [fit(name, i, _row(work)) for i, work in enumerate((time.forward, time.backward))]
            real = time.forward_s + time.backward_s
            if real > 0:
                errors.append(abs(sum(float(t[0]) for t in both if t is not None) / real - 1))
    return median(errors) if errors else None


def _fitted(rows: Iterable[tuple[str, CellTime]]) -> Fit:
    samples: dict[tuple[str, int], Rows] = defaultdict(list)
    for name, time in rows:
        for direction, (work, seconds) in enumerate(((time.forward, time.forward_s), (time.backward, time.backward_s))):
            if seconds > 0:
                for group in groups(name):
                    samples[group, direction].append((work, seconds))
    return Fit({key: _factors(rows_here) for key, rows_here in samples.items() if len(rows_here) >= ENOUGH})


def _factors(rows: Sequence[tuple[Work, float]]) -> Floats:
    """Non-negative factors with the least sum of squared relative errors."""
    a = np.concatenate([_row(work) for work, _ in rows]) / np.array([[seconds] for _, seconds in rows])
    best, least = np.zeros(3), np.inf
    for subset in SUBSETS:
        factors, *_ = np.linalg.lstsq(a[:, subset], np.ones(len(a)), rcond=None)
        error = float(np.square(a[:, subset] @ factors - 1).sum())
        if (factors >= 0).all() and error < least:
            best, least = np.zeros(3), error
            best[subset] = factors
    return best


def _row(work: Work) -> Floats:
    return np.array([[work.kernels, work.arithmetic_s, work.memory_s]])
