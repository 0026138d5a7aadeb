"""Measured runs beside their projections: accuracy as the paper defines it, and runs that are out of line.

A file is `{"runs": [{"strategy": "data", "gpus": 16, "batch": 1024, "iteration_s": 0.23}, ...]}`. Instead of
`iteration_s`, which may be a list of iterations, a run may have `epoch_s` and `samples`; `inside` (devices a group)
is for hybrids (df, ds), `segments` for pipelines. `batch` is of all devices together.
"""

from __future__ import annotations

import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from layerwise.errors import LayerwiseError, nearest
from layerwise.files import read_json
from layerwise.machine import MAX_GPUS
from layerwise.oracle.question import NAMES, Answer, canonical, unknown
from layerwise.plan import MAX_BATCH

FENCE = 1.5  # Tukey, Exploratory Data Analysis (1977): outliers are beyond the quartiles by 1.5 times their distance
MUCH = 1.1  # ... and above the median by a tenth: equal times have no spread, and each beyond them is no outlier
SHARE = 0.05  # of a run's iterations: so many outliers are worth a word
FOR = {"inside": ("df", "ds"), "segments": ("pipeline",)}  # fields that only some strategies have
MOST = {
    "gpus": MAX_GPUS,
    "batch": MAX_BATCH,
    "samples": 10**15,
    "inside": MAX_GPUS,
    "segments": MAX_BATCH,
}
FIELDS = ("strategy", "iteration_s", "epoch_s", *MOST)
SECONDS = 1e-12, 1e12  # of what can have been measured; beyond, ratios leave the range of floats
ENOUGH = 4  # measurements that have quartiles


@dataclass(frozen=True, slots=True)
class Run:
    """A measured run."""

    strategy: str
    gpus: int
    batch: int
    iteration_s: float  # the median, where several iterations were measured
    inside: int | None = None
    segments: int | None = None
    iterations: int = 1  # that were measured
    slow: int = 0  # how many of these are outliers


@dataclass(frozen=True, slots=True)
class Compared:
    """A run and its projection."""

    run: Run
    answer: Answer
    projected_s: float  # with overlap
    abnormal: str = ""  # why it is out of line

    @property
    def accuracy(self) -> float:
        """1 - |projected - measured| / measured."""
        return accuracy(self.projected_s, self.run.iteration_s)


def accuracy(projected_s: float, measured_s: float) -> float:
    """The paper's: 1 - |projected - measured| / measured. Negative where the projection is more than twice too long."""
    return 1 - abs(projected_s - measured_s) / measured_s


def read_runs(path: str | os.PathLike[str]) -> list[Run]:
    """The runs of a file. LayerwiseError names the run and the field that is missing or wrong."""
    where = f"measured file {os.fspath(path)!r}"
    value = read_json(path, "measured file")
    runs = value.get("runs") if isinstance(value, dict) else value
    if not isinstance(runs, list) or not runs:
        raise LayerwiseError(f'{where} must be {{"runs": [...]}} with at least one run')
    return [_run(run, f"{where}, run {number}") for number, run in enumerate(runs, start=1)]


def _run(run: object, where: str) -> Run:
    if not isinstance(run, dict):
        raise LayerwiseError(f"{where}: must be a JSON object, not {type(run).__name__}")
    given = run.get("strategy")
    name = canonical(given) if isinstance(given, str) else _short(given)
    if name not in NAMES:
        raise LayerwiseError(f"{where}: {_missing(run, 'strategy') or unknown(name)}")
    for key in run:
        if key not in FIELDS:
            known = ", ".join(FIELDS)
            raise LayerwiseError(f"{where}: unknown field {key!r}{nearest(key, FIELDS)}; there are {known}")
        if key in FOR and name not in FOR[key]:
            raise LayerwiseError(f"{where}: {key!r} is for {' and '.join(FOR[key])}, not for {name}")
    gpus, batch = _whole(run, "gpus", where), _whole(run, "batch", where)
    epoch_s = None
    if "epoch_s" in run:
        epoch_s = _seconds(run["epoch_s"], "epoch_s", where) * batch / _whole(run, "samples", where)
    if "iteration_s" in run:
        times = run["iteration_s"] if isinstance(run["iteration_s"], list) else [run["iteration_s"]]
        if not times:
            raise LayerwiseError(f"{where}: 'iteration_s' is an empty list")
        times = [_seconds(time, "iteration_s", where) for time in times]
    elif epoch_s is not None:
        times = [epoch_s]
    else:
        raise LayerwiseError(f"{where}: has neither 'iteration_s' nor 'epoch_s' (with 'samples'), in seconds")
    inside, segments = (_whole(run, key, where) if key in run else None for key in ("inside", "segments"))
    fence = _fence(times)
    slow = len([time for time in times if time > fence])
    return Run(name, gpus, batch, statistics.median(times), inside, segments, len(times), slow)


def _missing(run: Mapping[str, object], key: str) -> str:
    return "" if key in run else f"{key!r} is missing"


def _whole(run: Mapping[str, object], key: str, where: str) -> int:
    value = run.get(key)
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise LayerwiseError(
            f"{where}: {_missing(run, key) or f'{key!r} must be a whole number of at least 1, not {_short(value)}'}"
        )
    if value > MOST[key]:
        raise LayerwiseError(f"{where}: {key!r} must be at most {MOST[key]:,}, not {_short(value)}")
    return value


def _short(value: object) -> str:
    """A text as it stands in the file, or its beginning."""
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:40]}..."


def _seconds(value: object, key: str, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise LayerwiseError(f"{where}: {key!r} must be seconds above 0, not {_short(value)}")
    if not SECONDS[0] <= value <= SECONDS[1]:
        raise LayerwiseError(
            f"{where}: {key!r} must be seconds from {SECONDS[0]:g} to {SECONDS[1]:g}, not {_short(value)}"
        )
    return float(value)


def _fence(values: Sequence[float]) -> float:
    """Above it, a value is an outlier; infinity for fewer values than have quartiles."""
    if len(values) < ENOUGH:
        return math.inf
    first, _, third = statistics.quantiles(values, n=4, method="inclusive")
    return max(third + FENCE * (third - first), MUCH * statistics.median(values))


def compare(pairs: Sequence[tuple[Run, Answer]]) -> list[Compared]:
    """Runs, each beside its projection; abnormal ones are slower against it than the other runs of their strategy are.

    That is what congestion by others does: the projection knows of the training's own traffic only.
    """
    ratios: dict[str, list[float]] = {}
    for run, answer in pairs:
        ratios.setdefault(run.strategy, []).append(run.iteration_s / answer.overlapped_s)
    result = []
    for run, answer in pairs:
        ratio, rest = run.iteration_s / answer.overlapped_s, ratios[run.strategy]
        notes = []
        if ratio > _fence(rest):
            usual = statistics.median(rest)
            notes.append(f"{ratio:.2f}× its projection, where runs of {run.strategy} take {usual:.2f}×: congestion?")
        if run.slow > SHARE * run.iterations:
            notes.append(f"{run.slow} of {run.iterations} iterations are outliers")
        result.append(Compared(run, answer, answer.overlapped_s, "; ".join(notes)))
    return result


def mean_accuracy(compared: Sequence[Compared]) -> dict[str, float]:
    """The mean accuracy of each strategy's runs, abnormal ones included."""
    accuracies: dict[str, list[float]] = {}
    for c in compared:
        accuracies.setdefault(c.run.strategy, []).append(c.accuracy)
    return {name: statistics.fmean(values) for name, values in accuracies.items()}
